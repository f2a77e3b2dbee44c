"""When the fleet counts as loaded, and that it is stock verl while it does not."""

import logging

import pytest

from tests.core.test_scheduler import end, names, reading, turn
from verl_war.core.config import AdmissionConfig, RegimeConfig, SchedulingConfig, WarConfig, parse_war_config
from verl_war.core.fleet import Fleet
from verl_war.core.manager import WorkloadManager
from verl_war.core.regime import CHECK_EVERY_TURNS, REPLICAS_PER_TURN, FleetLoad
from verl_war.core.types import Reason

CAPACITY = 10_000


def manager_of(replicas=("a", "b"), **regime):
    config = WarConfig(
        scheduling=SchedulingConfig(enabled=True),
        admission=AdmissionConfig(enabled=True, wait_for_thrash=False, growth_turns=0.0),
        regime=RegimeConfig(**regime), block_size_tokens=10, seed=0,
    )  # fmt: skip
    manager = WorkloadManager(config)
    for replica_id in replicas:
        manager.on_replica_up(replica_id, 0.0)
        manager.on_snapshot(replica_id, reading(CAPACITY), 0.0)
    return manager


def is_high(manager):
    return manager.report()["war/regime_high"] == 1.0


def test_a_fleet_with_room_places_as_stock_verl_does():
    manager = manager_of()
    (first,) = manager.on_turn(turn("s0", 1_000, group="g"), 0.0)
    (second,) = manager.on_turn(turn("s1", 1_000, group="g"), 0.0)
    assert {first.reason, second.reason} == {Reason.LEAST_INFLIGHT}
    assert {first.replica_id, second.replica_id} == {"a", "b"}, "the sibling's prompt is on the other replica"
    end(manager, first)
    (again,) = manager.on_turn(turn("s0", 2_000, group="g"), 1.0)
    assert (again.replica_id, again.reason) == (first.replica_id, Reason.STICKY) and not is_high(manager)


def test_a_fleet_with_room_holds_nothing():
    manager = manager_of()
    for number in range(2):
        manager.on_turn(turn(f"s{number}", 1_000), 0.0)
    (placed,) = manager.on_turn(turn("big", 9_500), 0.0)  # beside 1,000 tokens it is over what admission fills
    assert placed.reason is Reason.LEAST_INFLIGHT and manager.held_turns == 0


def test_contexts_that_come_to_fill_the_kv_switch_scheduling_on(caplog):
    caplog.set_level(logging.INFO, logger="verl_war")
    manager = manager_of(["a"])
    for number in range(8):
        assert manager.on_turn(turn(f"s{number}", 1_000), 0.0)
    manager.on_tick(0.5)
    assert is_high(manager)
    assert "fleet: load low -> high (contexts need 0.70 of the KV, 0.70 on the fullest replica, 0.80 exp" in caplog.text
    assert names(manager.on_turn(turn("s8", 1_000), 1.0)) == ["s8"]
    assert manager.on_turn(turn("s9", 1_000), 1.0) == [] and manager.held_turns == 1


def test_one_full_replica_is_enough():
    manager = manager_of()
    (first,) = manager.on_turn(turn("s0", 8_500), 0.0)
    manager.on_tick(0.5)
    report = manager.report()
    assert report["war/regime_high"] == 1 and report["war/kv_load_peak"] == pytest.approx(0.85)


def test_a_step_is_known_to_be_loaded_before_its_first_turn():
    manager = manager_of()
    for number in range(2):  # an earlier step: contexts of 3,000 tokens on the average
        for tokens in (2_000, 4_000):
            end(manager, manager.on_turn(turn(f"s{number}", tokens), 0.0)[0])
        manager.on_trajectory_end(f"s{number}", False, 1.0)
    manager.on_weights_updated(2.0)
    manager.on_step_begin(1, 4, 100.0, 2)
    assert not is_high(manager)
    manager.on_step_begin(1, 6, 100.0, 2)  # 18,000 of 20,000 tokens
    assert is_high(manager)
    assert manager.on_turn(turn("t0", 100, group="g"), 100.0)[0].reason is Reason.PRICED


def test_trajectories_that_have_begun_are_not_expected_a_second_time():
    manager = manager_of()
    manager.on_step_begin(0, 4, 0.0)
    for number in range(4):
        manager.on_turn(turn(f"s{number}", 3_000), 0.0)
    manager.on_tick(0.5)
    report = manager.report()
    assert report["war/kv_load_peak"] == pytest.approx(0.6), "4 x 3,000 of 20,000"


