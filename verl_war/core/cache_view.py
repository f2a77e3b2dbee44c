"""What each replica's prefix cache is believed to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Chain = Sequence[int]
"""Chain hashes of a context's full blocks: equal at position i means equal up to position i."""


def common_blocks(left: Chain, right: Chain) -> int:
    """Leading blocks that two contexts share, by bisection over their chain hashes: O(log n)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class _ReplicaCache:
    prompts: dict[str, Chain] = field(default_factory=dict)
    latest: Chain = ()


class CacheView:
    """Contexts that were sent to each replica since the weights last changed.

    For each conversation its latest context counts, for each group the prompt that its first turns share, and
    for everybody the latest new prompt on the replica, with which a system prompt is shared. A context counts
    from when its turn is placed: vLLM shares a block with other requests as soon as it is computed, so siblings
    that start together hit each other's prompt. Nothing is known of eviction, so apart from the partial block
    at its end a belief is an upper bound: the difference to the measured `num_cached_tokens` shows how much the
    engine has evicted. Asynchronous trainers go on generating while a step is reported, so there some turns
    fall on the wrong side of it.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._replicas: dict[str, _ReplicaCache] = {}
        self._contexts: dict[str, tuple[str, Chain]] = {}
        self._holders: dict[str, list[str]] = {}

    def believed_tokens(self, replica_id: str, session_id: str, group_id: str, chain: Chain) -> int:
        """Tokens of the longest prefix of a context that is believed to be in the replica's cache."""
        cache = self._replicas.get(replica_id)
        if cache is None or not chain:
            return 0
        blocks = common_blocks(cache.latest, chain)
        prompt = cache.prompts.get(group_id)
        if prompt is not None:
            blocks = max(blocks, common_blocks(prompt, chain))
        home, context = self._contexts.get(session_id, ("", ()))
        if home == replica_id:
            blocks = max(blocks, common_blocks(context, chain))
        return blocks * self._block_size_tokens

    def record(self, replica_id: str, session_id: str, group_id: str, chain: Chain) -> None:
        """Note that the replica computes this context; the conversation's cache elsewhere is given up."""
        cache = self._replicas.setdefault(replica_id, _ReplicaCache())
        if self._contexts.get(session_id, ("",))[0] != replica_id:
            cache.latest = chain
            if group_id and group_id not in cache.prompts:
                cache.prompts[group_id] = chain
                self._holders.setdefault(group_id, []).append(replica_id)
        self._contexts[session_id] = (replica_id, chain)

    def holders(self, group_id: str) -> list[str]:
        """Replicas on which a conversation of the group was begun, in that order."""
        return self._holders.get(group_id, [])

    def forget(self, session_id: str) -> None:
        """A conversation ended, or its cache is not to be counted on: it was paused, and may be evicted."""
        self._contexts.pop(session_id, None)

    def drop(self, replica_id: str) -> None:
        """Forget a replica's cache: it left."""
        cache = self._replicas.pop(replica_id, None)
        for group_id in cache.prompts if cache is not None else ():
            self._holders[group_id].remove(replica_id)

    def drop_all(self) -> None:
        """Forget everything: the weights changed."""
        self._replicas.clear()
        self._contexts.clear()
        self._holders.clear()
