import pytest

from verl_war.core.history_config import SOURCES
from verl_war.core.speculation_report import METRICS, SpeculationReport, metric_names, reading_of
from verl_war.core.types import SpeculationReading


def counters(steps=100, drafted=200, accepted=100, **changed):
    """As an engine reports them."""
    report = {
        "steps": steps, "drafting_steps": steps // 2, "drafting_rows": 50, "kv_limited_steps": 0,
        "drafted_tokens": drafted, "accepted_tokens": accepted,
        "draft_s": 0.1, "step_s": 10.0, "max_draft_s": 0.002, "regime": "low",
        "regime_switches": 3, "regime_switch_rows": 12, "budget_tokens": 8, "expected_gain": 1.5, "history/bytes": 1000,
        "history/tokens": 40, "history/edited": 2, "history/refused_tokens": 0,
        "exchange/failed_saves": 0, "exchange/sent_bytes": 500, "faults": 0, "disabled": "",
    }  # fmt: skip
    for source in SOURCES:
        report |= {f"source/{source}/drafted_tokens": 0, f"source/{source}/accepted_tokens": 0}
    return report | {"source/own/drafted_tokens": drafted, "source/own/accepted_tokens": accepted} | changed


def test_all_metrics_are_reported_and_no_others():
    metrics = SpeculationReport().report({"r0": counters(), "r1": None})
    assert set(metrics) == set(metric_names()) and set(metric_names().values()) == set(METRICS)


def test_numbers_are_those_of_the_step():
    report = SpeculationReport()
    first = report.report({"r0": counters(), "r1": counters()})
    assert first["war/spec/drafted_tokens"] == 400 and first["war/spec/accepted_tokens_own"] == 200
    second = report.report({"r0": counters(steps=150, drafted=300, accepted=190), "r1": counters()})
    assert second["war/spec/drafted_tokens"] == 100 and second["war/spec/accepted_tokens"] == 90
    assert second["war/spec/acceptance_rate"] == pytest.approx(0.9)
    assert second["war/spec/drafting_share"] == pytest.approx(0.5) and second["war/spec/draft_time_share"] == 0.0
    assert second["war/spec/shared_bytes"] == 0 and second["war/spec/history_bytes"] == 1000


def test_an_engine_that_was_started_again_counts_from_zero():
    report = SpeculationReport()
    report.report({"r0": counters(steps=1000, drafted=2000)})
    assert report.report({"r0": counters(steps=10, drafted=20)})["war/spec/drafted_tokens"] == 20


def test_a_drafter_that_was_started_again_makes_nothing_negative():
    report = SpeculationReport()
    report.report({"r0": counters(steps=10, drafted=2000)})
    metrics = report.report({"r0": counters(steps=50, drafted=30, accepted=10)})
    assert metrics["war/spec/drafted_tokens"] == 30 and min(metrics.values()) >= 0


def test_trouble_is_counted():
    metrics = SpeculationReport().report({"r0": counters(faults=1, disabled="RuntimeError: x"), "r1": None})
    assert metrics["war/spec/faults"] == metrics["war/spec/replicas_stopped"] == 1
    assert metrics["war/spec/replicas_missing"] == 1
    nothing = SpeculationReport().report({"r0": None})
    assert nothing["war/spec/replicas_missing"] == 1 and nothing["war/spec/acceptance_rate"] == 0.0


def test_a_reading_is_part_of_the_counters():
    reading = reading_of(counters(expected_gain=0.5))
    assert reading == SpeculationReading(
        steps=100, drafting_steps=50, drafting_rows=50, drafted_tokens=200, accepted_tokens=100, draft_s=0.1,
        step_s=10.0, regime="low", budget_tokens=8, expected_gain=0.5,
    )  # fmt: skip
    stopped = reading_of(counters(disabled="ValueError: x"))
    assert (stopped.regime, stopped.budget_tokens, stopped.expected_gain) == ("high", 0, 0.0)
    with pytest.raises(KeyError):
        reading_of({"disabled": ""})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": -1}, r"steps=-1 must be >= 0"),
        ({"draft_s": float("nan")}, r"draft_s=nan must be >= 0"),
        ({"expected_gain": float("inf")}, r"expected_gain=inf must be >= 0"),
        ({"accepted_tokens": 201}, r"accepted_tokens=201 must be at most drafted_tokens=200"),
        ({"regime": "medium"}, r"regime='medium' must be low or high"),
    ],
)
def test_readings_that_cannot_be_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        reading_of(counters(**changed))
