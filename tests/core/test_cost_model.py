"""How slow a replica is, and what drafts yield."""

import random

import pytest

from verl_war.core.cost_model import YIELD_WINDOW_TOKENS, DraftYield, ReplicaPace
from verl_war.core.step_time import StepTime, StepTimeFit, Window
from verl_war.core.types import ReplicaSnapshot

TRUE = StepTime(base_s=0.020, row_s=300e-6, token_s=120e-6, kv_token_s=20e-9)


def reading(steps=0, tokens=0, kv=0.0, busy_s=0.0, rows=0.0):
    return ReplicaSnapshot(running_requests=0, waiting_requests=0, kv_usage=0.0, kv_usage_peak=0.0,
                           kv_capacity_tokens=1, preemptions=0, engine_steps=steps, computed_tokens=tokens,
                           kv_token_steps=kv, busy_s=busy_s, row_steps=rows)  # fmt: skip


def half_a_second(slow, rows=32):
    """What a replica that is slow by this factor does between two readings."""
    step_s = slow * TRUE.step_s(rows, 0)
    iterations = max(1, round(0.5 / step_s))
    return Window(iterations, iterations * rows, 0.0, iterations * step_s, iterations * rows)


@pytest.mark.parametrize("slow", [0.5, 4.0, 10.0, 100.0])
def test_a_slow_replica_is_seen_within_ten_seconds(slow):
    pace = ReplicaPace()
    for _ in range(20):
        pace.update(half_a_second(slow), TRUE)
    assert pace.slowness == pytest.approx(slow, rel=0.05)


def test_a_stall_says_nothing_of_a_replica():
    pace = ReplicaPace()
    pace.update(Window(1, 64, 0.0, 600.0, 64), TRUE)
    assert pace.slowness == pytest.approx(1.0), "not even in the first window"
    for _ in range(10):
        pace.update(half_a_second(4.0), TRUE)
    pace.update(Window(1, 64, 0.0, 600.0, 64), TRUE)
    pace.update(half_a_second(4.0), TRUE)
    assert pace.slowness == pytest.approx(4.0, rel=0.05)


def test_one_replica_of_four_that_is_ten_times_slower_is_told_from_the_others():
    fit, paces, rng = StepTimeFit(), [ReplicaPace() for _ in range(4)], random.Random(0)
    for _ in range(60):
        for index, pace in enumerate(paces):
            window = half_a_second(10.0 if index == 3 else 1.0, rows=rng.randint(1, 64))
            fit.observe(*window)
            pace.update(window, fit.value())
    model = fit.value().step_s(32, 0)
    for index, pace in enumerate(paces):
        truth_s = TRUE.step_s(32, 0) * (10.0 if index == 3 else 1.0)
        assert model * pace.slowness == pytest.approx(truth_s, rel=0.15), index
    assert paces[3].slowness > 7 * paces[0].slowness


def test_a_single_replica_teaches_the_model_and_is_not_slow():
    fit, pace, rng = StepTimeFit(), ReplicaPace(), random.Random(0)
    for _ in range(60):
        window = half_a_second(10.0, rows=rng.randint(1, 64))
        fit.observe(*window)
        pace.update(window, fit.value())
    assert pace.slowness == pytest.approx(1.0, rel=0.1)
    assert fit.value().step_s(32, 0) == pytest.approx(10 * TRUE.step_s(32, 0), rel=0.1)


@pytest.mark.parametrize("window", [(0, 5, 5, 1.0), (3, 5, 5, 0.0), (3, -5, 5, 1.0), (3, 5, 5, float("nan"))])
def test_windows_that_can_not_be_leave_the_pace(window):
    pace = ReplicaPace()
    for _ in range(5):
        pace.update(Window(*window), TRUE)
    assert pace.slowness == 1.0


def test_windows_are_differences_of_snapshots():
    pace = ReplicaPace()
    assert pace.window(reading(10, 100, 5.0, 1.0, 5.0), 0.0) is None
    assert pace.window(reading(15, 160, 9.0, 1.5, 20.0), 0.5) == (5, 60, 4.0, 0.5, 15.0)
    assert pace.window(reading(3, 10, 1.0, 0.1), 1.0) is None  # the engine restarted
    assert pace.window(reading(6, 20, 2.0, 0.4), 0.9) is None  # the clock went back


def test_accepted_drafts_are_tokens_without_an_iteration():
    drafts = DraftYield()
    accepted = 0
    drafts.on_reading(accepted)
    for _ in range(20):
        drafts.on_turn_end(YIELD_WINDOW_TOKENS)
        accepted += YIELD_WINDOW_TOKENS * 3 // 4
        drafts.on_reading(accepted)
    assert drafts.tokens_per_iteration == pytest.approx(4.0, rel=0.01)
    for _ in range(20):
        drafts.on_turn_end(YIELD_WINDOW_TOKENS)
        drafts.on_reading(accepted)
    assert drafts.tokens_per_iteration == pytest.approx(1.0, rel=0.01), "the engine stopped drafting"


def test_drafts_of_before_the_first_reading_and_of_a_restarted_engine_do_not_count():
    drafts = DraftYield()
    drafts.on_turn_end(100 * YIELD_WINDOW_TOKENS)
    drafts.on_reading(10**6)
    assert drafts.tokens_per_iteration == 1.0
    drafts.on_turn_end(YIELD_WINDOW_TOKENS)
    drafts.on_reading(5)
    assert drafts.tokens_per_iteration == 1.0


def test_a_window_that_seems_to_accept_more_than_it_gave_is_bounded():
    drafts = DraftYield()
    drafts.on_reading(0)
    for window in range(1, 30):
        drafts.on_turn_end(YIELD_WINDOW_TOKENS)
        drafts.on_reading(window * 10 * YIELD_WINDOW_TOKENS)
    assert 1.0 < drafts.tokens_per_iteration <= 20.01
