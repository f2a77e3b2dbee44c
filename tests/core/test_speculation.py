"""The draft budget: what it chooses, when it switches, what it costs, and how it recovers."""

import copy
import dataclasses
import itertools
import random
import time

import pytest

from verl_war.core.acceptance import PROB_LEVELS, AcceptanceTable
from verl_war.core.draft_budget import best_budget, best_length, expected_accepted, kv_limit
from verl_war.core.speculation import PLAIN_EVERY_STEPS, DraftPlanner
from verl_war.core.speculation_limits import SpeculationLimits, change_limits
from verl_war.core.step_time import DraftCost, StepTime

SOURCES = ("own", "siblings", "earlier_steps", "global")
BUCKETS = (1, 2, 4, 8, 16)


def cost(plain_s=0.014, any_draft_s=0.0004, row_s=0.0, token_s=0.0005):
    return DraftCost(plain_s=plain_s, any_draft_s=any_draft_s, row_s=row_s, token_s=token_s)


def planner(**limits):
    return DraftPlanner(SpeculationLimits(**{"probe_interval_s": 1e4, **limits}), SOURCES, BUCKETS)


def run_steps(subject, rows, steps, *, plain_s=0.014, token_s=0.0005, any_s=0.0004, accept=1.0, found=16, start_s=0.0):
    """Drives a planner against an engine with known times; every row finds ``found`` tokens. Returns drafts a step."""
    kind = subject.acceptance.class_of(0, 16, 0.9)
    rng = random.Random(1)
    now, history, before = start_s, [], []
    for _ in range(steps):
        accepted = []
        for length in before:
            hits = next((i for i in range(length) if rng.random() > accept), length)
            subject.observe_draft(kind, length, hits)
            accepted.append(hits)
        tokens = sum(before)
        seconds = plain_s + (any_s + token_s * tokens if tokens else 0.0)
        now += seconds
        subject.observe_step(
            rows=rows, kv_tokens=1000.0 * rows, drafting_rows=len(before), draft_tokens=tokens,
            accepted_tokens=sum(accepted), seconds=seconds,
        )  # fmt: skip
        limit = subject.lookup_limit(rows, 1000.0 * rows, now)
        before = []
        if limit:
            subject.acceptance.observe_mix({kind: rows}, rows)
            before = [n for n in subject.allocate(rows, 1000.0 * rows, [kind] * rows, [min(found, limit)] * rows) if n]
        history.append(sum(before))
    return history


@pytest.mark.parametrize(("first", "later", "length"), [(0.5, 0.5, 1), (0.9, 0.8, 7), (0.3, 0.99, 40), (1.0, 0.0, 3)])
def test_expected_accepted_is_the_sum_over_positions(first, later, length):
    assert expected_accepted(first, later, length) == pytest.approx(sum(first * later**i for i in range(length)))
    assert expected_accepted(first, later, 0) == 0.0


