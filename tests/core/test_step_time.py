"""The fit of step times to windows: priors that are wrong, stalls, readings that can't be."""

import itertools
import math
import random

import pytest

from verl_war.core.step_time import MAX_STEP_S, StepTime, StepTimeFit, Window

TRUE = StepTime(base_s=0.020, row_s=300e-6, token_s=120e-6, kv_token_s=20e-9)
REGION = [(1, 1_000, 0), (16, 30_000, 0), (64, 200_000, 0), (64, 200_000, 300), (8, 20_000, 1500)]
"""Decoding requests, KV tokens, prefilled tokens."""

WRONG_WINDOWS = 20
"""Windows, 10 s of two readings a second, after which a profile that is wrong by 5 does not matter any more."""


def window(rng, truth=TRUE, noise=0.05, slow=1.0):
    iterations, rows = rng.randint(5, 40), rng.randint(1, 64)
    prefill, kv_tokens = rng.choice([0, 0, rng.uniform(1, 1500)]), rows * rng.uniform(200, 4000)
    busy_s = iterations * truth.step_s(rows, kv_tokens, prefill) * rng.uniform(1 - noise, 1 + noise) * slow
    return Window(iterations, iterations * (rows + prefill), iterations * kv_tokens, busy_s, iterations * rows)


def feed(fit, windows, seed=0, **arguments):
    rng = random.Random(seed)
    for _ in range(windows):
        fit.observe(*window(rng, **arguments))


def assert_predicts(fit, rel=0.1, slow=1.0):
    for point in REGION:
        assert fit.value().step_s(*point) == pytest.approx(slow * TRUE.step_s(*point), rel=rel), point


def wrong(factors):
    names = ("base_s", "row_s", "token_s", "kv_token_s")
    return StepTime(**{name: getattr(TRUE, name) * f for name, f in zip(names, factors, strict=True)})


def test_before_any_window_the_prior_counts():
    assert StepTimeFit(TRUE).value() == TRUE and StepTimeFit().value() == StepTime()
    assert StepTimeFit().r2() is None and StepTimeFit().observations == 0.0


@pytest.mark.parametrize("factors", list(itertools.product((0.2, 5.0), repeat=4)))
def test_a_profile_that_is_wrong_by_five_is_outweighed(factors):
    fit = StepTimeFit(wrong(factors))
    feed(fit, WRONG_WINDOWS)
    assert_predicts(fit)
    assert fit.r2() > 0.9 and 10 < fit.observations <= WRONG_WINDOWS


@pytest.mark.parametrize("slow", [0.01, 0.2, 5.0, 100.0])
def test_a_machine_that_is_slower_in_everything_is_known_after_four_windows(slow):
    fit = StepTimeFit(TRUE)
    feed(fit, 4, slow=slow)
    assert fit.value().step_s(16, 30_000) == pytest.approx(slow * TRUE.step_s(16, 30_000), rel=0.25)
    feed(fit, WRONG_WINDOWS, slow=slow)
    assert_predicts(fit, slow=slow)


def test_an_unknown_machine_is_learnt():
    fit = StepTimeFit()
    feed(fit, WRONG_WINDOWS)
    assert_predicts(fit)


def test_where_nothing_was_prefilled_the_price_of_a_token_keeps_its_proportion():
    fit = StepTimeFit(TRUE)
    rng = random.Random(1)
    for _ in range(50):
        rows = rng.randint(1, 64)
        fit.observe(10, 10 * rows, 0.0, 10 * 2 * TRUE.step_s(rows, 0), 10 * rows)
    assert fit.value().token_s == pytest.approx(2 * TRUE.token_s, rel=0.05)


@pytest.mark.parametrize("seconds", [300.0, 1e-6])
def test_stalls_do_not_carry_the_fit_away(seconds):
    fit = StepTimeFit()
    feed(fit, 100)
    for _ in range(3):
        fit.observe(1, 64, 100_000, seconds, 64)
        feed(fit, 3, seed=1)
    assert_predicts(fit, rel=0.15)