def test_it_stays_loaded_for_the_dwell_and_until_well_below():
    manager = manager_of(["a"], dwell_s=10.0)
    for number in range(9):
        manager.on_turn(turn(f"s{number}", 1_000), 0.0)
    manager.on_tick(0.0)
    for number in range(2):
        manager.on_trajectory_end(f"s{number}", False, 20.0)
    manager.on_tick(20.0)
    assert is_high(manager), "0.7 is between the bounds"
    for number in range(2, 5):
        manager.on_trajectory_end(f"s{number}", False, 21.0)
    manager.on_tick(9.0)  # a clock that went back
    assert is_high(manager)
    manager.on_tick(21.0)
    assert not is_high(manager)


def test_a_fleet_that_flaps_changes_at_most_twice_per_dwell():
    load = FleetLoad(RegimeConfig(dwell_s=10.0), Fleet())
    shares = iter([0.9, 0.1] * 500)
    load._shares = lambda: (next(shares), 0.0, 0.0)
    for tick in range(1_000):
        load.update(False, tick * 0.5)
    changes, peak = load.take_counts()
    assert changes <= 2 * (500 / 10 + 1) and peak == 0.9
    assert load.take_counts() == (0, 0.0)


def test_what_is_held_starts_when_the_load_is_gone_and_not_before():
    manager = manager_of(["a"], dwell_s=0.0)
    for number in range(9):
        manager.on_turn(turn(f"s{number}", 1_000), 0.0)
    assert manager.on_turn(turn("big", 9_500), 0.0) == []
    manager.on_tick(1.0)
    started = []
    for number in range(9):
        started += manager.on_trajectory_end(f"s{number}", False, 2.0)
        started += manager.on_tick(2.0)
    assert names(started) == ["big"] and is_high(manager)


def test_engines_that_have_not_reported_and_an_empty_pool_are_no_load():
    manager = WorkloadManager(WarConfig(scheduling=SchedulingConfig(enabled=True), seed=0))
    manager.on_step_begin(0, 1_000, 0.0)
    manager.on_replica_up("a", 0.0)
    manager.on_turn(turn("s", 10**9), 0.0)
    manager.on_tick(0.5)
    manager.on_replica_down("a", 1.0)
    manager.on_tick(1.5)
    assert not is_high(manager)


@pytest.mark.parametrize(("replicas", "turns"), [(4, 4), (60, CHECK_EVERY_TURNS), (400, 400 // REPLICAS_PER_TURN)])
def test_a_fleet_is_looked_at_once_in_so_many_turns(replicas, turns):
    manager = manager_of([f"r{i}" for i in range(replicas)])
    looks = []
    update = manager._scheduler.load.update
    manager._scheduler.load.update = lambda *args: looks.append(args) or update(*args)
    for number in range(10 * turns):
        manager.on_turn(turn(f"s{number}", 10), 0.0)
    assert len(looks) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enter_kv_share": -0.1}, "enter_kv_share=-0.1 must be between 0"),
        ({"leave_kv_share": 0.9}, "leave_kv_share=0.9 is over enter_kv_share=0.8"),
        ({"dwell_s": float("nan")}, "dwell_s=nan must be between"),
        ({"enter": 1.0}, "unknown key actor_rollout_ref.rollout.custom.war.regime.enter"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        parse_war_config({"regime": settings})


def test_a_fleet_of_uneven_speed_is_loaded_although_there_is_room():
    manager = manager_of()
    for step in range(1, 12):
        for replica_id, slow in (("a", 1), ("b", 4)):
            fields = dict(engine_steps=10 * step, computed_tokens=80 * step, busy_s=slow * step * 0.3)
            manager.on_snapshot(replica_id, reading(CAPACITY, **fields), 2.0 * step)
    manager.on_tick(30.0)
    assert is_high(manager)
    placed = [manager.on_turn(turn(f"s{number}", 100), 31.0)[0].replica_id for number in range(20)]
    assert placed.count("a") > 2 * placed.count("b")
    # It gets no work and is read all the same: what is known of it fades, and it is tried again.
    for now_s in range(40, 300, 2):
        manager.on_snapshot("b", reading(CAPACITY, **fields), float(now_s))
        manager.on_tick(float(now_s))
    assert not is_high(manager) and manager.report()["war/replica/1/slowness"] < 1.1


@pytest.mark.parametrize("period_s", [1.0, 3.0, 7.0])
def test_a_load_that_alternates_faster_than_the_dwell_does_not_flap(period_s):
    manager = manager_of(["a"], dwell_s=10.0)
    changes_s, was_high, now_s = [], False, 0.0
    while now_s < 600.0:
        if int(now_s / period_s) % 2 == 0:
            started = manager.on_turn(turn(f"s{now_s}", 9_000), now_s)
        else:
            started = []
            manager.on_tick(now_s)
        if is_high(manager) != was_high:
            was_high = not was_high
            changes_s.append(now_s)
        now_s += period_s
        for placement in started:
            end(manager, placement, now_s)
            manager.on_trajectory_end(placement.trajectory_id, False, now_s)
    assert changes_s and len(changes_s) < 2 * 600.0 / 160.0 + 12, "the dwell has grown to 160 s"
