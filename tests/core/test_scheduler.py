"""Admission and placement through the manager's events, on hand-made cases."""

import pytest

from verl_war.core.config import AdmissionConfig, RegimeConfig, SchedulingConfig, WarConfig
from verl_war.core.manager import WorkloadManager
from verl_war.core.scheduler import LOOKAHEAD
from verl_war.core.types import Reason, ReplicaSnapshot, Turn, TurnResult

CAPACITY = 10_000
BLOCK = 10


def reading(capacity=CAPACITY, preemptions=0, **fields):
    readings = dict(running_requests=0, waiting_requests=0, kv_usage=0.0, kv_usage_peak=0.0, engine_steps=0)
    return ReplicaSnapshot(**(readings | fields), kv_capacity_tokens=capacity, preemptions=preemptions)


def manager_of(replicas=("a", "b"), scheduling=True, capacity=CAPACITY, **admission):
    config = WarConfig(
        scheduling=SchedulingConfig(enabled=scheduling, move_min_saving_s=0.01),
        admission=AdmissionConfig(**({"enabled": True, "wait_for_thrash": False, "growth_turns": 0.0} | admission)),
        regime=RegimeConfig(enter_kv_share=0.0, leave_kv_share=0.0),
        block_size_tokens=BLOCK,
        seed=0,
    )
    manager = WorkloadManager(config)
    for replica_id in replicas:
        manager.on_replica_up(replica_id, 0.0)
        manager.on_snapshot(replica_id, reading(capacity), 0.0)
    return manager


