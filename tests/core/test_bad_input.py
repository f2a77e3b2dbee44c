"""What must not happen but does: the manager's accounts stay right."""

import random

import pytest

from verl_war.core.config import AdmissionConfig, SchedulingConfig, WarConfig
from verl_war.core.manager import LOST_AFTER_UPDATES, WorkloadManager
from verl_war.core.types import ReplicaSnapshot, Turn, TurnResult

CONFIG = WarConfig(
    scheduling=SchedulingConfig(enabled=True), admission=AdmissionConfig(enabled=True, wait_for_thrash=False), seed=5
)


def reading(steps=0, capacity=8_000):
    return ReplicaSnapshot(running_requests=2, waiting_requests=0, kv_usage=0.5, kv_usage_peak=0.5,
                           kv_capacity_tokens=capacity, preemptions=0, engine_steps=steps, computed_tokens=50 * steps,
                           kv_token_steps=100.0 * steps, busy_s=0.02 * steps)  # fmt: skip


def manager_of(replicas=2, capacity=8_000):
    manager = WorkloadManager(CONFIG)
    for number in range(replicas):
        manager.on_replica_up(f"r{number}", 0.0)
        manager.on_snapshot(f"r{number}", reading(capacity=capacity), 0.0)
    return manager


def turn(name, tokens=1000, group=""):
    return Turn(session_id=f"{name}s", trajectory_id=name, group_id=group, prompt_tokens=tokens)


def is_empty(manager):
    replicas = manager._fleet.replicas.values()
    return (
        not manager._trajectories
        and manager.held_turns == 0
        and not any(manager.inflight.values())
        and all(replica.working_set_tokens == 0 and replica.inflight == 0 for replica in replicas)
    )


@pytest.mark.parametrize("jump_s", [0.5, 50.0, 5000.0])
def test_a_clock_that_goes_backwards_leaks_and_stops_nothing(jump_s):
    rng = random.Random(1)
    manager = manager_of()
    now_s, left = 1000.0, {f"t{i}": 5 for i in range(40)}
    running, asking, steps = {}, list(left), 0
    for _ in range(3000):
        now_s += rng.random() if rng.random() < 0.8 else -jump_s * rng.random()
        started = []
        if asking:
            started += manager.on_turn(turn(asking.pop(), 1000), now_s)
        elif running:
            name = rng.choice(sorted(running))
            result = TurnResult(completion_tokens=10, num_cached_tokens=900)
            started += manager.on_turn_end(name, f"{name}s", running.pop(name), result, now_s)
            left[name] -= 1
            if left[name]:
                asking.append(name)
            else:
                del left[name]
                started += manager.on_trajectory_end(name, False, now_s)
        steps += 5
        started += manager.on_snapshot(f"r{steps % 2}", reading(steps), now_s)
        started += manager.on_tick(now_s)
        assert all(placement.held_s >= 0 for placement in started)
        running.update({placement.trajectory_id: placement.replica_id for placement in started})
        if not left:
            break
    assert not left and is_empty(manager)
    report = manager.report()
    assert all(report[f"war/replica/{i}/slowness"] > 0 for i in range(2)) and report["war/rollout_makespan_s"] >= 0


def test_turns_ended_twice_elsewhere_or_never_begun_change_nothing(caplog):
    manager = manager_of()
    (placement,) = manager.on_turn(turn("a"), 1.0)
    other = {"r0": "r1", "r1": "r0"}[placement.replica_id]
    result = TurnResult(completion_tokens=10)
    manager.on_turn_end("a", "as", other, result, 2.0)
    manager.on_turn_end("b", "bs", other, result, 2.0)
    assert manager.inflight == {placement.replica_id: 1, other: 0}
    manager.on_turn_end("a", "as", placement.replica_id, result, 3.0)
    manager.on_turn_end("a", "as", placement.replica_id, result, 3.0)
    manager.on_trajectory_end("a", False, 4.0)
    manager.on_trajectory_end("a", False, 4.0)
    manager.on_turn_end("a", "as", placement.replica_id, result, 5.0)
    manager.on_turn_abandoned("as", 5.0)
    assert is_empty(manager) and len(caplog.records) == 4


def test_a_turn_seen_twice_is_two_turns():
    manager = manager_of()
    placements = manager.on_turn(turn("a"), 1.0) + manager.on_turn(turn("a"), 1.0)
    assert [placement.session_id for placement in placements] == ["as", "as"]
    for placement in placements:
        manager.on_turn_end("a", "as", placement.replica_id, TurnResult(), 2.0)
    manager.on_trajectory_end("a", False, 3.0)
    assert is_empty(manager)


