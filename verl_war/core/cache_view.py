"""What each replica's prefix cache is believed to hold."""

from __future__ import annotations

from collections.abc import Sequence


class CacheView:
    """Blocks that were computed on each replica since its weights last changed.

    It knows nothing of eviction, so a belief is an upper bound: the difference to the measured
    `num_cached_tokens` shows how much the engine has evicted.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._blocks: dict[str, set[int]] = {}

    def believed_tokens(self, replica_id: str, block_hashes: Sequence[int]) -> int:
        """Tokens of the longest prefix whose blocks were all computed on the replica."""
        known = self._blocks.get(replica_id, set())
        hit_blocks = 0
        for block_hash in block_hashes:
            if block_hash not in known:
                break
            hit_blocks += 1
        return hit_blocks * self._block_size_tokens

    def record(self, replica_id: str, block_hashes: Sequence[int]) -> None:
        """Note that the replica has computed these blocks."""
        self._blocks.setdefault(replica_id, set()).update(block_hashes)

    def drop(self, replica_id: str) -> None:
        """Forget all of a replica's blocks: its weights changed or it left."""
        self._blocks.pop(replica_id, None)
