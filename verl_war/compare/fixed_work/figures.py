"""The plots of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from verl_war.compare.fixed_work.measures import Row
from verl_war.compare.fixed_work.records import Record
from verl_war.report.drawing import BLUE, CURVES, GRAY, GREEN, ORANGE, RED, Picture, new_figure

MAX_GANTT_ARMS = 6
"""More make the page too long to compare; the base and WAR come first."""

WAR_COLOUR = RED


def colours(arms: Sequence[str]) -> dict[str, str]:
    """The base is grey, WAR red, the others differ as far as colours go."""
    palette = [colour for colour in CURVES if colour not in (GRAY, WAR_COLOUR)]
    others = [arm for arm in arms[1:] if arm != "war"]
    found = {arm: palette[number % len(palette)] for number, arm in enumerate(others)}
    return found | {arms[0]: GRAY} | ({"war": WAR_COLOUR} if "war" in arms[1:] else {})


def speed_up(rows: Sequence[Row], arms: Sequence[str]) -> Picture | None:
    """Speed-up over load, a curve per arm."""
    loads = sorted({row.load for row in rows})
    if not any(row.ratio is not None for row in rows):
        return None
    figure = new_figure(4.6)
    axes = figure.subplots()
    colour = colours(arms)
    for number, arm in enumerate(arms[1:]):
        points = [row for row in rows if row.arm == arm and row.ratio is not None]
        if not points:
            continue
        middle = [row.ratio.mean for row in points]
        low = [row.ratio.mean - (row.ratio.low if row.ratio.low is not None else row.ratio.least) for row in points]
        high = [(row.ratio.high if row.ratio.high is not None else row.ratio.most) - row.ratio.mean for row in points]
        # Side by side, or bars of one load would hide one another.
        x = [row.load * (1 + 0.012 * (number - len(arms) / 2)) for row in points]
        style = "-" if arm == "war" or not arm.startswith("war") else "--"
        errors = [[max(0.0, it) for it in low], [max(0.0, it) for it in high]]
        axes.errorbar(
            x, middle, yerr=errors, label=arm, color=colour[arm], marker="o", markersize=3.5, capsize=2, linestyle=style
        )
    axes.axhline(1.0, color=GRAY, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("trajectories per replica")
    axes.set_ylabel(f"makespan of {arms[0]} / makespan")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    text = (
        "Above 1 is faster. Points are geometric means over paired repeats, bars the bootstrap interval over repeats "
        "(the extremes where there are few). Dashed: WAR without one of its parts."
    )
    return Picture(f"How much faster than {arms[0]}", text, figure)


def waterfall(parts: Mapping[str, float], total: float, load: float) -> Picture | None:
    """From the base to WAR, part by part, as what is lost without each; the rest is what they have in common."""
    if not parts:
        return None
    together = total / math.prod(parts.values())
    steps = [*sorted(parts.items(), key=lambda item: -item[1]), ("in common", together)]
    figure = new_figure(0.9 + 0.32 * (len(steps) + 2))
    axes = figure.subplots()
    reached = 1.0
    names = ["base", *(name for name, _ in steps), "war"]
    axes.barh(0, 1.0, color=GRAY)
    for position, (name, factor) in enumerate(steps, 1):
        colour = ORANGE if name == "in common" else GREEN if factor >= 1 else RED
        axes.barh(position, reached * factor - reached, left=reached, color=colour)
        axes.text(max(reached, reached * factor), position, f" x{factor:.2f}", va="center", fontsize=8)
        reached *= factor
    axes.barh(len(steps) + 1, total, color=BLUE)
    axes.text(total, len(steps) + 1, f" {total:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("speed-up")
    axes.grid(axis="y", visible=False)
    text = (
        "Each bar is WAR over WAR without that part; green parts gain, red ones cost. Parts do one another's work, so "
        "the last bar holds what none of them loses alone."
    )
    return Picture(f"What each part of WAR gives at {load:g} trajectories per replica", text, figure)


def gantt(runs: Sequence[Record], arms: Sequence[str]) -> Picture | None:
    """Replicas over time in the runs of one case: turns that run, and turns that wait."""
    order = [arms[0], *(arm for arm in arms[1:] if arm == "war"), *(arm for arm in arms[1:] if arm != "war")]
    shown = [run for arm in order for run in runs if run.arm == arm][:MAX_GANTT_ARMS]
    if not shown:
        return None
    figure = new_figure(0.8 + 1.35 * len(shown))
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for axes, run in zip(grid[:, 0], shown, strict=True):
        _gantt_of(axes, run)
    grid[-1, 0].set_xlabel("s")
    grid[-1, 0].set_xlim(0, 1.02 * max(run.totals["makespan_s"] for run in shown))
    case = shown[0].case
    text = (
        f"Load {case.load:g}, repeat {case.repeat}. Blue: turns on each replica, one on top of the other, darker where "
        f"many run. Red, below: turns that a router holds or that wait for its answer."
    )
    return Picture("What the replicas did", text, figure)


def _gantt_of(axes: Axes, run: Record) -> None:
    replicas = sorted({turn.replica_id for turn in run.turns})
    for row, replica_id in enumerate(replicas):
        turns = [turn for turn in run.turns if turn.replica_id == replica_id]
        lanes: list[float] = []
        placed = []
        for turn in sorted(turns, key=lambda turn: turn.started_s):
            free = next((lane for lane, end_s in enumerate(lanes) if end_s <= turn.started_s), len(lanes))
            lanes[free : free + 1] = [turn.ended_s]
            placed.append((free, turn))
        height = 0.62 / max(1, len(lanes))
        for lane, turn in placed:
            axes.barh(row + lane * height, turn.ended_s - turn.started_s, height, turn.started_s, align="edge",
                      color=BLUE, linewidth=0, alpha=0.85)  # fmt: skip
        waits = [(turn.asked_s, turn.started_s - turn.asked_s) for turn in turns]
        axes.broken_barh(waits, (row - 0.16, 0.12), color=RED, linewidth=0, alpha=0.5)
    axes.set_yticks([row + 0.3 for row in range(len(replicas))], replicas)
    axes.set_ylim(-0.25, len(replicas) - 0.2)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{run.arm}: {run.totals['makespan_s']:.1f} s")


def trajectory_times(runs: Sequence[Record], arms: Sequence[str], load: float) -> Picture | None:
    """Share of trajectories that had ended over time, all repeats together."""
    figure = new_figure(3.6)
    axes = figure.subplots()
    colour = colours(arms)
    drawn = False
    for arm in arms:
        ends_s = sorted(end_s for run in runs if run.arm == arm for end_s in run.end_s.values())
        if ends_s:
            shares = [(number + 1) / len(ends_s) for number in range(len(ends_s))]
            style = "--" if arm.startswith("war_") else "-"
            axes.step([0.0, *ends_s], [0.0, *shares], where="post", label=arm, color=colour[arm], linestyle=style)
            drawn = True
    if not drawn:
        return None
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
    axes.set_xlabel("s since the run began")
    axes.set_ylabel("trajectories that have ended")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    text = "All repeats together. A step ends with its last trajectory: training waits for the right end of a curve."
    return Picture(f"When trajectories end at {load:g} per replica", text, figure)
