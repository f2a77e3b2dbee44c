"""The page: one file of HTML that refers to nothing outside itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import matplotlib

from verl_war.report.analysis import Analysis
from verl_war.report.drawing import STYLE, Picture, as_svg
from verl_war.report.figures import TimeFigures
from verl_war.report.step_figures import critical_path, in_full, makespans, metrics, step_time
from verl_war.report.steps import Step, why
from verl_war.report.summary import facts, features, step_rows
from verl_war.version import __version__

CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #2b3440; background: #f4f6f8;
  margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 19px; margin: 36px 0 10px; word-break: break-all; }
h3 { font-size: 16px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: #56616e; max-width: 90ch; }
section { background: #fff; border: 1px solid #e1e6eb; border-radius: 8px; padding: 16px 18px; margin: 14px 0; }
svg { width: 100%; height: auto; display: block; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.facts div { flex: 1 1 200px; background: #fff; border: 1px solid #e1e6eb; border-radius: 8px; padding: 8px 12px; }
.facts b { display: block; font-weight: 600; } .facts span { color: #6b7683; font-size: 13px; }
.note { background: #fff7e0; border: 1px solid #efdca0; border-radius: 8px; padding: 8px 12px; margin: 10px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; margin-top: 8px; width: 100%; }
th, td { text-align: right; padding: 3px 10px 3px 0; border-bottom: 1px solid #edf0f3; vertical-align: top;
  white-space: nowrap; }
td.text { white-space: normal; }
th { color: #6b7683; font-weight: 600; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
summary { cursor: pointer; font-weight: 600; }
footer { color: #8a94a0; font-size: 13px; margin-top: 30px; }
"""

Metrics = Mapping[Path, Mapping[int, Mapping[str, float]]]
"""File of verl's file logger -> step -> name -> value."""


def page(title: str, analyses: Sequence[Analysis], logged: Metrics) -> str:
    """The whole page.

    Args:
        title: Heading.
        analyses: Journals in the order of time.
        logged: What verl logged.
    """
    with matplotlib.rc_context(STYLE):
        parts = [part for analysis in analyses for part in _journal(analysis)]
        drawn = [metrics(records, f"verl's metrics: {path.name}") for path, records in logged.items()]
        parts += [section(picture) for picture in drawn if picture is not None]
    return document(title, parts, "verl-war report")


def document(title: str, parts: Sequence[str], command: str) -> str:
    """A page of these parts that names the command it comes from."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n"
        f"<footer>verl_war {__version__}: {escape(command)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _journal(analysis: Analysis) -> Iterator[str]:
    yield f"<h2>{escape(str(analysis.path))}</h2>"
    yield f"<p>Parts of WAR that were on: {escape(features(analysis.config))}.</p>"
    yield from (f'<div class="note">{escape(note)}</div>' for note in analysis.notes)
    cells = (f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts(analysis))
    yield f'<div class="facts">{"".join(cells)}</div>'
    steps = [step for step in analysis.rollout.steps if step.ended]
    if not analysis.rollout.events:
        yield "<p>The journal holds no events.</p>"
        return
    drawn = makespans(steps)
    if drawn is not None:
        yield section(drawn, _all_steps(steps, analysis.series.begin_s))
    yield from (_critical(step) for step in in_full(steps))
    pictures = (*TimeFigures(analysis).all(), step_time(analysis.fits))
    yield from (section(picture) for picture in pictures if picture is not None)


def section(picture: Picture, more: str = "") -> str:
    """A picture with its text, and HTML below it."""
    return (
        f"<section>\n<h3>{escape(picture.title)}</h3>\n<p>{escape(picture.text)}</p>\n{as_svg(picture.figure)}{more}\n"
        "</section>"
    )


def _all_steps(steps: Sequence[Step], begin_s: float) -> str:
    head, rows = step_rows(steps, begin_s)
    return f"<details><summary>All {len(steps)} rollouts as a table</summary>{table(head, rows)}</details>"


def _critical(step: Step) -> str:
    head = ["trajectory", "turns", "tokens", "generating", "held", "tools", "ended at", "why so late"]
    rows = [
        [
            life.trajectory_id + (" (failed)" if life.failed else ""),
            f"{life.turns}",
            f"{life.completion_tokens:,}",
            *(f"{life.seconds[state]:.1f} s" for state in ("generating", "held", "tool")),
            f"{life.end_s - step.begin_s:.1f} s",
            why(life, step),
        ]
        for life in step.last()
    ]
    text = (
        f"The {len(rows)} trajectories that ended last, of {step.ended}: the last one makes the makespan of "
        f"{step.makespan_s:.1f} s. Half had ended after {step.span_s(0.5):.1f} s, 90% after {step.span_s(0.9):.1f} s, "
        f"99% after {step.span_s(0.99):.1f} s."
    )
    return section(Picture(f"Critical path of {step.name}", text, critical_path(step)), table(head, rows))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells of the last column hold text."""

    def line(cells: Sequence[str], tag: str) -> str:
        last = len(cells) - 1
        marks = (' class="text"' if number == last else "" for number in range(len(cells)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line(head, "th")}</tr>{body}</table></div>'