def test_a_first_window_that_is_a_stall_is_forgotten():
    fit = StepTimeFit()
    fit.observe(1, 64, 1000, 300.0, 64)
    feed(fit, WRONG_WINDOWS)
    assert_predicts(fit)


TELLING = Window(10, 100.0, 5000.0, 0.2, 50.0)


@pytest.mark.parametrize("name", ["iterations", "tokens", "kv_token_steps", "busy_s", "row_steps"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf])
def test_windows_that_can_not_be_are_ignored(name, value):
    fit = StepTimeFit()
    fit.observe(*TELLING._replace(**{name: value}))
    assert fit.iterations == 0
    feed(fit, 50)
    before = fit.value()
    fit.observe(*TELLING._replace(**{name: value}))
    assert fit.value() == before


@pytest.mark.parametrize("change", [{"iterations": 0}, {"busy_s": 0.0}, {"busy_s": 10 * MAX_STEP_S * 1.01}])
def test_windows_without_work_and_endless_ones_are_ignored(change):
    fit = StepTimeFit()
    fit.observe(*TELLING._replace(**change))
    assert fit.iterations == 0


@pytest.mark.parametrize("huge", [{"tokens": 1e15}, {"kv_token_steps": 1e18}, {"row_steps": 1e12}])
def test_huge_numbers_leave_finite_coefficients_and_are_outweighed(huge):
    fit = StepTimeFit(TRUE)
    fit.observe(*TELLING._replace(**huge))
    feed(fit, 300)
    model = fit.value()
    assert all(0 <= c < 10 for c in (model.base_s, model.row_s, model.token_s, model.kv_token_s))
    assert model.step_s(16, 0) == pytest.approx(TRUE.step_s(16, 0), rel=0.25)


def test_constant_windows_are_reproduced_with_coefficients_that_are_not_negative():
    fit = StepTimeFit()
    for _ in range(50):
        fit.observe(10, 80, 1000, 0.15, 80)
    model = fit.value()
    assert min(model.base_s, model.row_s, model.token_s, model.kv_token_s) >= 0
    assert model.step_s(8, 100) == pytest.approx(0.015, rel=0.02)
    assert fit.r2() is None, "nothing varied"


def test_times_that_fall_with_load_leave_nothing_negative():
    fit = StepTimeFit()
    for rows in range(1, 65):
        fit.observe(10, 10 * rows, 10_000.0 * rows, 10 * (0.1 - 0.001 * rows), 10 * rows)
    model = fit.value()
    assert (model.row_s, model.kv_token_s) == (0.0, 0.0) and 0.03 < model.base_s < 0.1


def test_the_fit_follows_a_machine_that_changes():
    fit = StepTimeFit()
    feed(fit, 200)
    feed(fit, 400, seed=2, slow=2.0)
    assert_predicts(fit, slow=2.0)


def test_what_drafts_cost_goes_with_the_machine_until_it_is_measured():
    fit = StepTimeFit(TRUE)
    feed(fit, WRONG_WINDOWS, slow=3.0)
    assert fit.value().draft_token_s == pytest.approx(3 * TRUE.draft_token_s, rel=0.05)
    rng = random.Random(0)
    for _ in range(200):
        rows, tokens = rng.randint(1, 64), rng.randint(1, 300)
        extra_s = 0.001 + 20e-6 * rows + 50e-6 * tokens
        fit.observe_drafts(rows, tokens, extra_s, TRUE.step_s(rows, 0) + extra_s)
    cost = fit.value().draft_cost(32, 0.0)
    assert cost.extra_s(32, 100) == pytest.approx(0.001 + 20e-6 * 32 + 50e-6 * 100, rel=0.1)
    assert cost.extra_s(0, 0) == 0.0
