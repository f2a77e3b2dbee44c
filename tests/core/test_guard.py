"""Trials of stock verl's rule: when they are made, what they cost, and what follows from them."""

import math
import random

import pytest

from tests.core.test_regime import CAPACITY
from tests.core.test_scheduler import end, reading, turn
from verl_war.core.config import AdmissionConfig, GuardConfig, SchedulingConfig, WarConfig, parse_war_config
from verl_war.core.guard import ControlGuard
from verl_war.core.manager import WorkloadManager
from verl_war.core.types import Reason


class Run:
    """Training steps of a guard; `gain` is what the controls save, in logs."""

    def __init__(self, gain, noise=0.0, seed=0, **config):
        self.guard = ControlGuard(GuardConfig(**config))
        self.gain, self.noise, self.rng = gain, noise, random.Random(seed)
        self.now_s = 0.0
        self.in_force, self.changes = [], []

    def steps(self, count, loaded=True, idle=True):
        for _ in range(count):
            self.guard.on_step_begin(idle, self.now_s)
            self.in_force.append(self.guard.in_force)
            tokens = self.rng.randrange(500, 2000)
            self.guard.on_turn_end(tokens)
            slower = 0.0 if self.guard.in_force else self.gain
            self.now_s += tokens * 0.01 * math.exp(slower + self.rng.gauss(0, self.noise))
            self.guard.on_trajectory_end(self.now_s)
            self.now_s += 5.0
            self.changes.append(self.guard.on_step_end(loaded))
        return self


def test_trials_of_controls_that_win_become_rare():
    run = Run(gain=math.log(2)).steps(260)
    trials = [step for step, in_force in enumerate(run.in_force) if not in_force]
    gaps = [later - sooner for sooner, later in zip(trials, trials[1:], strict=False)]
    assert trials[0] == 8 and gaps == sorted(gaps) and gaps[-1] > 60 and len(trials) <= 5
    assert run.guard.speedup == pytest.approx(2.0) and not any(run.changes)


@pytest.mark.parametrize("seed", range(5))
def test_controls_that_lose_go_off_and_come_back_when_they_win(seed):
    run = Run(gain=-0.2, noise=0.03, seed=seed).steps(100)
    (change,) = [change for change in run.changes if change]
    assert (change.old, change.new) == ("on", "off") and "times as long per token" in change.cause
    assert run.guard.is_losing and not any(run.in_force[-5:])
    run.gain = 0.5
    run.changes.clear()
    run.steps(250)
    (change,) = [change for change in run.changes if change]
    assert (change.old, change.new) == ("off", "on") and not run.guard.is_losing


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_switches_nothing(seed):
    run = Run(gain=0.0, noise=0.05, seed=seed).steps(300)
    assert not any(run.changes)
    assert run.in_force.count(False) <= 300 / 8


@pytest.mark.parametrize("seed", range(10))
def test_steps_that_scatter_much_need_more_than_a_trial_or_two(seed):
    run = Run(gain=math.log(1.5), noise=0.3, seed=seed, first_trial_steps=4).steps(200)
    assert not any(run.changes), "controls that win are not taken for losers by a chance of 30%"


def test_a_single_odd_step_hides_nothing():
    run = Run(gain=-0.5, noise=0.02, seed=1).steps(2)
    run.guard.on_step_begin(True, run.now_s)
    run.guard.on_turn_end(1000)
    run.now_s += 50.0  # five times as long as the others
    run.guard.on_trajectory_end(run.now_s)
    run.guard.on_step_end(True)
    assert any(run.steps(30).changes)


def test_only_loaded_steps_of_synchronous_training_are_compared():
    assert all(Run(gain=1.0).steps(50, loaded=False).in_force)
    asynchronous = Run(gain=1.0).steps(50, idle=False)
    assert all(asynchronous.in_force) and asynchronous.guard.trials == 0
    off = Run(gain=-1.0, enabled=False).steps(50)
    assert all(off.in_force) and off.guard.speedup == 1.0


def test_steps_around_one_without_load_are_no_pair():
    run = Run(gain=1.0).steps(8)
    run.steps(1)
    assert run.in_force[-1] is False
    run.steps(1, loaded=False).steps(3)
    assert run.guard.trials == 0


def play_step(manager, number, begin_s):
    """A step whose two contexts fill two replicas; returns the reasons of its placements and the report."""
    manager.on_step_begin(number, 2, begin_s, 2)
    waiting = [turn(f"{number}.{sample}", 9_000, group=f"g{number}") for sample in range(2)]
    running = [placement for asked in waiting for placement in manager.on_turn(asked, begin_s)]
    reasons = set()
    while running:
        placed = running.pop(0)
        reasons.add(placed.reason)
        running += end(manager, placed, begin_s + 9.0, completion=100)
        running += manager.on_trajectory_end(placed.trajectory_id, False, begin_s + 10.0)
    manager.on_weights_updated(begin_s + 12.0)
    return reasons, manager.report()


def test_a_trial_is_stock_verl_and_is_reported():
    config = WarConfig(
        scheduling=SchedulingConfig(enabled=True),
        admission=AdmissionConfig(enabled=True, wait_for_thrash=False, growth_turns=0.0),
        guard=GuardConfig(first_trial_steps=2), block_size_tokens=10, seed=0,
    )  # fmt: skip
    manager = WorkloadManager(config)
    for replica_id in ("a", "b"):
        manager.on_replica_up(replica_id, 0.0)
        manager.on_snapshot(replica_id, reading(CAPACITY), 0.0)
    steps = [play_step(manager, number, 100.0 * number) for number in range(1, 9)]
    trials = [bool(report["war/guard_trial"]) for _, report in steps]
    assert trials.index(True) > 1 and trials.count(True) == 2
    # In the first step nothing is known of contexts before they are there.
    assert [reasons == {Reason.LEAST_INFLIGHT} for reasons, _ in steps[1:]] == trials[1:]
    assert steps[-1][1]["war/guard_off"] == 0.0


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="first_trial_steps=200 is over max_trial_steps=128"):
        parse_war_config({"guard": {"first_trial_steps": 200}})
    with pytest.raises(ValueError, match="must be between 2"):
        parse_war_config({"guard": {"first_trial_steps": 1}})
