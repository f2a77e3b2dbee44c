"""The numbers of a fixed-work comparison: medians over repeats, and ratios to the base arm with their uncertainty."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from verl_war.compare.fixed_work.records import Record, differ

RESAMPLES = 2000
CONFIDENCE = 0.95
"""Of the bootstrap interval (percentile method; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13)."""

MIN_REPEATS = 3
"""Below, an interval would only repeat the extremes."""

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of the tables.

    Attributes:
        name: For people, with the unit.
        of: Totals of a run -> value.
        digits: Decimals to show.
    """

    name: str
    of: Callable[[Mapping[str, float]], float]
    digits: int = 0


def _total(key: str, factor: float = 1.0) -> Callable[[Mapping[str, float]], float]:
    return lambda totals: totals[key] * factor


def _share(part: str, whole: str) -> Callable[[Mapping[str, float]], float]:
    return lambda totals: 100 * totals[part] / totals[whole] if totals[whole] else 0.0


MEASURES = (
    Measure(name="makespan s", of=_total("makespan_s"), digits=1),
    Measure(name="t50 s", of=_total("t50_s"), digits=1),
    Measure(name="t90 s", of=_total("t90_s"), digits=1),
    Measure(name="t99 s", of=_total("t99_s"), digits=1),
    Measure(name="output tokens/s", of=_total("output_tokens_per_s")),
    Measure(name="output tokens", of=_total("output_tokens")),
    Measure(name="prompt tokens computed", of=_total("prompt_tokens_computed")),
    Measure(name="prompt tokens cached", of=_total("prompt_tokens_cached")),
    Measure(name="preemptions", of=_total("preemptions")),
    Measure(name="drafted tokens", of=_total("drafted_tokens")),
    Measure(name="accepted %", of=_share("accepted_tokens", "drafted_tokens")),
    Measure(name="accepted of output %", of=_share("accepted_tokens", "output_tokens")),
    Measure(name="steps with drafts %", of=_total("drafting_steps_share", 100)),
    Measure(name="time for drafts %", of=_total("draft_time_share", 100), digits=1),
    Measure(name="engines busy s", of=_total("busy_s"), digits=1),
    Measure(name="held s", of=_total("held_s"), digits=1),
    Measure(name="moves", of=_total("moves")),
    Measure(name="contexts over KV, peak", of=_total("kv_demand_peak"), digits=2),
    Measure(name="engines' memory GiB", of=_total("peak_rss_bytes", 1 / GIB), digits=1),
)


def judged(runs: Sequence[Record], base: str) -> list[Record]:
    """The runs; those of other work or other code than the base's run of the same case are refused."""
    bases = {run.case.name: run for run in runs if run.arm == base and run.status == "complete"}
    return [_beside(run, bases.get(run.case.name), base) for run in runs]


def _beside(run: Record, of_base: Record | None, base: str) -> Record:
    if run.status != "complete" or of_base is None:
        return run
    done, expected = run.totals["output_tokens"], of_base.totals["output_tokens"]
    if differ(done, expected):
        return replace(run, status="refused", cause=f"{done:.0f} tokens were generated, and {expected:.0f} by {base}")
    if run.version != of_base.version:
        cause = f"made with {run.version}, and {base} with {of_base.version}; repeat the case with --fresh"
        return replace(run, status="refused", cause=cause)
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How much faster an arm is than the base.

    Attributes:
        mean: Geometric mean of the base's makespan over the arm's, over paired repeats.
        low, high: Bootstrap interval of it; None for fewer than `MIN_REPEATS` repeats.
        least, most: Of single repeats.
        n: Paired repeats.
    """

    mean: float
    low: float | None
    high: float | None
    least: float
    most: float
    n: int


def ratio_of(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Ratio | None:
    """Ratio of (base, arm) seconds of paired repeats; None without any."""
    if not pairs:
        return None
    logs = [math.log(base / arm) for base, arm in pairs]
    low = high = None
    if len(logs) >= MIN_REPEATS:
        rng = random.Random(seed)
        means = sorted(fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
        tail = (1 - CONFIDENCE) / 2
        low, high = (math.exp(means[round(share * (RESAMPLES - 1))]) for share in (tail, 1 - tail))
    return Ratio(
        mean=math.exp(fmean(logs)), low=low, high=high, least=math.exp(min(logs)), most=math.exp(max(logs)), n=len(logs)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An arm at a load.

    Attributes:
        values: Measure's name -> median over the repeats that count.
        ratio: To the base; None for the base itself and without paired repeats.
    """

    load: float
    arm: str
    n: int
    values: dict[str, float]
    ratio: Ratio | None


def rows_of(runs: Sequence[Record], arms: Sequence[str]) -> list[Row]:
    """One row for every load and arm that has a complete run. `runs` are judged; the first arm is the base."""
    counted = [run for run in runs if run.status == "complete"]
    rows = []
    for load in sorted({run.case.load for run in counted}):
        of_arm = {arm: {r.case.repeat: r for r in counted if r.arm == arm and r.case.load == load} for arm in arms}
        base = of_arm[arms[0]]
        for arm in arms:
            repeats = of_arm[arm]
            if repeats:
                values = {it.name: median(it.of(run.totals) for run in repeats.values()) for it in MEASURES}
                both = sorted(set(base) & set(repeats))
                pairs = [(base[it].totals["makespan_s"], repeats[it].totals["makespan_s"]) for it in both]
                ratio = ratio_of(pairs) if arm != arms[0] else None
                rows.append(Row(load=load, arm=arm, n=len(repeats), values=values, ratio=ratio))
    return rows


def parts_of(rows: Sequence[Row], load: float, parts: Mapping[str, str]) -> dict[str, float]:
    """What each part of WAR gives at a load: ratio of WAR over that of WAR without it; 1 = nothing.

    Args:
        rows: Of all arms.
        load: Which.
        parts: Arm that lacks a part -> the part's name.
    """
    ratios = {row.arm: row.ratio.mean for row in rows if row.load == load and row.ratio is not None}
    if "war" not in ratios:
        return {}
    return {part: ratios["war"] / ratios[arm] for arm, part in parts.items() if arm in ratios}


def as_plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [
        {"load": row.load, "arm": row.arm, "n": row.n, "medians": row.values,
         "speed_up": None if row.ratio is None else {name: getattr(row.ratio, name) for name in Ratio.__slots__}}
        for row in rows
    ]  # fmt: skip
