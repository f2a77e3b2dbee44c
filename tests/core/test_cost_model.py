import random

import pytest

from verl_war.core.cost_model import OUTLIER_RATIO, YIELD_WINDOW_TOKENS, DraftYield, ReplicaPace, StepTime, StepTimeFit
from verl_war.core.types import ReplicaSnapshot

TRUE = StepTime(base_s=0.020, token_s=120e-6, kv_token_s=20e-9)


def feed(fit, windows, seed=0, noise=0.05):
    rng = random.Random(seed)
    for _ in range(windows):
        iterations, tokens, kv_tokens = rng.randint(5, 40), rng.uniform(1, 500), rng.uniform(0, 400_000)
        busy_s = iterations * TRUE.step_s(tokens, kv_tokens) * rng.uniform(1 - noise, 1 + noise)
        fit.observe(iterations, iterations * tokens, iterations * kv_tokens, busy_s)


def reading(steps=0, tokens=0, kv=0.0, busy_s=0.0):
    return ReplicaSnapshot(running_requests=0, waiting_requests=0, kv_usage=0.0, kv_usage_peak=0.0,
                           kv_capacity_tokens=1, preemptions=0, engine_steps=steps, computed_tokens=tokens,
                           kv_token_steps=kv, busy_s=busy_s)  # fmt: skip


def test_before_any_window_the_prior_counts():
    assert StepTimeFit(prior=TRUE).value() == TRUE


def test_a_prior_that_is_wrong_by_five_is_outweighed():
    fit = StepTimeFit(prior=StepTime(base_s=0.1, token_s=24e-6, kv_token_s=100e-9))
    feed(fit, 100)
    for tokens, kv_tokens in ((1, 1000), (64, 100_000), (400, 300_000)):
        assert fit.value().step_s(tokens, kv_tokens) == pytest.approx(TRUE.step_s(tokens, kv_tokens), rel=0.1)


def test_stalls_do_not_carry_the_fit_away():
    fit = StepTimeFit()
    feed(fit, 100)
    fit.observe(1, 64, 100_000, 300.0)
    assert fit.value().step_s(64, 100_000) < 2 * TRUE.step_s(64, 100_000)


@pytest.mark.parametrize("window", [(0, 5, 5, 1.0), (3, 5, 5, 0.0), (3, 5, 5, float("nan")), (3, 5, 5, float("inf"))])
def test_windows_that_tell_nothing_are_ignored(window):
    fit = StepTimeFit()
    fit.observe(*window)
    assert fit.iterations == 0


def test_constant_windows_keep_every_coefficient_non_negative():
    fit = StepTimeFit()
    for _ in range(50):
        fit.observe(10, 80, 1000, 0.15)
    model = fit.value()
    assert min(model.base_s, model.token_s, model.kv_token_s) >= 0
    assert model.step_s(8, 100) == pytest.approx(0.015, rel=0.1)


def test_a_replica_four_times_slower_is_seen_within_seconds():
    pace = ReplicaPace()
    for _ in range(20):
        pace.update((10, 640, 0.0, 4 * 10 * TRUE.step_s(64, 0)), TRUE)
    assert pace.slowness == pytest.approx(4.0, rel=0.2)
    pace.update((1, 64, 0.0, 1e6), TRUE)
    assert pace.slowness <= OUTLIER_RATIO


def test_windows_are_differences_of_snapshots():
    pace = ReplicaPace()
    assert pace.window(reading(10, 100, 5.0, 1.0), 0.0) is None
    assert pace.window(reading(15, 160, 9.0, 1.5), 0.5) == (5, 60, 4.0, 0.5)
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
