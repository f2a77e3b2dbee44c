"""What the draft planner believes of a decode step: measured batch sizes, others, and profiles that are wrong."""

import dataclasses
import itertools
import math
import random

import pytest

from verl_war.core.decode_time import LEARN_STEPS, DecodeTime, bucket_of
from verl_war.core.draft_budget import best_budget
from verl_war.core.speculation import DraftPlanner
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.core.step_time import MAX_STEP_S, DraftCost, StepTime

TRUE = StepTime(base_s=0.0132, row_s=0.00077, draft_s=0.0004, draft_row_s=0.0004, draft_token_s=0.00045,
                kv_token_s=3e-8)  # fmt: skip
"""SmolLM2-135M on two cores."""

BATCHES = (1, 4, 16, 64)

WRONG_STEPS = 320
"""Steps, half of them with drafts, after which a profile that is wrong by 5 makes no difference where they were."""

TERMS = ("base_s", "row_s", "token_s", "kv_token_s", "draft_s", "draft_row_s", "draft_token_s")
WRONG = {
    "all too slow": (5.0,) * 7,
    "all too fast": (0.2,) * 7,
    "drafts free": (5.0, 5.0, 5.0, 5.0, 0.2, 0.2, 0.2),
    "drafts dear": (0.2, 0.2, 0.2, 0.2, 5.0, 5.0, 5.0),
    "rows dear": (0.2, 5.0, 0.2, 5.0, 0.2, 5.0, 0.2),
    "rows cheap": (5.0, 0.2, 5.0, 0.2, 5.0, 0.2, 5.0),
}


def wrong(factors):
    return StepTime(**{name: getattr(TRUE, name) * f for name, f in zip(TERMS, factors, strict=True)})


def steps(count, batches=BATCHES, noise=0.03, seed=0):
    """Measured steps; every second one drafts."""
    rng = random.Random(seed)
    for step in range(count):
        rows = batches[step // 2 % len(batches)]
        kv_tokens = rows * rng.uniform(500, 1500)
        drafting_rows, draft_tokens = 0, 0
        if step % 2:
            drafting_rows = rng.randint(1, rows)
            draft_tokens = sum(rng.randint(1, 12) for _ in range(drafting_rows))
        cost = TRUE.draft_cost(rows, kv_tokens)
        seconds = (cost.plain_s + cost.extra_s(drafting_rows, draft_tokens)) * rng.uniform(1 - noise, 1 + noise)
        yield dict(rows=rows, kv_tokens=kv_tokens, drafting_rows=drafting_rows, draft_tokens=draft_tokens,
                   seconds=seconds)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 33, 64, 200])
def test_step_time_is_learnt(rows):
    truth = DraftCost(plain_s=0.02 + 0.001 * rows, any_draft_s=0.01, row_s=0.0003, token_s=0.0002)
    model, rng = DecodeTime(), random.Random(rows)
    assert model.cost(rows, 0.0) is None and model.plain_s(rows, 0.0) is None
    for step in range(1200):
        drafting = rng.randint(1, rows) if step % 4 else 0
        tokens = sum(rng.randint(1, 12) for _ in range(drafting))
        kv = 1000.0 * rows + 10.0 * step
        noise = rng.uniform(0.95, 1.05)
        seconds = (truth.plain_s + truth.extra_s(drafting, tokens) + 1e-7 * kv) * noise
        if step % 97 == 0:
            seconds *= 50.0  # the process was not scheduled
        model.observe(
            rows=rows,
            kv_tokens=kv,
            drafting_rows=drafting,
            draft_tokens=tokens,
            seconds=seconds,
        )
    learnt = model.cost(rows, kv)
    for drafting, tokens in [(0, 0), (rows, 4 * rows), (rows, 10 * rows), (1, 4)]:
        expected = truth.plain_s + truth.extra_s(drafting, tokens) + 1e-7 * kv
        assert learnt.plain_s + learnt.extra_s(drafting, tokens) == pytest.approx(expected, rel=0.15)


