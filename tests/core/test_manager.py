import logging

import pytest

from verl_war.core.config import WarConfig
from verl_war.core.manager import WorkloadManager
from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult

BLOCK = 4


@pytest.fixture
def manager():
    manager = WorkloadManager(WarConfig(block_size_tokens=BLOCK, seed=0))
    for replica_id in ("a", "b"):
        manager.on_replica_up(replica_id, 0.0)
    return manager


def turn(trajectory_id, prompt_tokens, **fields):
    hashes = tuple(hash((trajectory_id, i)) for i in range(prompt_tokens // BLOCK))
    return Turn(session_id=trajectory_id, trajectory_id=trajectory_id, prompt_tokens=prompt_tokens,
                block_hashes=hashes, **fields)  # fmt: skip


def play(manager, trajectory_id, prompt_tokens, now_s=0.0, cached=0, completion=2, **fields):
    (placed,) = manager.on_turn(turn(trajectory_id, prompt_tokens, **fields), now_s)
    result = TurnResult(completion_tokens=completion, num_cached_tokens=cached)
    manager.on_turn_end(trajectory_id, trajectory_id, placed.replica_id, result, now_s)
    return placed.replica_id


def snapshot(preemptions=0, kv_usage_peak=0.0):
    return ReplicaSnapshot(running_requests=0, waiting_requests=0, kv_usage=0.0, kv_usage_peak=kv_usage_peak,
                           kv_capacity_tokens=100, preemptions=preemptions, engine_steps=1)  # fmt: skip


def test_tokens_and_turns_add_up(manager):
    play(manager, "t", 8)
    play(manager, "t", 12, cached=8)
    manager.on_trajectory_end("t", failed=False, now_s=3.0)
    report = manager.report()
    assert report["war/turns"] == 2 and report["war/trajectories"] == 1
    assert report["war/prompt_tokens"] == 20
    assert report["war/prompt_tokens_cached"] == 8
    assert report["war/prompt_tokens_recomputed"] == 12
    assert report["war/completion_tokens"] == 4
    assert report["war/cache_hit_rate"] == pytest.approx(8 / 20)
    assert report["war/cache_hit_rate_believed"] == pytest.approx(8 / 20)


def test_live_trajectories_count_kv_while_they_wait_for_a_tool(manager):
    home = play(manager, "t", 8, completion=3)  # no request in flight any more, 11 tokens of context remain
    play(manager, "u", 2, completion=0)
    report = manager.report()
    index = {"a": 0, "b": 1}[home]
    assert report[f"war/replica/{index}/live_trajectories_peak"] >= 1
    assert report[f"war/replica/{index}/kv_tokens_peak"] >= 11
    assert report["war/trajectories_live"] == 2
    manager.on_trajectory_end("t", failed=False, now_s=1.0)
    manager.on_trajectory_end("u", failed=False, now_s=1.0)
    manager.report()  # peaks of the window in which they ended
    last = manager.report()
    assert last["war/replica/0/kv_tokens_peak"] == last["war/replica/1/kv_tokens_peak"] == 0
    assert last["war/trajectories_live"] == 0


def test_makespan_and_t90_span_the_trajectories_that_ended(manager):
    for number in range(10):
        play(manager, f"t{number}", 4, now_s=1.0)
        manager.on_trajectory_end(f"t{number}", failed=False, now_s=2.0 + number)
    report = manager.report()
    assert report["war/rollout_makespan_s"] == pytest.approx(10.0)
    assert report["war/rollout_t90_s"] == pytest.approx(9.0)


def test_imbalance_is_one_when_even_and_the_number_of_replicas_when_one_did_all(manager):
    play(manager, "t", 8, completion=2)
    assert manager.report()["war/imbalance"] == pytest.approx(2.0)
    placed = [manager.on_turn(turn(name, 8), 0.0)[0].replica_id for name in ("u", "v")]
    assert set(placed) == {"a", "b"}
    for name, replica_id in zip(("u", "v"), placed, strict=True):
        manager.on_turn_end(name, name, replica_id, TurnResult(completion_tokens=2, num_cached_tokens=0), 0.0)
    assert manager.report()["war/imbalance"] == pytest.approx(1.0)


def test_a_move_takes_the_kv_along(manager):
    home = play(manager, "t", 8)
    manager.on_replica_down(home, 0.0)
    other = play(manager, "t", 12)
    assert other != home
    report = manager.report()
    assert report["war/turns_moved"] == 1
    assert report[f"war/replica/{'ab'.index(other)}/kv_tokens_peak"] == 14


def test_validation_is_placed_and_loads_but_is_not_reported(manager):
    play(manager, "v", 8, validate=True)
    manager.on_trajectory_end("v", failed=False, now_s=1.0)
    report = manager.report()
    assert report["war/turns"] == report["war/trajectories"] == report["war/prompt_tokens"] == 0
    assert report["war/replica/0/kv_tokens_peak"] == report["war/replica/1/kv_tokens_peak"] == 0


def test_a_failed_turn_counts_no_tokens_and_frees_its_place(manager):
    (placed,) = manager.on_turn(turn("t", 8), 0.0)
    manager.on_turn_end("t", "t", placed.replica_id, TurnResult(failed=True), 0.0)
    manager.on_trajectory_end("t", failed=True, now_s=0.0)
    report = manager.report()
    assert report["war/turns"] == report["war/turns_failed"] == report["war/trajectories_failed"] == 1
    assert report["war/prompt_tokens"] == 0
    assert manager.inflight == {"a": 0, "b": 0}


def test_a_trajectory_that_ends_with_a_turn_pending_gives_its_place_back(manager):
    manager.on_turn(turn("t", 8), 0.0)
    manager.on_trajectory_end("t", failed=True, now_s=0.0)
    assert manager.inflight == {"a": 0, "b": 0}


def test_two_turns_of_one_session_may_run_at_once(manager):
    (first,), (second,) = manager.on_turn(turn("t", 8), 0.0), manager.on_turn(turn("t", 8), 0.0)
    assert first.replica_id == second.replica_id
    for _ in range(2):
        manager.on_turn_end("t", "t", first.replica_id, TurnResult(), 0.0)
    assert manager.inflight == {"a": 0, "b": 0}
    assert manager.report()["war/turns"] == 2


def test_conversations_of_one_trajectory_live_on_replicas_of_their_own(manager):
    homes = {}
    for _ in range(3):
        for session_id in ("main", "helper"):
            call = Turn(session_id=session_id, trajectory_id="t", prompt_tokens=8)
            replica_id = manager.on_turn(call, 0.0)[0].replica_id
            homes.setdefault(session_id, replica_id)
            other = Turn(session_id="filler", trajectory_id="filler", prompt_tokens=1)
            if len(homes) == 1:  # occupy the first home, so that the second conversation goes elsewhere
                manager.on_turn(other, 0.0)
            assert replica_id == homes[session_id]
            manager.on_turn_end("t", session_id, replica_id, TurnResult(num_cached_tokens=0), 0.0)
    report = manager.report()
    assert report["war/turns_moved"] == 0
    assert report["war/trajectories_live"] == 2
    manager.on_trajectory_end("t", failed=False, now_s=0.0)
    manager.on_trajectory_end("filler", failed=False, now_s=0.0)
    manager.report()
    last = manager.report()
    assert last["war/replica/0/live_trajectories_peak"] == last["war/replica/1/live_trajectories_peak"] == 0


def test_an_aborted_turn_counts_no_prompt_that_nobody_computed(manager):
    (placed,) = manager.on_turn(turn("t", 30), 0.0)
    manager.on_turn_end("t", "t", placed.replica_id, TurnResult(aborted=True), 0.0)
    play(manager, "t", 30, cached=4)
    report = manager.report()
    assert report["war/turns"] == 2 and report["war/turns_aborted"] == 1
    assert report["war/prompt_tokens_recomputed"] == 26


def test_work_of_a_replica_that_left_is_reported(manager):
    placed = [*manager.on_turn(turn("t", 8), 0.0), *manager.on_turn(turn("u", 24), 0.0)]
    for name, replica_id in ((placement.session_id, placement.replica_id) for placement in placed):
        manager.on_turn_end(name, name, replica_id, TurnResult(num_cached_tokens=0), 0.0)
    manager.on_replica_down("b", 0.0)
    report = manager.report()
    assert report["war/imbalance"] == pytest.approx(24 / 16)
    assert "war/replica/1/kv_tokens_peak" in report
    assert "war/replica/1/kv_tokens_peak" not in manager.report()


def test_ends_of_unknown_turns_change_nothing_and_are_logged(manager, caplog):
    home = play(manager, "t", 8)
    with caplog.at_level(logging.WARNING):
        manager.on_turn_end("t", "t", home, TurnResult(), 0.0)  # released twice
        manager.on_turn_end("never", "never", home, TurnResult(), 0.0)
    assert len(caplog.records) == 2
    manager.on_trajectory_end("never", failed=False, now_s=0.0)
    report = manager.report()
    assert report["war/turns"] == 1 and report["war/trajectories"] == 0
    assert manager.inflight == {"a": 0, "b": 0}


@pytest.mark.parametrize(("event", "hit_rate"), [(None, 1.0), ("weights", 0.0), ("replica", 0.0)])
def test_beliefs_end_with_the_weights_and_with_the_replica(manager, event, hit_rate):
    home = play(manager, "t", 8)
    manager.report()
    if event == "weights":
        manager.on_weights_updated(0.0)
    elif event == "replica":
        manager.on_replica_down(home, 0.0)
        manager.on_replica_up(home, 0.0)
        manager.on_replica_down("b" if home == "a" else "a", 0.0)
    assert play(manager, "t", 8) == home
    assert manager.report()["war/cache_hit_rate_believed"] == hit_rate


def test_siblings_that_start_together_are_believed_to_share_their_prompt(manager):
    manager.on_replica_down("b", 0.0)
    hashes = turn("prompt", 8).block_hashes
    for name in ("s1", "s2"):
        manager.on_turn(Turn(session_id=name, trajectory_id=name, prompt_tokens=8, block_hashes=hashes), 0.0)
    for name in ("s1", "s2"):
        manager.on_turn_end(name, name, "a", TurnResult(num_cached_tokens=0), 0.0)
    assert manager.report()["war/cache_hit_rate_believed"] == pytest.approx(0.5)


@pytest.mark.parametrize(("readings", "expected"), [([3, 5], 5), ([5, 2], 7), ([0, 0], 0)])
def test_preemptions_are_counted_across_an_engines_restart(manager, readings, expected):
    for preemptions in readings:
        manager.on_snapshot("a", snapshot(preemptions), 0.0)
    assert manager.report()["war/preemptions"] == expected


def test_kv_usage_peak_is_the_highest_of_the_window(manager):
    for usage in (0.25, 0.75, 0.5):
        manager.on_snapshot("b", snapshot(kv_usage_peak=usage), 0.0)
    assert manager.report()["war/replica/1/kv_usage_peak"] == 0.75
    assert manager.report()["war/replica/1/kv_usage_peak"] == 0.0


def test_decision_times_are_reported_in_microseconds(manager):
    for micros in (10, 20, 30):
        manager.on_decision_time(micros * 1e-6)
    report = manager.report()
    assert report["war/router_decision_p50_us"] == pytest.approx(20)
    assert report["war/router_decision_p99_us"] == pytest.approx(30)


def test_processor_time_is_that_since_the_last_report(manager):
    for seconds in (0.25, 0.5):
        manager.on_process_time(seconds)
    assert [manager.report()["war/router_cpu_s"] for _ in range(2)] == [0.75, 0.0]


def test_every_documented_metric_is_reported_and_no_other(manager):
    from verl_war.core.step_stats import METRICS, metric_names

    names = metric_names(replicas=2)
    assert set(manager.report()) == set(names) and set(names.values()) == set(METRICS)


@pytest.mark.parametrize(
    ("field", "value"), [("preemptions", -1), ("kv_usage", 1.5), ("kv_usage", float("nan")), ("engine_steps", -2)]
)
def test_broken_telemetry_is_refused(field, value):
    fields = dict(running_requests=0, waiting_requests=0, kv_usage=0.0, kv_usage_peak=0.0, kv_capacity_tokens=1,
                  preemptions=0, engine_steps=0)  # fmt: skip
    with pytest.raises(ValueError, match=field):
        ReplicaSnapshot(**(fields | {field: value}))


def test_a_change_of_the_speculation_regime_is_logged_once(manager, caplog):
    caplog.set_level("INFO", "verl_war.core.manager")
    for regime in ("high", "low", "low", "high", "low"):
        reading = SpeculationReading(
            steps=10, drafting_steps=5, drafting_rows=5, drafted_tokens=20, accepted_tokens=10, draft_s=0.1, step_s=1.0,
            regime=regime, budget_tokens=8, expected_gain=0.25,
        )  # fmt: skip
        assert manager.on_speculation("a", reading, 1.0) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"replica a: speculation {change} (0 in flight, 0 live; budget 8 tokens, expected gain 25%)"
        for change in ("high -> low", "low -> high", "high -> low")
    ]
