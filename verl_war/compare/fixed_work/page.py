"""The page of a comparison: one file of HTML that refers to nothing outside itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import matplotlib

from verl_war.compare.fixed_work import figures, tables
from verl_war.compare.fixed_work.arms import ARMS
from verl_war.compare.fixed_work.measures import MEASURES, Row, parts_of
from verl_war.compare.fixed_work.records import Record
from verl_war.report.drawing import STYLE, Picture
from verl_war.report.page import document, section, table


def page(report: dict[str, Any], rows: Sequence[Row], runs: Sequence[Record]) -> str:
    """The whole page.

    Args:
        report: What `report.json` holds.
        rows: Arms at loads.
        runs: All runs, judged.
    """
    with matplotlib.rc_context(STYLE):
        parts = list(_parts(report, rows, runs))
    return document("Fixed work: " + ", ".join(report["plan"]["arms"]), parts, report["command"])


def _parts(report: dict[str, Any], rows: Sequence[Row], runs: Sequence[Record]) -> Iterator[str]:
    arms = report["plan"]["arms"]
    yield f"<p>{escape(tables.how_to_read(arms[0]))}</p>"
    yield from (f'<div class="note">{escape(line)}</div>' for line in tables.excluded(runs))
    yield _facts(report, runs)
    counted = [run for run in runs if run.status == "complete"]
    yield from _sections(figures.speed_up(rows, arms))
    loads = list(dict.fromkeys(row.load for row in rows))
    for load in loads:
        yield f"<h2>{load:g} trajectories per replica</h2>"
        yield "<section>" + table(*_head_and_rows(rows, load)) + "</section>"
        yield from _load(arms, rows, [run for run in counted if run.case.load == load], load)
    head, *lines = [["arm", "engines", "what it is"], *map(tables.arm_row, arms)]
    yield "<h2>Arms</h2><section>" + table(head, lines) + "</section>"


def _load(arms: Sequence[str], rows: Sequence[Row], runs: Sequence[Record], load: float) -> Iterator[str]:
    parts = parts_of(rows, load, {arm: ARMS[arm].part for arm in arms if ARMS[arm].part})
    total = next((row.ratio.mean for row in rows if row.load == load and row.arm == "war" and row.ratio), 1.0)
    yield from _sections(figures.waterfall(parts, total, load), figures.trajectory_times(runs, arms, load))
    repeats = sorted({run.case.repeat for run in runs})
    middle = [run for run in runs if run.case.repeat == repeats[len(repeats) // 2]] if repeats else []
    yield from _sections(figures.gantt(middle, arms))


def _sections(*pictures: Picture | None) -> Iterator[str]:
    yield from (section(picture) for picture in pictures if picture is not None)


def _head_and_rows(rows: Sequence[Row], load: float) -> tuple[list[str], list[list[str]]]:
    """The speed-up comes last: that column is as wide as its text."""
    names = [measure.name for measure in MEASURES]
    head, *lines = [[*line[:2], *line[3:], line[2]] for line in tables.load_rows(rows, load, names)]
    return head, lines


def _facts(report: dict[str, Any], runs: Sequence[Record]) -> str:
    facts = {
        "runs that count": f"{sum(run.status == 'complete' for run in runs)} of {len(runs)}",
        "replicas": str(report["settings"]["replicas"]),
        "KV of a replica": f"{report['settings']['KV tokens of a replica']:,} tokens",
        "machine": report["environment"]["machine"],
        "verl_war": report["environment"]["verl_war"],
    }
    cells = (f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts.items())
    return f'<div class="facts">{"".join(cells)}</div>'