def plain(model, rows, seconds, kv_tokens=0.0, times=1):
    for _ in range(times):
        model.observe(rows=rows, kv_tokens=kv_tokens, drafting_rows=0, draft_tokens=0, seconds=seconds)


def test_nothing_is_said_beyond_what_was_measured_on_an_unknown_machine():
    model = DecodeTime()
    plain(model, 32, 0.04)
    assert model.plain_s(32, 0.0) == pytest.approx(0.04) and model.plain_s(60, 0.0) > 0.04
    assert model.plain_s(8, 0.0) is None and model.plain_s(200, 0.0) is None and model.cost(8, 0.0) is None


def test_batch_sizes_between_measured_ones_are_those_of_the_line():
    model = DecodeTime()
    for rows in (1, 2, 64, 128):
        plain(model, rows, TRUE.step_s(rows, 0), times=4 * LEARN_STEPS)
    for rows in (5, 12, 24):
        assert model.plain_s(rows, 0.0) == pytest.approx(TRUE.step_s(rows, 0), rel=0.05)
    assert model.plain_s(1000, 0.0) is None


def test_a_profile_says_it_before_anything_was_measured():
    model = DecodeTime(TRUE)
    for rows in (1, 7, 300):
        assert model.plain_s(rows, 1000.0) == TRUE.step_s(rows, 1000.0)


def test_what_drafts_cost_at_one_batch_size_tells_of_others():
    model = DecodeTime()
    for step in steps(600, batches=(4, 16)):
        model.observe(**step)
    plain(model, 8, TRUE.step_s(8, 8000), 8000.0)
    found, true = model.cost(8, 8000.0), TRUE.draft_cost(8, 8000.0)
    assert found.extra_s(8, 40) == pytest.approx(true.extra_s(8, 40), rel=0.15)


@pytest.mark.parametrize("factors", WRONG.values(), ids=WRONG)
def test_a_profile_that_is_wrong_by_five_makes_no_difference_after_some_steps(factors):
    right, off = DecodeTime(TRUE), DecodeTime(wrong(factors))
    for step in steps(WRONG_STEPS):
        right.observe(**step)
        off.observe(**step)
    for rows, per_row in itertools.product(BATCHES, (0, 2, 6)):
        found, true = off.cost(rows, 1000.0 * rows), TRUE.draft_cost(rows, 1000.0 * rows)
        tokens = per_row * rows
        expected_s = true.plain_s + true.extra_s(rows * (per_row > 0), tokens)
        assert found.plain_s + found.extra_s(rows * (per_row > 0), tokens) == pytest.approx(expected_s, rel=0.1)
        assert_same_decision(right.cost(rows, 1000.0 * rows), found, rows)


def assert_same_decision(right, found, rows):
    """The budget is as good, by the right cost, as the one that the right profile leads to."""
    for rate in (0.2, 0.5, 0.8, 0.95):
        rates = {0: (rate, rate)}
        best, other = (best_budget(cost, rows, [(0, rows)], rates, 16) for cost in (right, found))
        assert speed(right, rows, rate, other) >= 0.98 * speed(right, rows, rate, best)
        if abs(best.gain) > 0.05 or abs(other.gain) > 0.05:
            assert bool(best.lengths) == bool(other.lengths)


def speed(cost, rows, rate, budget):
    length = budget.lengths.get(0, 0)
    accepted = sum(rate**k for k in range(1, length + 1))
    return rows * (1 + accepted) / (cost.plain_s + cost.extra_s(rows * (length > 0), rows * length))


