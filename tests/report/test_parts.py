"""Series in bins, the quality of the fit, and the reasons for which a trajectory is late."""

import numpy as np
import pytest

from verl_war.core.step_time import StepTime, Window
from verl_war.report.fit import MAX_POINTS, FitQuality
from verl_war.report.life import Life
from verl_war.report.steps import Step, why
from verl_war.report.timeline import FIRST_WIDTH_S, MAX_BINS, Timeline


def test_gauges_are_means_and_counters_are_sums():
    value = 1.0
    series = Timeline(lambda: [("load", "r", value)])
    series.advance(5.0)
    series.advance(6.0)
    value = 3.0
    series.add("tokens", "r", 10)
    series.advance(7.0)
    series.add("tokens", "s", 5)
    load = series.mean("load", "r")
    assert len(load) == len(series.edges()) - 1 == round(2 / FIRST_WIDTH_S) + 1
    assert load[0] == 1.0 and load[-2] == 3.0 and np.nanmean(load) == pytest.approx(2.0, abs=0.05)
    assert series.sums("tokens").sum() == 15 and series.sums("tokens", "s").sum() == 5
    assert series.sums("tokens", "r")[round(1 / FIRST_WIDTH_S)] == 10
    assert np.isnan(series.mean("unknown", "r")).all() and not series.sums("unknown").any()


def test_memory_is_bounded_and_nothing_is_lost():
    series = Timeline(lambda: [("load", "", 7.0)])
    for second in range(0, 100_000, 13):
        series.advance(float(second))
        series.add("events", "", 1)
    assert MAX_BINS / 2 <= len(series.mean("load")) <= MAX_BINS
    assert np.nanmin(series.mean("load")) == np.nanmax(series.mean("load")) == 7.0
    assert series.sums("events").sum() == len(range(0, 100_000, 13))
    assert np.ptp(series.sums("events")[:-1]) <= 15, "evenly spread"


def test_a_long_pause_takes_no_time_and_a_clock_that_goes_back_does_no_harm():
    series = Timeline(lambda: [("load", "", 1.0)])
    for at_s in (0.0, 1.0, 1e7, 5.0, 1e7 + 1):
        series.advance(at_s)
        series.add("events", "", 1)
    assert len(series.mean("load")) <= MAX_BINS and series.sums("events").sum() == 5


def test_no_event_is_a_timeline_of_one_empty_bin():
    assert len(Timeline(list).edges()) == 2


def windows(model, slowness=1.0, count=400):
    rng = np.random.default_rng(1)
    for _ in range(count):
        tokens, kv = float(rng.integers(1, 2000)), float(rng.integers(1, 400_000))
        yield Window(10, 10 * tokens, 10 * kv, 10 * model.step_s(0, kv, tokens) * slowness)


def test_an_engine_that_is_linear_is_explained_and_its_slow_sibling_too():
    model = StepTime(base_s=0.012, token_s=30e-6, kv_token_s=20e-9)
    fits = FitQuality()
    for window in windows(model):
        fits.add("r", window)
    assert fits.r2() > 0.99 and fits.windows > 300
    assert fits.model().base_s == pytest.approx(0.012, rel=0.05)
    both = FitQuality()
    for one, other in zip(windows(model), windows(model, 2.0), strict=True):
        both.add("r", one)
        both.add("slow", other)
    assert both.r2() > both.model_r2() + 0.1


def test_windows_without_work_tell_nothing_and_points_are_thinned_out():
    fits = FitQuality()
    for window in ((0, 10, 1.0, 1.0), (5, 10, 1.0, 0.0), (5, -1, 1.0, 1.0)):
        fits.add("r", Window(*window))
    assert fits.r2() is None and fits.model_r2() is None and not fits.points
    for _ in range(20):
        for window in windows(StepTime(), count=300):
            fits.add("r", window)
    assert MAX_POINTS / 2 <= len(fits.points) <= MAX_POINTS and fits.windows > 5_900


def step_of(*lives):
    step = Step(1, False, 0.0)
    for life in lives:
        step.add(life)
    return step


def life(name, begin_s=0.0, held_s=0.0, turns=2, turn_s=2.0, tool_s=1.0, tokens=20, replica="r0"):
    it = Life(name, False, begin_s, begin_s)
    now_s = begin_s
    for turn in range(turns):
        it.ask("s", 100, now_s)
        now_s += held_s
        it.start("s", replica, now_s)
        now_s += turn_s
        it.end_turn("s", replica, tokens, None, now_s)
        if turn < turns - 1:
            now_s += tool_s
    it.end(False, now_s)
    return it


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (life("late", turns=6), "with 6 turns against 2: 8.0 s more in generation (120 tokens against 40)"),
        (life("late", tool_s=30.0), "29.0 s more between turns, in tools (longest 30.0 s)"),
        (life("late", held_s=10.0), "20.0 s more held by admission (2 holds, longest 10.0 s)"),
        (life("late", begin_s=9.0), "9.0 s later to ask for its first turn"),
        (life("late", turn_s=8.0, replica="r1"),
         "12.0 s more in generation (400 ms a token against 175, its replica r1 took 2.3 times as long for a token"),
        (life("late", turn_s=8.0, tokens=90), "12.0 s more in generation (180 tokens against 40)"),
        (life("late", begin_s=0.1), "no later than most"),
    ],
)  # fmt: skip
def test_the_reason_is_named(late, words):
    step = step_of(life("a"), life("b"), life("c"), late)
    assert words in why(late, step)


def test_of_many_trajectories_the_last_are_kept():
    lives = [life(f"t{number}", begin_s=float(number)) for number in range(30)]
    step = step_of(*reversed(lives))
    assert [it.trajectory_id for it in step.last()] == [f"t{number}" for number in range(29, 21, -1)]
    assert step.ended == 30
