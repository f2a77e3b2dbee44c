"""vLLM's scheduling on cases worked out by hand."""

import heapq
import random

import pytest

from tests.sim.helpers import machine, own
from verl_war.sim.kv_cache import UNLIMITED_BLOCKS, PathPart
from verl_war.sim.replica import Replica, Request


def drive(replica, arrivals):
    """Submit `(at_s, request)` at their times, run to the end and return finish times by key."""
    arrivals = sorted(arrivals, key=lambda entry: entry[0])
    ends = {}
    while arrivals or replica.event_s is not None:
        if arrivals and (replica.event_s is None or arrivals[0][0] < replica.event_s):
            at_s, request = arrivals.pop(0)
            replica.submit(request, at_s)
            continue
        now_s = replica.event_s
        for request in replica.end_steps(now_s):
            ends[request.key] = now_s
    return ends


def test_prefill_samples_the_first_token_and_each_step_one_more():
    replica = Replica(machine())
    ends = drive(replica, [(5.0, Request(1, own(1), 100, 3))])
    assert ends == {1: pytest.approx(5.0 + 2.0 + 1.0 + 1.0)}
    assert replica.counters.prefill_tokens == 100
    assert replica.counters.decode_tokens == 2
    assert replica.counters.engine_steps == 3
    assert replica.counters.busy_s == pytest.approx(4.0)


def test_next_turn_finds_the_full_blocks_of_the_last_one():
    replica = Replica(machine())
    second = Request(1, own(1), 200, 1)
    drive(replica, [(0.0, Request(1, own(1), 100, 30)), (100.0, second)])
    # 100 + 29 tokens have KV (the last sampled one has not): two full blocks.
    assert second.cached_tokens == 128
    assert replica.counters.prefill_tokens == 100 + 72


def test_a_fully_cached_prompt_still_computes_its_last_block():
    replica = Replica(machine())
    second = Request(2, (PathPart(9, 2), PathPart(2, UNLIMITED_BLOCKS)), 128, 1)
    first = Request(1, (PathPart(9, 2), PathPart(1, UNLIMITED_BLOCKS)), 128, 1)
    drive(replica, [(0.0, first), (10.0, second)])
    assert second.cached_tokens == 64


def test_siblings_that_start_together_share_their_prompt():
    replica = Replica(machine())
    requests = [Request(key, (PathPart(9, 4), PathPart(key, UNLIMITED_BLOCKS)), 260, 2) for key in (1, 2)]
    replica.submit(requests[0], 0.0)
    replica.submit(requests[1], 0.1)
    assert [r.key for r in replica.end_steps(replica.event_s)] == []
    assert requests[1].cached_tokens == 256
    assert replica.cache.used_blocks == 4 + 1 + 1


def test_chunked_prefill_shares_the_budget_with_decodes():
    replica = Replica(machine(max_num_batched_tokens=50))
    replica.submit(Request(1, own(1), 40, 10), 0.0)
    assert replica.event_s == pytest.approx(1.4)
    replica.submit(Request(2, own(2), 98, 1), 1.0)
    replica.end_steps(replica.event_s)
    # One decode leaves 49 tokens: 98 take two steps of 1 + 0.49 s.
    assert replica.event_s == pytest.approx(1.4 + 1.49)
    replica.end_steps(replica.event_s)
    finished = replica.end_steps(replica.event_s)
    assert [request.key for request in finished] == [2]
    assert replica.counters.prefill_tokens == 138


def test_waiting_requests_start_in_order_and_only_when_their_whole_prompt_fits():
    replica = Replica(machine(kv_capacity_tokens=64 * 4))
    ends = drive(
        replica,
        [(0.0, Request(1, own(1), 150, 5)), (0.1, Request(2, own(2), 120, 1)), (0.2, Request(3, own(3), 10, 1))],
    )
    # The first takes 3 of 4 blocks; the second needs 2, so the third, though it fits, waits behind it.
    assert ends[1] < ends[2] == ends[3]


def test_without_a_free_block_the_last_request_is_preempted_and_recomputed():
    replica = Replica(machine(kv_capacity_tokens=64 * 4))
    first, second = Request(1, own(1), 64, 100), Request(2, own(2), 64, 100)
    replica.submit(first, 0.0)
    ends = drive(replica, [(0.1, second)])
    # The first runs one step ahead. Both hold two blocks when it needs a third.
    assert replica.counters.preemptions == 1
    assert ends[1] < ends[2]
    assert first.generated == second.generated == 100
    assert replica.counters.decode_tokens == 2 * 99 - 1  # the token after the recomputation comes with its prefill
    assert replica.cache.available_blocks == 4


def test_a_request_larger_than_the_cache_is_an_error():
    replica = Replica(machine(kv_capacity_tokens=64))
    with pytest.raises(AssertionError, match="does not fit"):
        replica.submit(Request(1, own(1), 100, 1), 0.0)


