"""What each replica's prefix cache is believed to hold."""

from __future__ import annotations

from collections.abc import Sequence


class CacheView:
    """Blocks of the turns that were sent to each replica since the weights last changed.

    A block counts from when its turn is placed: vLLM shares it with other requests as soon as it is
    computed, so siblings that start together hit each other's prompt. Nothing is known of eviction,
    so apart from the partial block at its end a belief is an upper bound: the difference to the
    measured `num_cached_tokens` shows how much the engine has evicted. Asynchronous trainers go on
    generating while a step is reported, so there some turns fall on the wrong side of it.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._blocks: dict[str, set[int]] = {}

    def believed_tokens(self, replica_id: str, block_hashes: Sequence[int]) -> int:
        """Tokens of the longest prefix whose blocks were all sent to the replica."""
        known = self._blocks.get(replica_id, set())
        hit_blocks = 0
        for block_hash in block_hashes:
            if block_hash not in known:
                break
            hit_blocks += 1
        return hit_blocks * self._block_size_tokens

    def record(self, replica_id: str, block_hashes: Sequence[int]) -> None:
        """Note that the replica computes these blocks."""
        self._blocks.setdefault(replica_id, set()).update(block_hashes)

    def drop(self, replica_id: str) -> None:
        """Forget a replica's blocks: it left."""
        self._blocks.pop(replica_id, None)

    def drop_all(self) -> None:
        """Forget all blocks: the weights changed."""
        self._blocks.clear()