@pytest.mark.parametrize("first", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("later", [0.3, 0.8, 0.97])
@pytest.mark.parametrize("price", [20.0, 71.0, 300.0])
def test_best_length_equals_brute_force(first, later, price):
    c = cost(row_s=0.0002)
    earned = {
        k: expected_accepted(first, later, k) - price * (c.token_s * k + (c.row_s if k else 0.0)) for k in range(25)
    }
    length, value = best_length(first, later, price, c, 24)
    assert value == pytest.approx(max(0.0, *earned.values()), abs=1e-12)
    assert earned[length] == pytest.approx(value, abs=1e-12)


def brute_force(c, rows, rates, limit):
    """Best throughput over all draft lengths of ``rows`` rows with the given rates, one row each."""
    best = rows / c.plain_s
    for lengths in itertools.product(range(limit + 1), repeat=rows):
        accepted = sum(expected_accepted(*rate, k) for rate, k in zip(rates, lengths, strict=True))
        seconds = c.plain_s + c.extra_s(sum(k > 0 for k in lengths), sum(lengths))
        best = max(best, (rows + accepted) / seconds)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_budget_is_optimal(seed):
    rng = random.Random(seed)
    c = cost(
        any_draft_s=rng.choice([0.0, 0.002, 0.01]), row_s=rng.choice([0.0, 0.001]), token_s=rng.uniform(1e-4, 5e-3)
    )
    rates = [(rng.random(), rng.random() * 0.98) for _ in range(3)]
    budget = best_budget(c, 3, [(i, 1) for i in range(3)], dict(enumerate(rates)), 6)
    lengths = [budget.lengths.get(i, 0) for i in range(3)]
    seconds = c.plain_s + c.extra_s(sum(k > 0 for k in lengths), sum(lengths))
    found = (3 + sum(expected_accepted(*rate, k) for rate, k in zip(rates, lengths, strict=True))) / seconds
    assert found == pytest.approx(brute_force(c, 3, rates, 6), rel=1e-6)
    assert budget.gain == pytest.approx(found * c.plain_s / 3 - 1.0, abs=1e-9)


def test_the_price_of_any_draft_decides_at_large_batches():
    rates = {0: (0.8, 0.8)}
    few = cost(plain_s=0.122, any_draft_s=0.066, row_s=0.0, token_s=0.0002)
    assert best_budget(few, 64, [(0, 4)], rates, 8).lengths == {}, "4 of 64 rows can't pay for all"
    assert best_budget(few, 64, [(0, 64)], rates, 8).gain > 0.5
    free = dataclasses.replace(few, any_draft_s=0.0)
    assert best_budget(free, 64, [(0, 4)], rates, 8).lengths != {}


CPU = StepTime(base_s=0.0132, row_s=0.00077, draft_s=0.0004, draft_row_s=0.0004, draft_token_s=0.00045)
"""SmolLM2-135M on two cores."""


def test_few_live_requests_get_longer_drafts():
    def longest(rows):
        c = CPU.draft_cost(rows, 0.0)
        return max(best_budget(c, rows, [(0, rows)], {0: (0.9, 0.9)}, 24).lengths.values(), default=0)

    lengths = [longest(rows) for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    limited = planner(max_step_draft_tokens=64)
    assert [limited._cap(rows) for rows in (1, 2, 8, 64, 256)] == [24, 24, 8, 1, 1]
    assert limited._cap(257) == 0 == limited._cap(0)


def test_nothing_is_drafted_before_a_plain_step_was_measured():
    subject = planner()
    assert subject.lookup_limit(1, 100.0, 0.0) == 0
    subject.observe_step(rows=1, kv_tokens=100.0, drafting_rows=0, draft_tokens=0, accepted_tokens=0, seconds=0.01)
    for step in range(20):
        limit = subject.lookup_limit(1, 100.0, 0.01 * step)
    assert limit > 0 and subject.regime == "low"


def test_drafts_where_it_pays_and_stops_where_it_does_not():
    subject = planner(dwell_s=0.5)
    good = run_steps(subject, 1, 200, accept=0.95)
    assert sum(n > 0 for n in good[40:]) > 150 and subject.regime == "low" and subject.gain > 0.5
    bad = run_steps(subject, 1, 400, accept=0.02, start_s=100.0)
    assert not any(bad[-100:]) and subject.regime == "high"
    assert subject.switches == 2 and subject.switch_rows == 1


def test_expensive_drafts_stop_although_they_are_accepted():
    subject = planner()
    drafts = run_steps(subject, 64, 400, plain_s=0.06, any_s=0.05, token_s=0.004, accept=0.6)
    assert not any(drafts[-50:]) and subject.regime == "high"


def test_plain_steps_are_kept_while_drafting():
    drafts = run_steps(planner(), 1, 6 * PLAIN_EVERY_STEPS, accept=0.95)
    plain = [i for i, n in enumerate(drafts[64:]) if n == 0]
    assert 3 <= len(plain) <= 12


def told(gains, step_s=1.0, **limits):
    """Regimes and look-up limits of a planner that expects these gains, asked once in `step_s` seconds."""
    subject = planner(**limits)
    gain = iter(gains)
    subject._decide = lambda rows, kv, cap: (4, next(gain))
    seen = []
    for step in range(len(gains)):
        limit = subject.lookup_limit(2, 0.0, step * step_s)
        seen.append((subject.regime, limit))
    return seen


def test_regime_needs_min_gain_to_begin_and_half_of_it_to_go_on():
    seen = told([0.1, 0.19, 0.2, 0.1, 0.09, 0.1, 0.09], min_gain=0.2, dwell_s=10.0)
    assert seen == [*[("high", 0)] * 2, *[("low", 4)] * 2, ("low", 0), ("low", 4), ("low", 0)]


def test_a_regime_is_left_when_drafts_did_not_pay_for_the_dwell_and_comes_back_after_another():
    seen = told([0.3, *[0.0] * 10, *[0.3] * 12], dwell_s=10.0)
    assert [regime for regime, _ in seen] == ["low"] * 10 + ["high"] * 10 + ["low"] * 3
    assert [limit for _, limit in seen] == [4] + [0] * 19 + [4] * 3


def test_a_loss_is_not_waited_out_nor_is_a_gain_after_it():
    assert [limit for _, limit in told([0.3, 0.3, 0.0, 0.3], dwell_s=1000.0)] == [4, 4, 0, 4]


def test_a_regime_that_flaps_changes_once_per_dwell():
    regimes = [regime for regime, _ in told([0.3, 0.0] * 500, step_s=0.1, dwell_s=10.0)]
    assert regimes == ["low"] * 1000
    steps = [0.3] + [0.0] * 100  # a moment's gain every 10.1 s
    regimes = [regime for regime, _ in told(steps * 20, step_s=0.1, dwell_s=10.0)]
    changes = [step for step, pair in enumerate(itertools.pairwise(regimes)) if pair[0] != pair[1]]
    assert len(changes) > 5 and all(later - step >= 100 for step, later in itertools.pairwise(changes))


def test_the_next_step_is_asked_for_only_while_drafts_pay():
    subject = planner(dwell_s=10.0)
    gains = iter([0.0, 0.3, 0.0, 0.3])
    subject._decide = lambda rows, kv, cap: (4, next(gains))
    asked = [bool(subject.lookup_limit(2, 0.0, float(step))) is subject.is_drafting for step in range(4)]
    assert asked == [True] * 4 and subject.is_drafting


def used_to_short_turns(rows=16, **run):
    """A planner that drafts, and that has seen turns of ten tokens end."""
    subject = planner(favour_long_turns=True)
    run_steps(subject, rows, 1200, **run)
    for _ in range(50):
        subject.turn_lengths.observe(10)
    kind = subject.acceptance.class_of(0, 16, 0.9)
    return subject, kind


def test_who_lasts_long_gets_longer_drafts_and_the_others_no_longer_ones():
    subject, kind = used_to_short_turns(token_s=0.0005, accept=0.9, found=24)
    alike = subject.allocate(16, 16_000.0, [kind] * 16, [24] * 16)
    assert len(set(alike)) == 1 and 0 < alike[0] < 24
    lasting = subject.allocate(16, 16_000.0, [kind] * 16, [24] * 16, [2] * 15 + [400])
    assert lasting[15] > alike[0] + 2 and lasting[:15] == alike[:15]
    subject.set_limits(change_limits(subject.limits, {"favour_long_turns": False}))
    assert subject.allocate(16, 16_000.0, [kind] * 16, [24] * 16, [2] * 15 + [400]) == alike


@pytest.mark.parametrize(("token_s", "is_longer"), [(0.0002, True), (0.0003, False)])
def test_who_lasts_long_is_not_helped_at_the_price_of_the_batch(token_s, is_longer):
    """Its tokens are worth four times as much, but the batch must keep half of what drafts gain it."""
    subject, kind = used_to_short_turns(accept=0.9, found=24)
    subject.step_time.cost = lambda rows, kv: cost(plain_s=0.002, any_draft_s=0.00002, token_s=token_s)
    subject.acceptance.rates = lambda kind: (0.95, 0.93)
    subject.turn_lengths.weights = lambda generated: [1.0, 1.0, 4.0]
    arguments = (3, 0.0, [-1, -1, kind], [0, 0, 24])
    alike, weighed = subject.allocate(*arguments), subject.allocate(*arguments, [2, 2, 400])
    assert 0 < alike[2] < 24 and (weighed[2] > alike[2]) == is_longer


@pytest.mark.parametrize("mode", ["always", "off"])
def test_fixed_modes(mode):
    subject = planner(mode=mode, max_draft_tokens=5)
    limit = subject.lookup_limit(8, 0.0, 0.0)
    assert limit == (5 if mode == "always" else 0)
    if mode == "always":
        assert subject.allocate(8, 0.0, [0, -1], [5, 0]) == [5, 0]


def test_probes_measure_the_price_and_stay_within_their_share():
    subject = planner(probe_interval_s=0.5, probe_share=0.004)
    drafts = run_steps(subject, 8, 4000, plain_s=0.02, any_s=0.03, token_s=0.004, accept=0.5)
    probes = [n for n in drafts if n]
    spent = sum(0.03 + 0.004 * n for n in probes)
    assert probes, "the price was never measured"
    assert spent < 0.012 * 4000 * 0.02
    assert not any(drafts[-10:]) or subject.regime == "high"


def test_cheap_drafts_are_found_out_by_probes():
    """The prior is that of a CPU; a machine on which drafts are almost free must end up drafting."""
    subject = planner(probe_interval_s=0.2)
    drafts = run_steps(subject, 32, 3000, plain_s=0.02, any_s=0.0002, token_s=0.00001, accept=0.35)
    assert sum(n > 0 for n in drafts[-200:]) > 150


def test_short_drafts_that_do_not_pay_together_are_left_out():
    subject = planner()
    for _ in range(4):
        subject.observe_step(rows=64, kv_tokens=0.0, drafting_rows=0, draft_tokens=0, accepted_tokens=0, seconds=0.1)
    subject.regime = "low"
    kind = subject.acceptance.class_of(0, 16, 0.9)
    assert subject.allocate(64, 0.0, [kind] + [-1] * 63, [8] + [0] * 63) == [0] * 64


def test_weight_updates_age_acceptance():
    table = AcceptanceTable(SOURCES, BUCKETS)
    kind = table.class_of(1, 4, 0.5)
    for _ in range(100):
        table.observe(kind, 4, 4)
    aged = copy.deepcopy(table)
    aged.age(0.1)
    assert aged.rates(kind) == pytest.approx(table.rates(kind))
    for either in (table, aged):
        either.observe(kind, 4, 0)
    assert aged.rates(kind)[0] < table.rates(kind)[0]


def test_many_weight_updates_leave_what_the_prior_weighed():
    """Of a class that is never seen the counts would reach 0 in a thousand steps of training, and end drafting."""
    table = AcceptanceTable(SOURCES, BUCKETS)
    prior = table.rates(0)
    for _ in range(2000):
        table.age(0.5)
    assert table.rates(0) == pytest.approx(prior)
    table.observe(0, 4, 0)
    assert table.rates(0)[0] > 0.5 * prior[0]  # one draft decides nothing


def test_a_class_whose_later_tokens_are_never_accepted_gets_one():
    assert best_length(0.9, 0.0, 50.0, cost(), 8)[0] == 1


def test_acceptance_follows_the_last_observations():
    table = AcceptanceTable(SOURCES, BUCKETS)
    kind = table.class_of(0, 2, 0.5)
    rng = random.Random(0)
    for first, later in [(0.9, 0.8), (0.2, 0.4)]:
        for _ in range(2000):
            accepted = 0
            if rng.random() < first:
                accepted = 1
                while accepted < 5 and rng.random() < later:
                    accepted += 1
            table.observe(kind, 5, accepted)
        assert table.rates(kind) == pytest.approx((first, later), abs=0.09)


def test_classes_are_distinct_and_complete():
    table = AcceptanceTable(SOURCES, BUCKETS)
    kinds = {
        table.class_of(source, match, prob)
        for source in range(len(SOURCES))
        for match in (1, 2, 3, 4, 8, 16, 500)
        for prob in (0.0, 0.35, 0.99)
    }
    assert kinds == set(range(len(SOURCES) * len(BUCKETS) * len(PROB_LEVELS)))
    assert {table.source_of(kind) for kind in kinds} == {0, 1, 2, 3}
    assert [len(row) for row in table.by_match()] == [len(BUCKETS)] * len(SOURCES)


def test_mix_before_and_after_look_ups():
    table = AcceptanceTable(SOURCES, BUCKETS)
    assert sum(share for _, share in table.mix()) == pytest.approx(0.5)
    for _ in range(200):
        table.observe_mix({3: 1, -1: 3}, 4)
    assert table.mix() == [(3, pytest.approx(0.25))]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens=0 must be between 1 and 64"),
        ({"max_draft_tokens": 65}, "must be between"),
        ({"max_draft_tokens": True}, "is bool; expected int"),
        ({"min_gain": "big"}, "is str; expected float"),
        ({"min_gain": float("nan")}, "must be between"),
        ({"mode": "on"}, "must be one of auto, always, off"),
        ({"max_drafts": 3}, r"unknown key .*\.max_drafts \(did you mean .*allowed keys: mode"),
    ],
)
def test_bad_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        change_limits(SpeculationLimits(), params)