def test_priority_orders_the_queue():
    def order(by_priority):
        replica = Replica(machine(max_num_seqs=1), by_priority=by_priority)
        arrivals = [(0.0, Request(1, own(1), 10, 2)), (0.1, Request(2, own(2), 10, 2, priority=5))]
        ends = drive(replica, [*arrivals, (0.2, Request(3, own(3), 10, 2, priority=1))])
        return sorted(ends, key=ends.get)

    assert order(False) == [1, 2, 3]
    assert order(True) == [1, 3, 2]


def test_least_recently_used_context_is_evicted_first():
    replica = Replica(machine(kv_capacity_tokens=64 * 8))
    again = Request(1, own(1), 200, 1)
    newer = Request(2, own(2), 200, 1)
    drive(
        replica,
        [
            (0.0, Request(1, own(1), 192, 1)),
            (10.0, Request(2, own(2), 192, 1)),
            (20.0, Request(3, own(3), 256, 1)),
            (30.0, newer),
            (40.0, again),
        ],
    )
    assert newer.cached_tokens == 192
    # The third took the 2 free blocks and 2 of the oldest 3, its end first; the fourth's new block took the last.
    assert again.cached_tokens == 0


def test_host_tier_hit_costs_the_transfer_instead_of_the_prefill():
    fast = {"kv_capacity_tokens": 64 * 8, "kv_bytes_per_token": 10, "host_bytes_per_s": 640.0}
    arrivals = [(0.0, 1), (20.0, 2), (40.0, 1)]

    def last_end(host_tokens):
        replica = Replica(machine(**fast), host_tokens=host_tokens)
        ends = drive(replica, [(at_s, Request(key, own(key), 448, 1)) for at_s, key in arrivals])
        return ends[1] - 40.0, replica.counters

    with_tier, counters = last_end(10_000)
    without, _ = last_end(0)
    # The second context left one block of the first on the device; the last block is always computed.
    assert without == pytest.approx(1 + 3.84)
    # 5 blocks of 640 bytes at 640 bytes/s, then 64 tokens.
    assert with_tier == pytest.approx(5 + 1 + 0.64)
    assert counters.cached_tokens == 384


def test_slow_replica_takes_longer():
    ends = [drive(Replica(machine(), slowdown=factor), [(0.0, Request(1, own(1), 100, 9))]) for factor in (1.0, 3.0)]
    assert ends[1][1] == pytest.approx(3 * ends[0][1])


def test_drop_all_returns_everything_and_leaves_an_empty_replica():
    replica = Replica(machine(max_num_seqs=1))
    for key in (1, 2):
        replica.submit(Request(key, own(key), 10, 5), 0.0)
    assert [request.key for request in replica.drop_all()] == [1, 2]
    assert (replica.running, replica.waiting, replica.event_s) == (0, 0, None)
    assert replica.cache.used_blocks == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by_priority", [False, True])
def test_many_steps_at_once_equal_single_steps(seed, by_priority):
    rng = random.Random(seed)
    hardware = machine(
        base_s=0.01, per_request_s=0.001, per_token_s=2e-4, per_kv_token_s=1e-6, weights_s=0.004,
        overlapped=seed % 2 == 0, kv_capacity_tokens=64 * 60, max_num_batched_tokens=256, kv_bytes_per_token=100,
        host_bytes_per_s=1e6,
    )  # fmt: skip
    plans = [
        [(rng.uniform(0, 2), rng.randrange(10, 300), rng.randrange(1, 120), rng.randrange(3)) for _ in range(4)]
        for _ in range(16)
    ]

    def outcome(max_steps):
        replica = Replica(hardware, 64 * 40 if seed > 2 else 0, by_priority, 1.0, max_steps)
        arrivals = [(plan[0][0], key, 0, 100) for key, plan in enumerate(plans)]
        ends, cached = {}, {}
        heapq.heapify(arrivals)
        while arrivals or replica.event_s is not None:
            if arrivals and (replica.event_s is None or arrivals[0][0] < replica.event_s):
                at_s, key, index, context = heapq.heappop(arrivals)
                _, grown, output, priority = plans[key][index]
                path = (PathPart(100 + key % 5, 1), PathPart(key, UNLIMITED_BLOCKS))
                replica.submit(Request((key, index), path, context + grown, output, priority), at_s)
                continue
            now_s = replica.event_s
            for request in replica.end_steps(now_s):
                key, index = request.key
                ends[request.key], cached[request.key] = now_s, request.cached_tokens
                if index < 3:
                    context = request.prompt_tokens + request.output_tokens
                    heapq.heappush(arrivals, (now_s + plans[key][index + 1][0], key, index + 1, context))
        return ends, cached, replica.counters

    ends, cached, counters = outcome(1 << 30)
    ends_single, cached_single, counters_single = outcome(1)
    assert cached == cached_single
    assert ends == pytest.approx(ends_single)
    assert counters.busy_s == pytest.approx(counters_single.busy_s)
    for name in ("engine_steps", "prefill_tokens", "decode_tokens", "preemptions"):
        assert getattr(counters, name) == getattr(counters_single, name), name
    assert len(ends) == 64
    assert counters.preemptions > 0
