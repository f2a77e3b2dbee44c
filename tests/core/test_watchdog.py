"""What stops drafting although the planner wants it."""

import random

import pytest

from tests.core.test_speculation import planner, run_steps
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.core.step_time import DraftCost
from verl_war.core.watchdog import LEDGER_MIN_STEPS, Watchdog


def test_watchdog_trips_on_collapse_retries_and_backs_off():
    limits = SpeculationLimits(watchdog_min_tokens=100, watchdog_retry_s=10.0)
    dog, now, waits = Watchdog(), 0.0, []
    for _ in range(3):
        while not dog.blocks(limits, now):
            dog.handed_out(10)
            dog.verified(10, 0, limits)
            now += 0.01
        assert "draft tokens were accepted" in dog.reason
        begin = now
        while dog.blocks(limits, now):
            now += 1.0
        waits.append(now - begin)
    assert waits == [pytest.approx(10, abs=1), pytest.approx(20, abs=1), pytest.approx(40, abs=1)] and dog.trips == 3


def test_watchdog_trips_when_drafts_are_never_heard_of():
    limits, dog = SpeculationLimits(watchdog_min_tokens=100), Watchdog()
    for _ in range(10):
        assert not dog.blocks(limits, 0.0)
        dog.handed_out(10)
    assert dog.blocks(limits, 0.0) and "none came back" in dog.reason


def test_watchdog_lets_ordinary_acceptance_pass():
    limits, dog = SpeculationLimits(watchdog_min_tokens=100), Watchdog()
    for _ in range(1000):
        dog.handed_out(10)
        dog.verified(10, 1, limits)
        assert not dog.blocks(limits, 0.0)


def feed(dog, steps, mean_saving, noise=0.3, seconds=0.01, seed=0):
    """Steps that save this share of their time on the average."""
    rng = random.Random(seed)
    for _ in range(steps):
        dog.timed(seconds, seconds * (1 + mean_saving + rng.gauss(0, noise)))


def test_watchdog_trips_when_drafts_cost_more_time_than_they_save():
    limits, dog = SpeculationLimits(), Watchdog()
    feed(dog, int(LEDGER_MIN_STEPS) - 1, -0.5, noise=0.0)
    assert not dog.blocks(limits, 0.0), "too few steps say nothing"
    feed(dog, 300, -0.1)
    assert dog.blocks(limits, 1.0)
    assert "longer than their tokens without" in dog.reason


@pytest.mark.parametrize("seed", range(5))
def test_watchdog_bears_noise_pauses_and_trifles(seed):
    limits, dog = SpeculationLimits(), Watchdog()
    for _ in range(20):
        feed(dog, 100, 0.05, seed=seed)
        assert not dog.blocks(limits, 0.0)
        dog.timed(seconds=2.0, plain_s=0.01)  # the process was stopped
        assert not dog.blocks(limits, 0.0), dog.reason
    dog = Watchdog()
    feed(dog, 2000, -0.005, noise=0.0)
    assert not dog.blocks(limits, 0.0), "half a per cent cannot be told"


def test_a_planner_that_is_wrong_is_stopped_and_plain_decoding_goes_on():
    """The planner is made to believe in a gain; measured steps say otherwise."""
    subject = planner(watchdog_retry_s=1e4)
    cheap = DraftCost(plain_s=0.014, any_draft_s=0.0, row_s=0.0, token_s=1e-6)
    subject.step_time.cost = lambda rows, kv_tokens: cheap
    drafts = run_steps(subject, 1, 300, token_s=0.012, accept=0.9)
    assert "longer than" in subject.watchdog.reason
    assert sum(map(bool, drafts)) < 100 and not any(drafts[-100:]) and subject.regime == "high"


def test_probes_are_expected_to_lose():
    subject = planner(probe_interval_s=0.0, probe_share=1.0)
    drafts = run_steps(subject, 1, 3000, any_s=0.03, accept=0.6)
    assert sum(map(bool, drafts)) > LEDGER_MIN_STEPS, "it goes on probing"
    assert subject.watchdog.reason == ""
