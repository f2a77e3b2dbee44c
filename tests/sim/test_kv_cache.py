"""Extents against a cache of single blocks that does what vLLM's block pool does."""

import random
from collections import OrderedDict

from verl_war.sim.kv_cache import UNLIMITED_BLOCKS, HostTier, PathPart, PrefixCache, blocks_for


class BlockPool:
    """vLLM's way: one entry per block, freed from a context's end, evicted from the queue's head."""

    def __init__(self, capacity):
        self.free = capacity
        self.refs = {}
        self.idle = OrderedDict()

    def available(self):
        return self.free + len(self.idle)

    def match(self, blocks):
        hit = 0
        while hit < len(blocks) and blocks[hit] in self.refs:
            hit += 1
        return hit

    def use(self, blocks):
        for block in blocks:
            if block not in self.refs:
                if self.free:
                    self.free -= 1
                else:
                    oldest, _ = self.idle.popitem(last=False)
                    del self.refs[oldest]
                self.refs[block] = 0
            self.idle.pop(block, None)
            self.refs[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.idle[block] = None


def blocks_of(path, count):
    blocks = []
    for part in path:
        blocks.extend((part.key, index) for index in range(min(part.blocks, count - len(blocks))))
    return blocks


def test_random_traffic_equals_a_cache_of_single_blocks():
    rng = random.Random(3)
    for _ in range(20):
        cache, pool = PrefixCache(60), BlockPool(60)
        lengths = [9 + rng.randrange(5) for _ in range(8)]
        owner = list(range(8))
        held = {}
        for _ in range(400):
            key = rng.randrange(8)
            if key in held:
                path, count = held.pop(key)
                cache.release(path, count * 64, count)
                pool.release(blocks_of(path, count))
                continue
            lengths[key] += rng.randrange(4)
            if lengths[key] > 24:  # a context only grows: the next trajectory begins
                lengths[key], owner[key] = 9, owner[key] + 10
            path = (PathPart(1000, 3), PathPart(2000 + key // 3, 4), PathPart(owner[key], UNLIMITED_BLOCKS))
            count = lengths[key]
            match = cache.match(path, count)
            assert match.blocks == pool.match(blocks_of(path, count))
            if count - match.blocks + match.idle_blocks > cache.available_blocks:
                continue
            cache.acquire(path)
            cache.fill(path, count)
            # The single blocks that hit are taken out of the queue before any is evicted.
            hit = blocks_of(path, match.blocks)
            pool.use(hit)
            pool.use(blocks_of(path, count)[match.blocks :])
            held[key] = (path, count)
            assert cache.available_blocks == pool.available()


def test_a_context_of_which_nothing_is_left_is_forgotten_from_its_end():
    cache = PrefixCache(4)
    for key in (1, 2):
        path = (PathPart(key, UNLIMITED_BLOCKS),)
        cache.acquire(path)
        cache.fill(path, 2)
        cache.release(path, 128, 2)
    assert (cache.available_blocks, cache.used_blocks) == (4, 0)
    cache.take(1)
    assert cache.match((PathPart(1, UNLIMITED_BLOCKS),), 9).blocks == 1
    assert cache.match((PathPart(2, UNLIMITED_BLOCKS),), 9).blocks == 2


def test_only_full_blocks_stay_cached():
    cache = PrefixCache(4)
    path = (PathPart(1, UNLIMITED_BLOCKS),)
    cache.acquire(path)
    cache.fill(path, blocks_for(100))
    cache.release(path, 100, 2)
    assert cache.match(path, 9).blocks == 1
    assert cache.available_blocks == 4


def test_host_tier_keeps_what_the_device_evicts_and_evicts_the_oldest():
    host = HostTier(5)
    host.store(1, 3)
    host.store(2, 2)
    host.store(1, 2)
    assert (host.blocks(1), host.blocks(2)) == (3, 2)
    host.store(3, 1)
    assert (host.blocks(1), host.blocks(2), host.blocks(3)) == (3, 1, 1)


def test_host_blocks_continue_behind_the_device_hit():
    cache = PrefixCache(6, host_blocks=100)
    shared, own = PathPart(7, 2), PathPart(1, UNLIMITED_BLOCKS)
    cache.acquire((shared, own))
    cache.fill((shared, own), 5)
    cache.release((shared, own), 5 * 64, 5)
    cache.take(3)
    match = cache.match((shared, own), 5)
    assert (match.blocks, match.host_blocks) == (3, 2)
    cache.clear()
    assert cache.match((shared, own), 5) == (0, 0, 0)
