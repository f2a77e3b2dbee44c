"""Prefix cache of one replica: blocks of contexts, shared, reference-counted, evicted least recently used first.

Blocks that only ever occur together are one `Extent`: the system prompt, the prompt of a group, and what one
trajectory added. A context is a path of extents. vLLM frees a context from its end to its beginning, so eviction
shortens the extent that was freed first at its end, and an extent is never evicted before those that follow it:
the accounting equals that of single blocks at a cost that does not grow with the context.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

BLOCK_TOKENS = 64
"""Tokens per block; vLLM's 16 would count the same contexts to within 48 tokens at four times the boundaries."""

UNLIMITED_BLOCKS = 1 << 40
"""Length of a path's last extent, the one that grows."""


class PathPart(NamedTuple):
    """One part of a context's path: the key of its extent, and how many blocks it has when complete."""

    key: int
    blocks: int


Path = tuple[PathPart, ...]


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens, the last perhaps partly filled."""
    return -(-tokens // BLOCK_TOKENS)


class Extent:
    """Consecutive blocks in the cache: `blocks` of them, used by `refs` requests."""

    __slots__ = ("blocks", "refs")

    def __init__(self) -> None:
        self.blocks = 0
        self.refs = 0


class Match(NamedTuple):
    """What a context finds in the cache: blocks on the device, and after them blocks in the host tier.

    `idle_blocks` of the device's are not in use by any request, so using them takes from what is available.
    """

    blocks: int
    host_blocks: int
    idle_blocks: int


class HostTier:
    """Copy of computed blocks in host memory, least recently used evicted first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._used = 0
        self._extents: OrderedDict[int, int] = OrderedDict()

    def blocks(self, key: int) -> int:
        """How many blocks of the extent it holds."""
        return self._extents.get(key, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._extents.clear()
        self._used = 0

    def store(self, key: int, blocks: int) -> None:
        """Take in an extent that was just freed; what it holds of it already is kept."""
        held = self._extents.pop(key, 0)
        blocks = max(blocks, held)
        self._used += blocks - held
        if blocks:
            self._extents[key] = blocks
        while self._used > self._capacity:
            oldest, held = next(iter(self._extents.items()))
            evicted = min(held, self._used - self._capacity)
            self._used -= evicted
            if evicted == held:
                del self._extents[oldest]
            else:
                self._extents[oldest] = held - evicted


class PrefixCache:
    """Blocks of one replica.

    Args:
        capacity_blocks: Blocks on the device.
        host_blocks: Blocks of the host tier; 0 for none.
    """

    def __init__(self, capacity_blocks: int, host_blocks: int = 0) -> None:
        self.capacity_blocks = capacity_blocks
        self._free = capacity_blocks
        self._idle_blocks = 0
        self._extents: dict[int, Extent] = {}
        self._idle: OrderedDict[int, Extent] = OrderedDict()
        self._host = HostTier(host_blocks) if host_blocks else None

    @property
    def available_blocks(self) -> int:
        """Blocks that a request can have: free ones and those that can be evicted."""
        return self._free + self._idle_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks in use by running requests, what vLLM reports as KV usage."""
        return self.capacity_blocks - self.available_blocks

    def match(self, path: Path, max_blocks: int) -> Match:
        """Longest prefix of a path that is cached, at most `max_blocks`."""
        hit = idle = 0
        complete = True
        for part in path:
            extent = self._extents.get(part.key)
            if extent is None:
                complete = False
                break
            if not extent.refs:
                idle += extent.blocks
            hit += extent.blocks
            if extent.blocks < part.blocks:
                complete = False
                break
        hit = min(hit, max_blocks)
        host = 0
        if self._host is not None and not complete and hit < max_blocks:
            host = self._host_blocks(path, hit, max_blocks)
        return Match(hit, host, idle)

    def _host_blocks(self, path: Path, hit: int, max_blocks: int) -> int:
        """Blocks behind the hit on the device that the host holds without a gap."""
        assert self._host is not None
        reached = 0
        total = hit
        for part in path:
            held = max(self._host.blocks(part.key), min(part.blocks, hit - reached))
            total = max(total, reached + held)
            if held < part.blocks:
                break
            reached += part.blocks
        return min(total, max_blocks) - hit

    def acquire(self, path: Path) -> None:
        """Let a request use the extents of a path; they are not evicted until it releases them."""
        for part in path:
            extent = self._extents.get(part.key)
            if extent is None:
                extent = self._extents[part.key] = Extent()
            if not extent.refs and extent.blocks:
                del self._idle[part.key]
                self._idle_blocks -= extent.blocks
            extent.refs += 1

    def missing_blocks(self, path: Path, blocks: int) -> int:
        """Blocks that `fill` would have to take."""
        missing = 0
        for part in path:
            wanted = min(blocks, part.blocks)
            missing += max(0, wanted - self._extents[part.key].blocks)
            blocks -= wanted
        return missing

    def fill(self, path: Path, blocks: int) -> None:
        """Extend an acquired path to so many blocks."""
        taken = 0
        for part in path:
            wanted = min(blocks, part.blocks)
            extent = self._extents[part.key]
            if wanted > extent.blocks:
                taken += wanted - extent.blocks
                extent.blocks = wanted
            blocks -= wanted
        self.take(taken)

    def take(self, blocks: int) -> None:
        """Take blocks out of what is available: free ones first, then the least recently freed extents' ends."""
        from_free = min(blocks, self._free)
        self._free -= from_free
        blocks -= from_free
        while blocks:
            key, extent = next(iter(self._idle.items()))
            evicted = min(blocks, extent.blocks)
            extent.blocks -= evicted
            self._idle_blocks -= evicted
            blocks -= evicted
            if not extent.blocks:
                del self._idle[key]
                del self._extents[key]

    def release(self, path: Path, tokens: int, held_blocks: int) -> None:
        """End a request's use of a path.

        Args:
            path: What it acquired.
            tokens: Tokens whose KV was computed; only full blocks stay cached.
            held_blocks: Blocks that it holds in all, also those taken one by one since the last `fill`.
        """
        own_base = sum(part.blocks for part in path[:-1])
        own = self._extents[path[-1].key]
        full = max(0, tokens // BLOCK_TOKENS - own_base)
        held = max(own.blocks, held_blocks - own_base)
        own.blocks = min(full, held)
        self._free += held - own.blocks
        for part in reversed(path):
            extent = self._extents[part.key]
            extent.refs -= 1
            if extent.refs:
                continue
            if self._host is not None:
                self._host.store(part.key, extent.blocks)
            if extent.blocks:
                self._idle[part.key] = extent
                self._idle_blocks += extent.blocks
            else:
                del self._extents[part.key]

    def clear(self) -> None:
        """Forget all contexts that are not in use, as a weight update does."""
        for key, extent in self._idle.items():
            self._free += extent.blocks
            del self._extents[key]
        self._idle.clear()
        self._idle_blocks = 0
        if self._host is not None:
            self._host.clear()
