"""The result as text: a table per load for the terminal and Markdown, a line per run for CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from verl_war.compare.fixed_work.arms import ARMS
from verl_war.compare.fixed_work.measures import CONFIDENCE, MEASURES, MIN_REPEATS, Ratio, Row
from verl_war.compare.fixed_work.records import Record
from verl_war.compare.tables import NOTHING, as_markdown, as_text, number

TERMINAL_MEASURES = (
    *("makespan s", "t90 s", "output tokens/s", "prompt tokens computed", "preemptions", "accepted of output %"),
    *("held s", "moves", "engines' memory GiB"),
)
"""What fits in a terminal; the Markdown table has all."""


def load_rows(rows: Sequence[Row], load: float, measures: Sequence[str]) -> list[list[str]]:
    """Header and one line per arm at a load."""
    digits = {measure.name: measure.digits for measure in MEASURES}
    table = [["arm", "n", "faster than the first", *measures]]
    for row in rows:
        if row.load == load:
            values = [number(None if (v := row.values[it]) != v else v, digits[it]) for it in measures]
            table.append([row.arm, str(row.n), ratio_text(row.ratio), *values])
    return table


def ratio_text(ratio: Ratio | None) -> str:
    """`1.52 (1.40..1.66), n=5`: with the bootstrap interval, or the extremes of too few repeats."""
    if ratio is None:
        return NOTHING
    low, high = (ratio.low, ratio.high) if ratio.low is not None else (ratio.least, ratio.most)
    return f"{ratio.mean:.2f} ({low:.2f}..{high:.2f}), n={ratio.n}"


def terminal(rows: Sequence[Row], runs: Sequence[Record]) -> str:
    """All loads, and what does not count."""
    parts = []
    for load in dict.fromkeys(row.load for row in rows):
        parts.append(f"{load:g} trajectories per replica\n{as_text(load_rows(rows, load, TERMINAL_MEASURES))}")
    return "\n\n".join([*parts, *excluded(runs)])


def excluded(runs: Sequence[Record]) -> list[str]:
    """A line for every run that does not count."""
    return [f"{run.name} does not count, {run.status}: {run.cause}" for run in runs if run.status != "complete"]


def markdown(report: dict[str, Any], rows: Sequence[Row], runs: Sequence[Record]) -> str:
    """The whole report."""
    parts = [
        "# Fixed work: " + ", ".join(report["plan"]["arms"]),
        f"Command: `{report['command']}`",
        how_to_read(report["plan"]["arms"][0]),
    ]
    names = [measure.name for measure in MEASURES]
    for load in dict.fromkeys(row.load for row in rows):
        parts += [f"## {load:g} trajectories per replica", as_markdown(load_rows(rows, load, names))]
    if report["parts"]:
        parts += ["## What each part of WAR gives", PARTS_TEXT, as_markdown(part_rows(report["parts"]))]
    lost = excluded(runs)
    if lost:
        parts += ["## Runs that do not count", "\n".join(f"* {line}" for line in lost)]
    parts += ["## Arms", as_markdown([["arm", "engines", "what it is"], *map(arm_row, report["plan"]["arms"])])]
    facts = [["", ""], *([key, str(value)] for key, value in {**report["settings"], **report["environment"]}.items())]
    return "\n\n".join([*parts, "## How it was made", as_markdown(facts)]) + "\n"


PARTS_TEXT = "Speed-up of `war` over that of WAR without the part: 1.00 is nothing, and parts overlap."


def how_to_read(base: str) -> str:
    """What the numbers are."""
    return (
        f"Every arm served the same trajectories from empty caches, the same number of tokens in every turn, in an "
        f"order of its own in each repeat. Numbers are medians over the n repeats that count. `faster` is the makespan "
        f"of {base} over the arm's: geometric mean over paired repeats, with the {CONFIDENCE:.0%} bootstrap interval "
        f"over repeats, or the extremes where there are fewer than {MIN_REPEATS}."
    )


def part_rows(parts: dict[str, dict[str, float]]) -> list[list[str]]:
    """Header and a line per part; parts are by load."""
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    header = ["part", *(f"{load} per replica" for load in parts)]
    return [header] + [[name, *(number(values.get(name), 2) for values in parts.values())] for name in names]


def arm_row(name: str) -> list[str]:
    """What an arm is."""
    return [name, ARMS[name].engine, ARMS[name].summary]


def as_csv(runs: Sequence[Record]) -> str:
    """A line per run, those that do not count included."""
    names = list(runs[0].totals) if runs else []
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["load", "repeat", "seed", "arm", "attempt", "status", "cause", "begun_at", "version", *names])
    for run in runs:
        case = run.case
        facts = (f"{case.load:g}", case.repeat, case.seed, run.arm, run.attempt, run.status, run.cause, run.begun_at)
        writer.writerow([*facts, run.version, *(run.totals[name] for name in names)])
    return buffer.getvalue()
