"""A report in plain text, and the numbers that it shares with the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_war.report.analysis import Analysis
from verl_war.report.steps import Step, why

LAST_SHOWN = 3
"""Trajectories of the longest step that the summary explains."""


def features(config: Mapping[str, Any]) -> str:
    """Which parts of WAR were on."""
    on = [name for name in ("speculation", "scheduling", "admission") if config.get(name, {}).get("enabled")]
    return ", ".join(on) or "none (routing as stock verl)"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Name and value of what a whole journal comes to; what it does not tell is left out."""
    rollout, series = analysis.rollout, analysis.series
    ended = sum(step.ended for step in rollout.steps)
    failed = sum(step.failed for step in rollout.steps)
    result = [
        ("duration", duration(series.end_s - series.begin_s)),
        ("replicas", _with(len(rollout.replicas), rollout.lost_replicas, "lost")),
        ("rollouts", _with(len(rollout.steps), sum(step.validate for step in rollout.steps), "of validation")),
        ("trajectories", _with(ended, failed, "failed") + _tail(len(rollout.lives), "still live")),
        ("turns", _with(rollout.turns, rollout.failed_turns, "failed")),
        ("generated tokens", f"{series.sums('completion_tokens').sum():,.0f}"),
    ]
    prompt = series.sums("prompt_tokens").sum()
    if prompt:
        actual, believed_of = series.sums("cached_tokens").sum() / prompt, series.sums("believed_of_tokens").sum()
        believed = series.sums("believed_tokens").sum() / believed_of if believed_of else None
        note = "" if believed is None else f" (believed {100 * believed:.1f}%)"
        result.append(("prefix cache hits", f"{100 * actual:.1f}%{note}"))
    held = f"{rollout.holds:,}, {duration(rollout.held_s)} in all" if rollout.holds else "0"
    result.append(("turns held", held))
    result.append(("turns moved", f"{rollout.moves:,}"))
    if any(seen.snapshot is not None for seen in rollout.replicas.values()):
        result.append(("preemptions", f"{series.sums('preemptions').sum():,.0f}"))
    result += _speculation_facts(analysis)
    if analysis.guard_trials:
        trials = f"{analysis.guard_trials} trial{'s' if analysis.guard_trials > 1 else ''}"
        result.append(("scheduling, measured", f"{analysis.guard_speedup:.2f} times stock verl's speed in {trials}"))
    r2 = analysis.fits.r2()
    if r2 is not None:
        result.append(("step time model", f"R2 {r2:.3f} over {analysis.fits.windows:,} windows"))
    return result


def as_text(analysis: Analysis) -> str:
    """The summary of a journal."""
    rows = [("WAR's parts", features(analysis.config)), *facts(analysis)]
    width = max(len(name) for name, _ in rows)
    lines = [str(analysis.path), *(f"  {name:{width}}  {value}" for name, value in rows)]
    lines += [f"  note: {note}" for note in analysis.notes]
    steps = [step for step in analysis.rollout.steps if step.ended]
    if steps:
        longest = max(steps, key=lambda step: step.makespan_s)
        lines += ["", *_step_table(steps, analysis.series.begin_s), "", *_critical_path(longest)]
    return "\n".join(lines)


def step_rows(steps: Sequence[Step], begin_s: float) -> tuple[list[str], list[list[str]]]:
    """A table of rollouts of a journal that begins at `begin_s`: its head and its rows."""
    head = ["rollout", "begin", "trajectories", "failed", "t50", "t90", "t99", "makespan", "rule", "last"]
    rows = [
        [
            step.name,
            f"{step.begin_s - begin_s:.1f} s",
            f"{step.ended:,}" + (f" of {step.begun:,}" if step.ended < step.begun else ""),
            f"{step.failed}",
            *(f"{step.span_s(share):.1f} s" for share in (0.5, 0.9, 0.99, 1.0)),
            step.rule,
            step.last()[0].trajectory_id,
        ]
        for step in steps
    ]
    return head, rows


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _speculation_facts(analysis: Analysis) -> list[tuple[str, str]]:
    series = analysis.series
    drafted, accepted = series.sums("spec_drafted_tokens").sum(), series.sums("spec_accepted_tokens").sum()
    if not series.replicas("low"):
        return []
    if not drafted:
        return [("speculation", "no draft was verified")]
    drafts, steps = series.sums("spec_drafting_rows").sum(), series.sums("spec_steps").sum()
    share = series.sums("spec_drafting_steps").sum() / steps if steps else 0.0
    return [
        (
            "speculation",
            f"{100 * accepted / drafted:.1f}% accepted, {1 + accepted / drafts if drafts else 1:.2f} tokens a draft, "
            f"in {100 * share:.0f}% of steps",
        )
    ]


def _step_table(steps: Sequence[Step], begin_s: float) -> list[str]:
    head, rows = step_rows(steps, begin_s)
    if len(rows) > 12:
        rows = [*rows[:6], ["..."] + [""] * (len(head) - 1), *rows[-5:]]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]


def _critical_path(step: Step) -> list[str]:
    lines = [f"  last trajectories of {step.name}, the longest rollout:"]
    for life in step.last()[:LAST_SHOWN]:
        seconds = ", ".join(f"{name} {spent:.1f} s" for name, spent in life.seconds.items())
        lines += [f"    {life.trajectory_id} ({seconds})", f"      {why(life, step)}"]
    return lines


def _with(number: int, part: int, what: str) -> str:
    return f"{number:,}" + (f" ({part:,} {what})" if part else "")


def _tail(number: int, what: str) -> str:
    return f", {number:,} {what}" if number else ""