@pytest.mark.parametrize("config", [CONFIG, WarConfig(seed=5)], ids=["on", "off"])
def test_a_session_of_another_trajectory_is_refused_and_harms_nobody(config):
    manager = WorkloadManager(config)
    manager.on_replica_up("r0", 0.0)
    manager.on_turn(turn("a"), 1.0)
    with pytest.raises(ValueError, match="session as of trajectory b is in use by trajectory a"):
        manager.on_turn(Turn(session_id="as", trajectory_id="b", prompt_tokens=10), 2.0)
    manager.on_trajectory_end("b", True, 3.0)
    manager.on_turn_end("a", "as", "r0", TurnResult(), 4.0)
    manager.on_trajectory_end("a", False, 5.0)
    assert is_empty(manager)
    manager.on_turn(Turn(session_id="as", trajectory_id="b", prompt_tokens=10), 6.0)
    manager.on_trajectory_end("b", False, 7.0)
    assert is_empty(manager)


@pytest.mark.parametrize("config", [CONFIG, WarConfig(seed=5)], ids=["on", "off"])
def test_a_trajectory_that_nobody_ends_is_forgotten(config, caplog):
    manager = WorkloadManager(config)
    manager.on_replica_up("r0", 0.0)
    manager.on_snapshot("r0", reading(), 0.0)
    for name in ("runs", "asks", "lost"):
        manager.on_turn(turn(name), 1.0)
    for name in ("asks", "lost"):
        manager.on_turn_end(name, f"{name}s", "r0", TurnResult(), 2.0)
    for step in range(LOST_AFTER_UPDATES):
        assert "lost" in manager._trajectories
        if step == 1:  # asks again after a tool call of more than a step
            manager.on_turn(turn("asks"), 10.0 * step)
            manager.on_turn_end("asks", "askss", "r0", TurnResult(), 10.0 * step)
        manager.on_weights_updated(10.0 * step + 5.0)
    assert list(manager._trajectories) == ["runs", "asks"] and list(manager._fleet.conversations) == ["runss", "askss"]
    assert "1 trajectories asked for no turn" in caplog.text
    for _ in range(LOST_AFTER_UPDATES):
        manager.on_weights_updated(100.0)
    assert list(manager._trajectories) == ["runs"], "its turn is on its way"
    manager.on_trajectory_end("lost", False, 101.0)
    manager.on_trajectory_end("runs", False, 101.0)
    assert is_empty(manager)


def test_a_trajectory_whose_turn_is_held_is_not_forgotten():
    manager = manager_of(replicas=1, capacity=1_000)
    assert manager.on_turn(turn("first"), 1.0) and manager.on_turn(turn("held"), 1.0) == []
    for _ in range(2 * LOST_AFTER_UPDATES):
        manager.on_weights_updated(2.0)
    (placement,) = manager.on_trajectory_end("first", False, 3.0)
    assert placement.trajectory_id == "held"


def test_a_prompt_larger_than_any_cache_goes_to_its_engine_which_refuses_it():
    manager = manager_of(replicas=1)
    assert manager.on_turn(turn("small"), 1.0)
    (placement,) = manager.on_turn(turn("giant", 50_000), 1.0)
    assert placement.trajectory_id == "giant"
    assert manager.on_turn(turn("next", 7_500), 3.0) == []
    assert manager.on_trajectory_end("giant", True, 4.0) == [], "it took no room"
    (placement,) = manager.on_trajectory_end("small", False, 5.0)
    assert placement.trajectory_id == "next"
    manager.on_trajectory_end("next", False, 5.0)
    assert is_empty(manager)


def test_zero_replicas_then_all_down_then_one_again():
    manager = WorkloadManager(CONFIG)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        manager.on_turn(turn("a"), 1.0)
    manager.on_replica_up("r0", 2.0)
    manager.on_snapshot("r0", reading(capacity=2_000), 2.0)
    assert manager.on_turn(turn("a"), 3.0)
    assert manager.on_turn(turn("b"), 3.0) == []
    assert manager.on_replica_down("r0", 4.0, is_lost=True) == []
    assert manager.on_tick(5.0) == [] and manager.held_turns == 1
    (placement,) = manager.on_replica_up("r1", 6.0)
    assert (placement.trajectory_id, placement.replica_id) == ("b", "r1")
    manager.on_turn_end("a", "as", "r0", TurnResult(failed=True), 7.0)
    manager.on_trajectory_end("a", True, 7.0)
    manager.on_turn_end("b", "bs", "r1", TurnResult(), 7.0)
    manager.on_trajectory_end("b", False, 8.0)
    assert is_empty(manager)


@pytest.mark.parametrize("group_size", [1, 8])
def test_groups_of_one_and_identical_prompts_in_all_groups(group_size):
    manager = manager_of(replicas=4, capacity=100_000)
    manager.on_step_begin(0, 64, 0.0, group_size)
    chain = tuple(range(15))
    placed = []
    for number in range(64):
        asked = Turn(session_id=f"{number}s", trajectory_id=f"{number}", group_id=f"g{number // group_size}",
                     prompt_tokens=1000, block_hashes=chain)  # fmt: skip
        placed += manager.on_turn(asked, 1.0)
    counts = [sum(placement.replica_id == f"r{i}" for placement in placed) for i in range(4)]
    assert sum(counts) == 64 and max(counts) <= 2 * min(counts), counts
    for placement in placed:
        manager.on_trajectory_end(placement.trajectory_id, False, 2.0)
    assert is_empty(manager)