def test_good_parameters_replace_only_what_they_name():
    limits = change_limits(SpeculationLimits(), {"mode": "always", "min_gain": 1})
    assert limits == SpeculationLimits(mode="always", min_gain=1.0)


def fastest(action, repeats=30):
    """Microseconds of the fastest of ``repeats`` calls; the machine may be busy."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def test_cost_of_decisions_for_256_requests():
    subject = planner()
    kinds = [subject.acceptance.class_of(i % 4, 1 << (i % 5), (i % 10) / 10) for i in range(256)]
    for step in range(64):
        subject.observe_step(rows=256, kv_tokens=1e6, drafting_rows=0, draft_tokens=0, accepted_tokens=0, seconds=0.3)
        subject.observe_step(
            rows=256, kv_tokens=1e6, drafting_rows=200, draft_tokens=500, accepted_tokens=0, seconds=1.3
        )
        subject.acceptance.observe_mix({kind: kinds.count(kind) for kind in set(kinds)}, 256)
        subject.lookup_limit(256, 1e6, float(step))
    assert subject.regime == "high"
    assert fastest(lambda: subject.lookup_limit(256, 1e6, 0.0)) < 100
    subject.regime = "low"
    assert fastest(lambda: subject.allocate(256, 1e6, kinds, [8] * 256)) < 3000, "five times the aim, on a busy machine"


def test_drafts_leave_room_for_every_row():
    assert kv_limit(24, 4, free_tokens=4 * (24 + 16), block_tokens=16) == 24
    assert kv_limit(24, 4, free_tokens=4 * (10 + 16), block_tokens=16) == 10
    assert kv_limit(24, 4, free_tokens=63, block_tokens=16) == 0