def turn(name, tokens, group="", **fields):
    hashes = tuple(hash((name, i)) for i in range(tokens // BLOCK))
    return Turn(session_id=name, trajectory_id=name, group_id=group, prompt_tokens=tokens, block_hashes=hashes,
                **fields)  # fmt: skip


def end(manager, placement, now_s=0.0, completion=0, cached=0, failed=False):
    result = TurnResult(completion_tokens=completion, num_cached_tokens=cached, failed=failed)
    return manager.on_turn_end(placement.trajectory_id, placement.session_id, placement.replica_id, result, now_s)


def names(placements):
    return [placement.session_id for placement in placements]


def test_conversations_are_held_when_their_kv_does_not_fit_and_start_when_it_does():
    manager = manager_of(["a"])
    (first,) = manager.on_turn(turn("s1", 5_000), 0.0)
    assert names(manager.on_turn(turn("s2", 3_000), 0.0)) == ["s2"]
    assert manager.on_turn(turn("s3", 3_000), 1.0) == [] and manager.held_turns == 1
    assert end(manager, first, 2.0) == []  # its context stays: a tool runs
    (started,) = manager.on_trajectory_end("s1", False, 5.0)
    assert (started.session_id, started.reason, started.held_s) == ("s3", Reason.RESUMED, 4.0)


def test_a_group_prompt_counts_once_on_a_replica():
    manager = manager_of(["a"])
    starts = [manager.on_turn(turn(f"s{i}", 4_000, group="g"), 0.0) for i in range(8)]
    assert all(len(start) == 1 for start in starts)
    assert manager.on_turn(turn("other", 6_000, group="h"), 0.0) == []


def test_one_is_always_admitted_however_large():
    manager = manager_of(["a"])
    (placed,) = manager.on_turn(turn("huge", CAPACITY), 0.0)
    assert placed.replica_id == "a"
    assert manager.on_turn(turn("small", 10), 0.0) == []
    assert names(manager.on_trajectory_end("huge", True, 1.0)) == ["small"]


def test_without_capacity_known_nothing_is_held():
    manager = manager_of(["a"], capacity=0)
    assert all(manager.on_turn(turn(f"s{i}", 9_000), 0.0) for i in range(20))


def test_the_longest_remaining_starts_first():
    manager = manager_of(["a"])
    for number in range(4):  # siblings tell: group "long" takes many turns
        for group, turns in (("long", 12), ("short", 1)):
            for _ in range(turns):
                (placed,) = manager.on_turn(turn(f"{group}{number}", 100, group=group), 0.0)
                end(manager, placed, cached=100)
            manager.on_trajectory_end(f"{group}{number}", False, 0.0)
    manager.on_turn(turn("big", 8_900), 0.0)
    manager.on_turn(turn("s", 4_000, group="short"), 1.0)
    manager.on_turn(turn("l", 4_100, group="long"), 2.0)
    assert names(manager.on_trajectory_end("big", False, 3.0)) == ["l", "s"]


def prompt_of(group, common_tokens, own_tokens):
    """A first turn whose prompt begins as those of all other groups do."""
    blocks = [("all", i) for i in range(common_tokens // BLOCK)] + [(group, i) for i in range(own_tokens // BLOCK)]
    return Turn(session_id=group, trajectory_id=group, group_id=group, prompt_tokens=common_tokens + own_tokens,
                block_hashes=tuple(map(hash, blocks)))  # fmt: skip


@pytest.mark.parametrize(("common_tokens", "fitting"), [(3_200, 6), (0, 2)])
def test_what_all_prompts_begin_with_takes_room_once(common_tokens, fitting):
    manager = manager_of(["a"])
    prompts = [prompt_of(f"g{i}", common_tokens, 4_160 - common_tokens) for i in range(8)]
    assert sum(len(manager.on_turn(prompt, 0.0)) for prompt in prompts) == fitting
    peak = manager.report()["war/replica/0/working_set_peak"]
    assert peak == pytest.approx((common_tokens + fitting * (4_160 - common_tokens)) / CAPACITY)


def test_each_replica_holds_what_all_prompts_begin_with():
    manager = manager_of(["a", "b"], capacity=10**6)
    for name in ("g0", "g1"):  # the second one goes to the replica that is empty
        manager.on_turn(prompt_of(name, 3_200, 960), 0.0)
    report = manager.report()
    peaks = [report[f"war/replica/{index}/working_set_peak"] for index in range(2)]
    assert peaks == pytest.approx([4_160 / 10**6] * 2)


def test_another_beginning_is_shared_by_nobody():
    manager = manager_of(["a"], capacity=10**6)
    for name, common_tokens in (("g0", 3_200), ("g1", 3_200), ("other", 0), ("g2", 3_200)):
        manager.on_turn(prompt_of(name, common_tokens, 4_160 - common_tokens), 0.0)
    expected = 4_160 + 960 + 4_160 + 4_160
    assert manager.report()["war/replica/0/working_set_peak"] == pytest.approx(expected / 10**6)


def test_a_full_replica_pauses_the_one_whose_blocks_the_engine_evicts_next():
    manager = manager_of(["a"])
    begun = {name: manager.on_turn(turn(name, 3_000), 0.0)[0] for name in ("first", "last", "running")}
    end(manager, begun["last"], now_s=0.5)
    end(manager, begun["first"], now_s=1.0)
    (again,) = manager.on_turn(turn("first", 5_000), 2.0)  # 11,000 > 10,000
    assert again.reason is Reason.STICKY
    assert manager.on_turn(turn("last", 3_100), 3.0) == [] and manager.held_turns == 1
    assert manager.report()["war/turns_paused"] == 1


def test_the_one_that_asks_is_paused_when_its_tool_took_longest():
    manager = manager_of(["a"])
    (running,) = manager.on_turn(turn("running", 6_000), 0.0)
    (slow,) = manager.on_turn(turn("slow", 1_500), 0.0)
    (other,) = manager.on_turn(turn("other", 1_500), 0.0)
    end(manager, slow, now_s=0.5)
    end(manager, other, now_s=1.0)
    assert manager.on_turn(turn("slow", 5_000), 2.0) == []
    assert names(manager.on_trajectory_end("running", False, 3.0)) == ["slow"]


def test_a_hold_ends_at_its_bound_whether_it_fits_or_not():
    manager = manager_of(["a"], max_hold_s=30.0)
    manager.on_turn(turn("s1", 9_000), 0.0)
    manager.on_turn(turn("s2", 9_000), 1.0)
    assert manager.on_tick(30.0) == []
    (starved,) = manager.on_tick(31.0)
    assert (starved.session_id, starved.reason) == ("s2", Reason.STARVED)


def test_a_context_larger_than_any_replica_is_not_held():
    manager = manager_of(["a", "b"])
    for name, size in (("s1", 9_000), ("s2", 9_000), ("fits", CAPACITY)):
        manager.on_turn(turn(name, size), 0.0)
    assert manager.held_turns == 1, "it may have a replica to itself"
    (oversize,) = manager.on_turn(turn("s4", CAPACITY + 1), 1.0)
    assert oversize.reason is Reason.OVERSIZE, "its engine says that it is too long; no waiting makes it shorter"


def test_a_context_larger_than_any_replica_takes_no_room_from_others():
    manager = manager_of(["a", "b"])
    for name in ("s1", "s2"):
        manager.on_turn(turn(name, 8_000), 0.0)
    before = {name: replica.working_set_tokens for name, replica in manager._fleet.replicas.items()}
    (oversize,) = manager.on_turn(turn("huge", CAPACITY + 1), 1.0)
    assert (oversize.reason, oversize.held_s) == (Reason.OVERSIZE, 0.0)
    assert {name: replica.working_set_tokens for name, replica in manager._fleet.replicas.items()} == before
    assert manager.on_turn(turn("small", 3_000), 1.0) == [], "room is as it was"
    (small,) = manager.on_trajectory_end("s1", False, 1.0)
    assert small.session_id == "small", "while the one that is too long is still there"
    end(manager, oversize, 1.1, failed=True)
    assert manager.on_trajectory_end("huge", True, 1.1) == []
    assert manager.report()["war/starts_oversize"] == 1


def test_a_context_larger_than_any_replica_pauses_nobody():
    manager = manager_of(["a"])
    for name in ("s1", "s2", "s3"):
        (started,) = manager.on_turn(turn(name, 2_000), 0.0)
        end(manager, started, 0.5)
    assert manager.on_turn(turn("huge", CAPACITY + 1), 1.0)
    (again,) = manager.on_turn(turn("s1", 2_500), 2.0)
    assert again.reason is Reason.STICKY
    assert manager.report()["war/turns_paused"] == 0


def test_a_conversation_that_grows_too_long_pauses_nobody():
    manager = manager_of(["a"])
    for name in ("s1", "s2", "s3"):
        (started,) = manager.on_turn(turn(name, 2_000), 0.0)
        end(manager, started, 0.5)
    (grown,) = manager.on_turn(turn("s3", CAPACITY + 1), 1.0)
    assert grown.reason is Reason.STICKY
    assert manager.on_turn(turn("s1", 2_500), 2.0)
    assert manager.report()["war/turns_paused"] == 0


def test_a_group_whose_prompt_is_larger_than_any_replica_reserves_nothing():
    manager = manager_of(["a", "b"])
    manager.on_step_begin(1, 8, 0.0, 4)
    for number in range(4):
        (started,) = manager.on_turn(turn(f"huge{number}", CAPACITY + 1, group="g"), 1.0)
        assert started.reason is Reason.OVERSIZE
    assert all(replica.reserved_tokens == 0 for replica in manager._fleet.replicas.values())
    assert all(replica.working_set_tokens == 0 for replica in manager._fleet.replicas.values())


def test_what_fits_nowhere_any_more_is_found_far_back_in_the_queue():
    manager = manager_of(["a", "b"])
    manager.on_snapshot("b", reading(2 * CAPACITY), 0.0)
    for name, tokens in (("s1", 17_000), ("s2", 8_000)):
        manager.on_turn(turn(name, tokens), 0.0)
    for number in range(2 * LOOKAHEAD):
        assert manager.on_turn(turn(f"held{number}", 9_000), 0.5) == []
    assert manager.on_turn(turn("for b", 15_000), 1.0) == []
    (started,) = manager.on_replica_down("b", 5.0, is_lost=True)
    assert (started.session_id, started.reason) == ("for b", Reason.OVERSIZE)


def test_what_exceeds_all_replicas_that_are_left_is_held_no_longer():
    manager = manager_of(["a", "b"])
    manager.on_snapshot("b", reading(2 * CAPACITY), 0.0)
    for name, tokens in (("s1", 17_000), ("s2", 8_000)):
        manager.on_turn(turn(name, tokens), 0.0)
    assert manager.on_turn(turn("for b", 15_000), 1.0) == []
    (started,) = manager.on_replica_down("b", 5.0, is_lost=True)
    assert (started.session_id, started.replica_id, started.held_s) == ("for b", "a", 4.0)
    assert started.reason is Reason.OVERSIZE


@pytest.mark.parametrize(("capacity", "share"), [(0, 1.0), (CAPACITY, 2.0)])
def test_an_engine_that_understates_its_kv_or_has_not_told_it_may_take_what_is_large(capacity, share):
    manager = manager_of(["a"])
    manager.on_turn(turn("s1", 8_000), 0.0)
    manager.on_replica_up("b", 0.0)
    manager.on_snapshot("b", reading(capacity), 0.0)
    manager._fleet.replicas["b"].trusted_share = share
    manager.on_turn(turn("s2", 8_000), 0.0)
    assert manager.on_turn(turn("large", 15_000), 1.0) == [], "it can run there when there is room"
    manager._fleet.replicas["b"].trusted_share = 1.0
    started = manager.on_snapshot("b", reading(CAPACITY), 2.0) + manager.on_trajectory_end("s1", False, 3.0)
    assert ("large", Reason.OVERSIZE) in [(start.session_id, start.reason) for start in started], "it is known not to"


def test_a_sandbox_is_never_lost_by_a_hold():
    manager = manager_of(["a"], trajectory_ttl_s=100.0, deadline_margin_s=10.0)
    manager.on_turn(turn("s1", 9_000), 0.0)
    manager.on_turn(turn("s2", 9_000), 5.0)
    assert manager.on_tick(94.0) == []
    (saved,) = manager.on_tick(95.0)
    assert (saved.session_id, saved.reason) == ("s2", Reason.DEADLINE)


def siblings(group, count, tokens=2_000):
    hashes = turn(group, tokens).block_hashes
    return [Turn(session_id=f"{group}{i}", trajectory_id=f"{group}{i}", group_id=group, prompt_tokens=tokens,
                 block_hashes=hashes) for i in range(count)]  # fmt: skip


def test_many_groups_stay_together_and_the_fleet_even():
    manager = manager_of("abcd", capacity=10**6)
    manager.on_step_begin(1, 64, 0.0, group_size=8)
    homes = {}
    for group in "pqrstuvw":
        for sibling in siblings(group, 8):
            (placed,) = manager.on_turn(sibling, 0.0)
            homes.setdefault(group, []).append(placed.replica_id)
    assert all(len(set(replicas)) == 1 for replicas in homes.values())
    firsts = [replicas[0] for replicas in homes.values()]
    assert sorted(firsts) == sorted("aabbccdd")


def test_a_group_that_is_the_whole_load_is_spread():
    manager = manager_of("abcd", capacity=10**6)
    manager.on_step_begin(1, 8, 0.0, group_size=8)
    placed = [manager.on_turn(sibling, 0.0)[0].replica_id for sibling in siblings("g", 8)]
    assert sorted(placed) == sorted("aabbccdd")


def test_reservations_for_siblings_that_never_come_end_with_the_step():
    manager = manager_of("ab", capacity=10**6)
    manager.on_step_begin(1, 64, 0.0, group_size=8)
    (alone,) = manager.on_turn(siblings("g", 1)[0], 0.0)
    manager.on_trajectory_end(alone.trajectory_id, False, 1.0)
    manager.on_step_begin(2, 64, 2.0, group_size=1)
    placed = [manager.on_turn(turn(f"s{i}", 1_000), 2.0)[0].replica_id for i in range(8)]
    assert sorted(placed) == sorted("aaaabbbb")


def test_a_burst_of_equal_conversations_is_spread():
    manager = manager_of("abcd", capacity=10**6)
    placed = [manager.on_turn(turn(f"s{i}", 1_000), 0.0)[0].replica_id for i in range(40)]
    counts = [placed.count(replica_id) for replica_id in "abcd"]
    assert max(counts) - min(counts) <= 4


def test_a_conversation_moves_when_that_saves_seconds_and_then_stays():
    manager = manager_of(capacity=10**6)
    (placed,) = manager.on_turn(turn("s", 200), 0.0)
    home, other = placed.replica_id, {"a": "b", "b": "a"}[placed.replica_id]
    end(manager, placed)
    manager.on_replica_down(other, 0.0)
    crowd = [manager.on_turn(turn(f"c{i}", 20_000), 0.0)[0] for i in range(20)]
    assert {placement.replica_id for placement in crowd} == {home}
    manager.on_replica_up(other, 1.0)
    (moved,) = manager.on_turn(turn("s", 300), 1.0)
    assert (moved.replica_id, moved.reason) == (other, Reason.MOVED)
    assert moved.price_s["saved_s"] > 0
    report = manager.report()
    assert report["war/turns_moved"] == 1 and report["war/move_saving_s"] == pytest.approx(moved.price_s["saved_s"])


def test_a_slow_replica_gets_fewer_conversations():
    manager = manager_of(capacity=10**6)
    for step in range(1, 40):
        for replica_id, slow in (("a", 1), ("b", 4)):
            busy_s = slow * step * 0.1
            manager.on_snapshot(
                replica_id, reading(10**6, engine_steps=step, computed_tokens=step * 8, busy_s=busy_s), step * 0.5
            )
    placed = [manager.on_turn(turn(f"s{i}", 1_000), 20.0)[0].replica_id for i in range(40)]
    assert placed.count("a") > 2 * placed.count("b")
    report = manager.report()
    assert report["war/replica/1/slowness"] > 2 * report["war/replica/0/slowness"]


def test_an_abandoned_turn_leaves_the_queue():
    manager = manager_of(["a"])
    manager.on_turn(turn("s1", 9_000), 0.0)
    manager.on_turn(turn("s2", 9_000), 0.0)
    manager.on_turn_abandoned("s2", 1.0)
    assert manager.held_turns == 0 and manager.on_trajectory_end("s1", False, 2.0) == []


def test_a_second_turn_of_a_held_conversation_is_refused():
    manager = manager_of(["a"])
    manager.on_turn(turn("s1", 9_000), 0.0)
    manager.on_turn(turn("s2", 9_000), 0.0)
    with pytest.raises(ValueError, match="s2 asked for a turn while one of its turns is held"):
        manager.on_turn(turn("s2", 9_000), 1.0)


def test_a_replica_that_leaves_gives_its_conversations_back():
    manager = manager_of()
    placed = [manager.on_turn(turn(f"s{i}", 4_000), 0.0)[0] for i in range(4)]
    manager.on_replica_down("a", 1.0)
    for placement in placed:
        end(manager, placement, 2.0, failed=placement.replica_id == "a")
    again = [manager.on_turn(turn(f"s{i}", 4_000), 3.0) for i in range(4)]
    assert {placement.replica_id for placements in again for placement in placements} == {"b"}
    assert manager.held_turns == 2
    assert len(manager.on_replica_up("a", 4.0)) == 2


def test_an_empty_pool_says_what_verls_client_waits_for():
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        manager_of([]).on_turn(turn("s", 1), 0.0)


def test_admission_alone_keeps_stocks_placement_among_replicas_with_room():
    manager = manager_of(scheduling=False)
    placed = [manager.on_turn(turn(f"s{i}", 4_000), 0.0)[0] for i in range(4)]
    assert sorted(placement.replica_id for placement in placed) == ["a", "a", "b", "b"]
    assert {placement.reason for placement in placed} == {Reason.LEAST_INFLIGHT}
    assert manager.on_turn(turn("s4", 4_000), 0.0) == []


def test_scheduling_alone_never_holds():
    manager = manager_of(enabled=False)
    assert all(manager.on_turn(turn(f"s{i}", 9_000), 0.0) for i in range(20))


def test_everything_ends_empty():
    manager = manager_of()
    for number in range(60):
        manager.on_turn(turn(f"s{number}", 1_500, group=f"g{number % 5}"), float(number))
    for number in range(60):
        manager.on_trajectory_end(f"s{number}", number % 7 == 0, 100.0 + number)
    assert manager.held_turns == 0 and manager.inflight == {"a": 0, "b": 0}
    manager.report()
    report = manager.report()
    assert report["war/replica/0/kv_tokens_peak"] == report["war/replica/1/kv_tokens_peak"] == 0


def test_what_decides_is_counted_and_terms_that_never_do_are_named():
    manager = manager_of("abcd", capacity=10**7)
    for number, sibling in enumerate(siblings("g", 500, tokens=8_000)):
        manager.on_turn(sibling, float(number))
    report = manager.report()
    decisive = {name: report[f"war/decisive_{name}"] for name in ("prefill", "decode", "queue", "offload", "overflow")}
    assert decisive["decode"] > 0.5, decisive
    assert report["war/degenerate_terms"] == sum(share == 0 for share in decisive.values()) > 0
    assert report["war/starts_priced"] == 500
    assert report["war/replica/0/working_set_peak"] > 0


def test_predicted_and_measured_time_of_priced_turns_are_compared():
    manager = manager_of()
    (placed,) = manager.on_turn(turn("s", 1_000), 0.0)
    end(manager, placed, 2.5)
    report = manager.report()
    assert report["war/turn_s_predicted"] == pytest.approx(placed.price_s["turn_s"])
    assert report["war/turn_s_measured"] == 2.5


def test_another_kv_size_frees_newcomers_and_begins_with_what_comes_after():
    manager = WorkloadManager(WarConfig(admission=AdmissionConfig(enabled=True, wait_for_thrash=True)))
    for name in ("a", "b"):
        manager.on_replica_up(name, 0.0)
        manager.on_snapshot(name, reading(CAPACITY), 0.0)
    scheduler = manager._scheduler
    manager._fleet.replicas["a"].has_thrashed = scheduler._has_thrashed = True
    preempted = reading(CAPACITY // 2, preemptions=40)
    manager.on_snapshot("a", preempted, 1.0)
    assert not scheduler._has_thrashed, "the fleet is limited by nobody any more"
    assert scheduler.trust._evidence["a"].preemptions == 0, "those were of the KV before"
    manager.on_snapshot("a", reading(CAPACITY // 2, preemptions=41), 2.0)
    assert scheduler.trust._evidence["a"].preemptions == 1
