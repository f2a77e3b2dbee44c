"""The report as text: a table for the terminal and Markdown for the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_war.compare.report import QUANTITIES, Quantity
from verl_war.core import speculation_report, step_stats

NOTHING = "-"


def comparison_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Header and rows of the side-by-side table."""
    arms, base = summary["arms"], summary["base"]
    header = ["", *arms, *(f"{arm}/{base} (min..max)" for arm in summary["ratios"])]
    blanks = [NOTHING for _ in summary["ratios"]]
    rows = [["steps", *("+".join(map(str, arm["steps"])) for arm in arms.values()), *blanks]]
    for name, key in (("reward, first step", "reward_first"), ("reward, last step", "reward_last")):
        rows.append([name, *(number(arm[key], 4) for arm in arms.values()), *blanks])
    for quantity in QUANTITIES:
        values = [number(arm["quantities"][quantity.name], quantity.digits) for arm in arms.values()]
        rows.append([quantity.name, *values, *_ratios(quantity, summary)])
    for key in sorted({key for arm in arms.values() for key in arm["validation"]}):
        rows.append(
            [f"{key}, first -> last", *(_first_last(arm["validation"].get(key)) for arm in arms.values()), *blanks]
        )
    return [header, *rows]


def war_rows(metrics: dict[str, dict[str, float]]) -> list[list[str]]:
    """Header and rows of the table of WAR's own metrics."""
    rows = [["metric", "unit", "median", "min", "max"]]
    replicas = 1 + max((int(part) for key in metrics for part in key.split("/") if part.isdigit()), default=0)
    names = step_stats.metric_names(replicas) | speculation_report.metric_names()
    names |= {name: name for name in step_stats.TRAINER_METRICS}
    metrics_table = step_stats.METRICS | speculation_report.METRICS | step_stats.TRAINER_METRICS
    for key, values in metrics.items():
        unit = metrics_table[names[key]][0] if key in names else NOTHING
        rows.append([key, unit, *(f"{values[name]:.6g}" for name in ("median", "min", "max"))])
    return rows


def number(value: float | None, digits: int) -> str:
    """``value`` with thousands separated, or a dash."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _ratios(quantity: Quantity, summary: dict[str, Any]) -> list[str]:
    return [_ratio(ratios[quantity.name]) for ratios in summary["ratios"].values()]


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return NOTHING
    parts = [f"{found['ratio']:.2f}"]
    for label, spread in (("", found["steps_min_max"]), ("repeats ", found["repeats_min_max"])):
        if spread is not None:
            parts.append(f"({label}{spread[0]:.2f}..{spread[1]:.2f})")
    return " ".join(parts)


def _first_last(values: dict[str, float] | None) -> str:
    return NOTHING if values is None else f"{values['first']:.4f} -> {values['last']:.4f}"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def markdown_report(report: dict[str, Any], plots: Sequence[str]) -> str:
    """The whole report.

    Args:
        report: What ``report.json`` holds.
        plots: Paths of the plots, relative to the report.
    """
    plan, summary = report["plan"], report["summary"]
    parts = [
        f"# {plan['recipe']}, {plan['algorithm']}: {' and '.join(summary['arms'])}",
        f"Command: `{report['command']}`",
        as_markdown(comparison_rows(summary)),
        notes(report),
        *(f"![{plot}]({plot})" for plot in plots),
    ]
    for arm, values in summary["arms"].items():
        if values["war"]:
            parts += [f"## Metrics of {arm}, over its steps", as_markdown(war_rows(values["war"]))]
    parts += ["## Where the numbers come from", as_markdown(_source_rows())]
    parts += ["## Trials", as_markdown(_trial_rows(report))]
    parts += [
        "## Environment",
        as_markdown([["", ""], *([key, value] for key, value in report["environment"].items())]),
    ]
    return "\n\n".join(parts) + "\n"


def notes(report: dict[str, Any]) -> str:
    """How to read the table, and what is missing from it."""
    lines = [
        "Medians and their ratios leave out the first step after every start. A ratio is that of the two numbers "
        "beside it; min..max is over the ratios of single steps of the same repeat."
    ]
    for arm, values in report["summary"]["arms"].items():
        for repeat, steps in enumerate(values["missing_steps"], 1):
            if steps:
                lines.append(f"{arm}, repeat {repeat}: steps {', '.join(map(str, steps))} are not on record.")
    versions = sorted({trial["version"] for trial in report["trials"]})
    if len(versions) > 1:
        lines.append(f"The trials ran on different versions of verl_war: {', '.join(versions)}.")
    return "\n".join(lines)


def _source_rows() -> list[list[str]]:
    rows = [["row", "verl's metric", "over steps", "first steps"]]
    return rows + [[q.name, q.source, q.aggregate, "left out" if q.warm else "included"] for q in QUANTITIES]


def _trial_rows(report: dict[str, Any]) -> list[list[str]]:
    rows = [["trial", "seed", "starts", "wall s", "verl_war", "log, checkpoints, TensorBoard"]]
    for trial in report["trials"]:
        facts = (trial["name"], trial["seed"], trial["attempts"], f"{trial['seconds']:.0f}", trial["version"])
        rows.append([*map(str, facts), f"`{trial['name']}/`"])
    return rows
