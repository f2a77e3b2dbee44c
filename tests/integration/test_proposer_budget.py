"""How much a worker drafts, and when it rests, against a simulated engine."""

import random

import numpy as np
import pytest

from tests.integration.draft_engine import MAX_MODEL_LEN, Engine, flush, kept, tokens
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.history import index as history
from verl_war.integration.vllm.speculation import CLASS_MATCHES, classes_of


@pytest.mark.parametrize(("step_s", "least", "most"), [(0.02, 40, 60), (0.2, 78, 80)])
def test_the_longer_a_step_the_more_text_is_read_in(step_s, least, most):
    """80 contexts come at once, and reading one in takes 20 us at least: 0.5 ms are enough for 25 of them."""
    engine = Engine(step_s=step_s)
    for number in range(80):
        engine.add(f"r{number}", tokens(number, 20), tokens(100 + number, 40))
    lookups = []
    for _ in range(4):
        engine.step()
        lookups.append(engine.speculation.report()["lookups"])
    first, second = [count for count in lookups if count][:2]
    assert first <= 30, "how long a step takes is not known yet"
    assert least <= second - first <= most
    flush(engine)
    assert all(kept(engine, f"request:r{number}") == engine.text(f"r{number}") for number in range(80))


def test_drafts_never_exceed_what_the_request_may_still_say():
    engine, span = Engine(), tokens(0, 40)
    engine.add("a", span, span, max_tokens=10)
    engine.add("b", (span * 8)[: MAX_MODEL_LEN - 12], (span * 8)[MAX_MODEL_LEN - 12 :][:12])
    seen = 0
    for _ in range(12):
        for req_id, draft in zip(list(engine.batch), engine.step(max_tokens=5), strict=True):
            limit = engine.requests[req_id]["make"][3]
            assert len(draft) <= min(5, max(0, limit - len(engine.text(req_id)) - 1))
            seen += len(draft)
        for req_id in [r for r in engine.batch if engine.done(r)]:
            engine.remove(req_id)
    assert seen


def test_budget_decides_in_auto_mode():
    """Repetitive text: off until a plain step was measured, then on; unpredictable text: off again."""
    engine, span = Engine(SpeculationLimits()), tokens(0, 40)
    engine.add("a", span, span * 6)
    assert engine.run() < 120
    assert engine.speculation.planner.regime == "low"
    engine.add("b", tokens(7, 20), tokens(8, 270))
    engine.run()
    report = engine.speculation.report()
    assert report["drafting_steps"] < 100


def test_shadow_look_ups_keep_acceptance_known_while_off():
    # Eight tokens at once cannot gain ten times.
    engine, span = Engine(SpeculationLimits(min_gain=10.0, max_draft_tokens=8)), tokens(0, 40)
    engine.add("a", span, span * 6)
    engine.run(most=300)
    report = engine.speculation.report()
    assert report["drafted_tokens"] == 0 and report["shadow_lookups"] > 3
    assert engine.speculation.planner.acceptance.mix()
    first = max(
        engine.speculation.planner.acceptance.rates(kind)[0] for kind, _ in engine.speculation.planner.acceptance.mix()
    )
    assert first > 0.8


def test_steps_rest_while_drafts_do_not_pay():
    engine = Engine(SpeculationLimits(min_gain=10.0))
    engine.add("a", tokens(0, 20), tokens(1, 250))
    for _ in range(101):
        engine.step()
    assert 70 <= engine.rested_steps <= 75, "one look in four, after the first"
    assert engine.speculation.report()["steps"] == 101
    assert engine.speculation.planner._step == pytest.approx(101, abs=3)
    rested = engine.rested_steps
    engine.add("b", tokens(2, 20), tokens(3, 100))
    engine.step()
    assert engine.rested_steps == rested, "the batch changed"
    drafting, span = Engine(SpeculationLimits()), tokens(0, 40)
    drafting.add("a", span, span * 6)
    drafting.run()
    assert drafting.rested_steps < 20


def test_watchdog_stops_drafts_that_are_never_accepted():
    engine = Engine(SpeculationLimits(mode="always", watchdog_min_tokens=50, watchdog_acceptance=0.5))
    prompt = tokens(0, 5) + [1, 2, 3, 4] * 8
    rng = random.Random(0)
    engine.add("a", prompt, [t for _ in range(60) for t in (1, 2, 3, 5 + rng.randrange(400))])
    engine.run()
    report = engine.speculation.report()
    assert "were accepted" in report["watchdog"] and report["watchdog_trips"] == 1
    assert report["drafted_tokens"] < 150


def test_drafts_take_no_blocks_that_are_short():
    """Shared contexts fit although their sum does not; what is left of the blocks bounds the drafts."""
    engine, span = Engine(), tokens(0, 40)
    engine.kv_capacity, engine.kv_free = 50, 2 * (5 + 16)
    for name in ("a", "b"):
        engine.add(name, span, span * 4)
    longest = 0
    for _ in range(20):
        longest = max(longest, *(len(draft) for draft in engine.step()))
    assert longest == 5
    assert engine.speculation.report()["kv_limited_steps"] > 0
    engine.kv_free = 20
    assert engine.step() == [[], []]


def test_classes_are_those_of_the_acceptance_table():
    table = Engine().speculation.planner.acceptance
    batch = history.DraftBatch(
        offsets=np.array([0, 2, 2, 3]),
        tokens=np.array([1, 2, 3], dtype=np.int32),
        probs=np.array([0.5, 0.9, 0.1], dtype=np.float32),
        match_length=np.array([6, 0, 64], dtype=np.int32),
        source=np.array([2, -1, 0], dtype=np.int32),
        votes=np.zeros(3, dtype=np.int32),
        score=np.zeros(3, dtype=np.float32),
    )
    assert classes_of(batch) == [table.class_of(2, 6, 0.5), -1, table.class_of(0, 64, 0.1)]
    assert table.sources == history.SOURCES and CLASS_MATCHES[0] == 1