@pytest.mark.parametrize("factors", WRONG.values(), ids=WRONG)
def test_planners_come_to_the_same_regime_whatever_the_profile(factors):
    regimes = {}
    for name, prior in (("right", TRUE), ("wrong", wrong(factors)), ("none", None)):
        planner = DraftPlanner(SpeculationLimits(probe_interval_s=0.2, probe_share=0.1), ("own",), (1, 4), prior)
        for _ in range(100):
            planner.acceptance.observe(0, 10, 5)
            planner.acceptance.observe_mix({0: 1}, 1)
        rng, now_s = random.Random(0), 0.0
        for rows in (1, 4, 16):
            for _ in range(300):
                limit = planner.lookup_limit(rows, 1000.0 * rows, now_s)
                lengths = planner.allocate(rows, 1000.0 * rows, [0] * rows, [limit] * rows) if limit else []
                drafting, tokens, cost = sum(map(bool, lengths)), sum(lengths), TRUE.draft_cost(rows, 1000.0 * rows)
                seconds = (cost.plain_s + cost.extra_s(drafting, tokens)) * rng.uniform(0.97, 1.03)
                now_s += seconds
                hits = [next((i for i in range(1, n) if rng.random() > 0.8), n) for n in lengths if n]
                for length, accepted in zip(filter(None, lengths), hits, strict=True):
                    planner.observe_draft(0, length, accepted)
                planner.observe_step(rows=rows, kv_tokens=1000.0 * rows, drafting_rows=drafting, draft_tokens=tokens,
                                     accepted_tokens=sum(hits), seconds=seconds)  # fmt: skip
            regimes[name, rows] = planner.regime
    for rows in (1, 4, 16):
        assert regimes["wrong", rows] == regimes["right", rows] == regimes["none", rows], rows
    assert regimes["right", 1] == "low"


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": value} for value in (0, -3)),
        *({"seconds": value} for value in (0.0, -1.0, math.nan, math.inf, -math.inf, MAX_STEP_S * 1.01)),
        *({"kv_tokens": value} for value in (-1.0, math.nan, math.inf)),
        *({"draft_tokens": value, "drafting_rows": 2} for value in (-1, -100)),
        *({"draft_tokens": 8, "drafting_rows": value} for value in (0, -1, 5)),
    ],
)
def test_steps_that_can_not_be_are_ignored(change):
    model = DecodeTime()
    plain(model, 4, 0.02, 100.0, times=5)
    before = model.cost(4, 100.0)
    for _ in range(5):
        model.observe(**{"rows": 4, "kv_tokens": 100.0, "drafting_rows": 0, "draft_tokens": 0, "seconds": 9.0} | change)
    assert model.cost(4, 100.0) == before


def test_a_first_step_that_is_a_stall_is_overcome():
    model = DecodeTime()
    plain(model, 4, 30.0)
    plain(model, 4, 0.02, times=12)
    assert model.plain_s(4, 0.0) == pytest.approx(0.02, rel=0.05)


def test_a_machine_that_becomes_ten_times_slower_is_followed_and_a_pause_is_not():
    model = DecodeTime()
    plain(model, 4, 0.02, times=100)
    plain(model, 4, 5.0)
    assert model.plain_s(4, 0.0) < 0.022
    plain(model, 4, 0.2, times=12)
    assert model.plain_s(4, 0.0) == pytest.approx(0.2, rel=0.05)


def test_huge_contexts_and_batches_leave_finite_prices():
    model = DecodeTime()
    for rows, kv_tokens, seconds in (
        (1, 1e300, 0.01),
        (1, 1e10, 0.01),
        (10**9, 0.0, 3000.0),
        (1, 10.0, 1e-9),
        (4, 1e6, 0.02),
    ):
        for _ in range(20):
            plain(model, rows, seconds, kv_tokens)
            model.observe(rows=rows, kv_tokens=kv_tokens, drafting_rows=1, draft_tokens=10**9, seconds=seconds)
    plain(model, 4, 0.02, 1000.0, times=200)
    cost = model.cost(4, 1000.0)
    assert all(0 <= value < math.inf for value in dataclasses.astuple(cost))
    assert cost.plain_s == pytest.approx(0.02, rel=0.1)


def test_batch_buckets_are_exact_when_small_and_ordered():
    buckets = [bucket_of(rows) for rows in range(1, 1025)]
    assert buckets[:8] == list(range(8)) and buckets == sorted(buckets) and buckets[-1] < 48
