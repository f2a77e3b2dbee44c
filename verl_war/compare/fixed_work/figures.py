"""The plots of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from verl_war.compare.fixed_work.measures import Row
from verl_war.compare.fixed_work.records import Record
from verl_war.report.drawing import BLUE, CURVES, GRAY, GREEN, ORANGE, RED, Picture, new_figure

MAX_GANTT_ARMS = 6
"""More make the page too long to compare; the base and WAR come first."""

WAR_COLOUR = RED


PALETTE = (
    *(colour for colour in CURVES if colour not in (GRAY, WAR_COLOUR)),
    "#c46aa4",
    "#5c7f1d",
    "#4b5a99",
    "#6b3a2a",
)
"""Of the arms beside base and WAR in one panel."""


def panels(arms: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Titles of a figure's panels and their arms with colours: the base grey and WAR red in each of them.

    More than ten curves cannot be told apart, so WAR without its parts has a panel of its own.
    """
    parts = [arm for arm in arms[1:] if arm.startswith("war_")]
    others = [arm for arm in arms[1:] if arm not in (*parts, "war")]
    groups = [("arms", others), ("WAR without its parts", parts)]
    found = []
    for title, members in groups:
        shown = [arm for arm in arms if arm == arms[0] or arm == "war" or arm in members]
        if members or (title == "arms" and not parts):
            beside = {arm: PALETTE[number % len(PALETTE)] for number, arm in enumerate(members)}
            fixed = {arms[0]: GRAY} | ({"war": WAR_COLOUR} if "war" in arms[1:] else {})
            found.append((title, {arm: (beside | fixed)[arm] for arm in shown}))
    return found


def speed_up(rows: Sequence[Row], arms: Sequence[str]) -> Picture | None:
    """Speed-up over load, a curve per arm."""
    loads = sorted({row.load for row in rows})
    if not any(row.ratio is not None for row in rows):
        return None
    groups = panels(arms)
    figure = new_figure(3.7 * len(groups))
    for axes, (title, colours) in zip(_column(figure, len(groups)), groups, strict=True):
        for number, (arm, colour) in enumerate(colours.items()):
            points = [row for row in rows if row.arm == arm and row.ratio is not None]
            # Side by side, or bars of one load would hide one another.
            _curve(axes, points, arm, colour, 1 + 0.012 * (number - len(colours) / 2))
        axes.axhline(1.0, color=GRAY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel(f"makespan of {arms[0]} / makespan")
        axes.set_ylim(bottom=0)
        axes.set_title(title if len(groups) > 1 else "")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_xlabel("trajectories per replica")
    text = (
        "Above 1 is faster. Points are geometric means over paired repeats, bars the bootstrap interval over repeats "
        "(the extremes where there are few)."
    )
    return Picture(f"How much faster than {arms[0]}", text, figure)


def _column(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def _curve(axes: Axes, points: Sequence[Row], arm: str, colour: str, shift: float) -> None:
    ratios = [row.ratio for row in points if row.ratio is not None]
    if not ratios:
        return
    low = [max(0.0, it.mean - (it.least if it.low is None else it.low)) for it in ratios]
    high = [max(0.0, (it.most if it.high is None else it.high) - it.mean) for it in ratios]
    axes.errorbar(
        [row.load * shift for row in points], [it.mean for it in ratios], yerr=[low, high],
        label=arm, color=colour, marker="o", markersize=3.5, capsize=2, zorder=3 if arm == "war" else 2,
    )  # fmt: skip


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
        f"Load {case.load:g}, repeat {case.repeat}. Blue: turns on each replica, those that run at the same time on "
        f"top of one another. Red, below: turns that a router holds or that wait for its answer."
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
    if not any(run.end_s for run in runs):
        return None
    groups = panels(arms)
    figure = new_figure(2.9 * len(groups))
    for axes, (title, colours) in zip(_column(figure, len(groups)), groups, strict=True):
        for arm, colour in colours.items():
            ends_s = sorted(end_s for run in runs if run.arm == arm for end_s in run.end_s.values())
            shares = [(number + 1) / len(ends_s) for number in range(len(ends_s))]
            axes.step([0.0, *ends_s], [0.0, *shares], where="post", label=arm, color=colour)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
        axes.set_ylabel("trajectories that have ended")
        axes.set_title(title if len(groups) > 1 else "")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_xlabel("s since the run began")
    text = "All repeats together. A step ends with its last trajectory: training waits for the right end of a curve."
    return Picture(f"When trajectories end at {load:g} per replica", text, figure)
