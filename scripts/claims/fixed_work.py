"""Fixed work on real engines: `verl-war compare --mode fixed-work`."""

from __future__ import annotations

from typing import Any

from scripts.claims.marks import claim
from scripts.claims.results import read, span, table, times


def _report(folder: str) -> Any:
    return read(f"{folder}/report.json")


def _rows(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["arm"], f"{row['load']:g}"): row for row in _report(folder)["rows"]}


@claim
def fixed_work(folder: str) -> str:
    """Speed-up of every arm by load, with its interval where there is one; the base's makespan in seconds."""
    rows, plan = _rows(folder), _report(folder)["plan"]
    loads = [f"{load:g}" for load in plan["loads"]]
    base, *others = plan["arms"]
    lines = [[f"{base}, s", *(f"{rows[base, load]['medians']['makespan s']:.1f}" for load in loads)]]
    lines += [[f"`{arm}`", *(_speed_up(rows.get((arm, load))) for load in loads)] for arm in others]
    return table(["trajectories per replica", *loads], lines)


def _speed_up(row: dict[str, Any] | None) -> str:
    if row is None or row["speed_up"] is None:
        return "no run counts"
    found = row["speed_up"]
    interval = "" if found["low"] is None else f" ({found['low']:.2f} - {found['high']:.2f})"
    return f"{found['mean']:.2f}{interval}"


@claim
def fixed_work_repeats(folder: str, load: str, *arms: str) -> str:
    """Repeats in which both the base and these arms count, at a load; the fewest of them."""
    rows = _rows(folder)
    return str(min(rows[arm, load]["speed_up"]["n"] for arm in arms))


@claim
def fixed_work_speedup(folder: str, arm: str, *loads: str) -> str:
    """One arm's speed-ups at some loads."""
    rows = _rows(folder)
    return times(rows[arm, load]["speed_up"]["mean"] for load in loads)


@claim
def fixed_work_span(folder: str, arm: str, *loads: str) -> str:
    """Least and greatest of one arm's speed-ups at some loads."""
    rows = _rows(folder)
    return span(rows[arm, load]["speed_up"]["mean"] for load in loads)


@claim
def fixed_work_kv(folder: str, *loads: str) -> str:
    """Peak of the base's contexts over the KV at some loads."""
    rows, base = _rows(folder), _report(folder)["plan"]["arms"][0]
    return " / ".join(f"{rows[base, load]['medians']['contexts over KV, peak']:.1f}" for load in loads)
