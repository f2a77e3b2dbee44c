"""Speculation of the fleet in one training step, from the counters that the engines keep since they started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verl_war.core.history_config import SOURCES
from verl_war.core.types import SpeculationReading

METRICS: dict[str, tuple[str, str]] = {
    "war/spec/drafted_tokens": ("tokens", "draft tokens verified by the engines since the last report"),
    "war/spec/accepted_tokens": ("tokens", "of these, accepted"),
    "war/spec/acceptance_rate": ("0..1", "accepted over drafted tokens"),
    "war/spec/acceptance_length": (
        "tokens",
        "mean tokens per verified draft, the sampled one included",
    ),
    "war/spec/drafted_tokens_{source}": ("tokens", "draft tokens from this source (`core.history_config.SOURCES`)"),
    "war/spec/accepted_tokens_{source}": ("tokens", "of these, accepted"),
    "war/spec/drafting_share": ("0..1", "engine steps that verified drafts over all"),
    "war/spec/draft_time_share": ("0..1", "time spent on drafting over that of the engine steps"),
    "war/spec/draft_max_s": ("s", "longest time spent on the drafts of one engine step, since the engines started"),
    "war/spec/regime_switches": ("count", "changes of the regime: drafting pays, does not pay"),
    "war/spec/switch_requests": ("count", "live requests at the last change of the regime, mean of the replicas"),
    "war/spec/budget_tokens": ("tokens", "longest draft allowed when reported, mean of the replicas"),
    "war/spec/expected_gain": ("ratio", "gain in tokens per second expected when last decided, mean of the replicas"),
    "war/spec/kv_limited_steps": ("count", "engine steps whose drafts were cut because KV blocks were short"),
    "war/spec/history_bytes": ("bytes", "memory of the largest replica's history"),
    "war/spec/history_tokens": ("tokens", "text in it"),
    "war/spec/contexts_rebuilt": ("count", "turns whose context was not the known one continued, and was read anew"),
    "war/spec/refused_tokens": ("tokens", "text that found no room in a history since the last report"),
    "war/spec/failed_saves": ("count", "files of history that could not be written since the last report"),
    "war/spec/shared_bytes": ("bytes", "text sent from replica to replica since the last report"),
    "war/spec/faults": ("count", "errors in drafting since the last report; each stops drafting on its replica"),
    "war/spec/replicas_stopped": ("count", "replicas whose drafting is stopped, by an error or by the watchdog"),
    "war/spec/replicas_missing": ("count", "replicas that gave no numbers of their speculation"),
}
"""Metric name -> (unit, source); logged while speculation is enabled. `{source}` is one of `SOURCES`."""

Report = Mapping[str, Any]
"""What `integration.vllm.speculation.Speculation.report` gives, counted since the engine started."""


class SpeculationReport:
    """Turns the engines' counters into numbers of one step."""

    def __init__(self) -> None:
        self._last: dict[str, Report] = {}

    def report(self, replicas: Mapping[str, Report | None]) -> dict[str, float]:
        """Metrics since the call before.

        Args:
            replicas: Replica id -> its counters; None where there are none.
        """
        reports = {name: report for name, report in replicas.items() if report is not None}
        since = {name: self._since_last(name, report) for name, report in reports.items()}
        self._last.update(reports)

        def total(key: str) -> float:
            return sum(report[key] for report in since.values())

        def mean(key: str) -> float:
            return _ratio(sum(report[key] for report in reports.values()), len(reports))

        largest = max(reports.values(), key=lambda report: report["history/bytes"], default={})
        drafted, accepted = total("drafted_tokens"), total("accepted_tokens")
        metrics = {
            "war/spec/drafted_tokens": drafted,
            "war/spec/accepted_tokens": accepted,
            "war/spec/acceptance_rate": _ratio(accepted, drafted),
            "war/spec/acceptance_length": 1.0 + _ratio(accepted, total("drafting_rows")),
            "war/spec/drafting_share": _ratio(total("drafting_steps"), total("steps")),
            "war/spec/draft_time_share": _ratio(total("draft_s"), total("step_s")),
            "war/spec/draft_max_s": max((report["max_draft_s"] for report in reports.values()), default=0.0),
            "war/spec/regime_switches": total("regime_switches"),
            "war/spec/switch_requests": mean("regime_switch_rows"),
            "war/spec/budget_tokens": mean("budget_tokens"),
            "war/spec/expected_gain": mean("expected_gain"),
            "war/spec/kv_limited_steps": total("kv_limited_steps"),
            "war/spec/history_bytes": largest.get("history/bytes", 0),
            "war/spec/history_tokens": largest.get("history/tokens", 0),
            "war/spec/contexts_rebuilt": total("history/edited"),
            "war/spec/refused_tokens": total("history/refused_tokens"),
            "war/spec/failed_saves": total("exchange/failed_saves"),
            "war/spec/shared_bytes": total("exchange/sent_bytes"),
            "war/spec/faults": total("faults"),
            "war/spec/replicas_stopped": sum(bool(report["disabled"]) for report in reports.values()),
            "war/spec/replicas_missing": len(replicas) - len(reports),
        }
        for source in SOURCES:
            for kind in ("drafted", "accepted"):
                metrics[f"war/spec/{kind}_tokens_{source}"] = total(f"source/{source}/{kind}_tokens")
        return metrics

    def _since_last(self, name: str, report: Report) -> dict[str, float]:
        last = self._last.get(name, {})
        numbers = {key: value for key, value in report.items() if isinstance(value, (int, float))}
        # What was started again, a drafter or its engine, counts from zero.
        return {key: value - (last.get(key, 0) if value >= last.get(key, 0) else 0) for key, value in numbers.items()}


def reading_of(report: Report) -> SpeculationReading:
    """What the manager is told of an engine's counters; an engine whose drafting is stopped has no budget.

    Raises:
        KeyError: A counter is missing.
        ValueError: A counter cannot be.
    """
    values = {field.name: report[field.name] for field in fields(SpeculationReading)}
    if report["disabled"]:
        values |= {"regime": "high", "budget_tokens": 0, "expected_gain": 0.0}
    return SpeculationReading(**values)


def metric_names() -> dict[str, str]:
    """Every metric -> its name in `METRICS`."""
    return {
        name.replace("{source}", source): name
        for name in METRICS
        for source in (SOURCES if "{source}" in name else ("",))
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
