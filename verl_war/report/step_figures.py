"""Figures by training step: makespan, critical path, the fit of the step time model, verl's own metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from verl_war.report.drawing import BLUE, GRAY, INK, ORANGE, STATE_COLOURS, Picture, new_figure
from verl_war.report.fit import FitQuality
from verl_war.report.life import Life, Span
from verl_war.report.steps import Step

SHARES = ((0.5, "half of the trajectories ended"), (0.9, "90%"), (0.99, "99%"), (1.0, "all: the makespan"))

STEPS_IN_FULL = 4
"""Steps whose critical path is drawn."""

METRICS = ("timing_s/gen", "timing_s/step", "critic/score/mean", "response_length/mean", "num_turns/mean",
           "war/cache_hit_rate", "war/spec/acceptance_rate", "perf/generated_tokens")  # fmt: skip
"""Of what verl logged, the ones that are drawn."""


def makespans(steps: Sequence[Step]) -> Picture | None:
    """How long each rollout took until some share of its trajectories had ended; None where there are not several."""
    steps = [step for step in steps if step.ended]
    if len(steps) < 2:  # its critical path tells the same
        return None
    figure = new_figure(2.8)
    axes = figure.subplots()
    positions = np.arange(len(steps))
    colours = ("#c9d9ec", "#8fb3dc", "#5a8fc9", BLUE)
    below = np.zeros(len(steps))
    for (share, label), colour in zip(SHARES, colours, strict=True):
        spans = np.array([step.span_s(share) for step in steps])
        axes.bar(positions, spans - below, bottom=below, color=colour, label=label, width=0.6)
        below = spans
    axes.set_ylabel("s since the rollout began")
    if len(steps) <= 40:
        axes.set_xticks(positions, [_short(step) for step in steps], fontsize=8)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step (v: validation)" if any(step.validate for step in steps) else "training step")
    axes.set_xlim(-0.75, max(len(steps), 4) - 0.25)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
    text = "The darker the bar, the later the trajectories: a long dark top is a tail that few trajectories make."
    return Picture("Makespan of each rollout", text, figure)


def in_full(steps: Sequence[Step]) -> list[Step]:
    """The steps that are shown with their critical path: the longest ones, in the order of time."""
    training = [step for step in steps if step.ended and not step.validate] or [step for step in steps if step.ended]
    longest = sorted(training, key=lambda step: -step.makespan_s)[:STEPS_IN_FULL]
    return sorted(longest, key=lambda step: step.begin_s)


def critical_path(step: Step) -> Figure:
    """The lives of the trajectories that ended last."""
    lives = step.last()
    figure = new_figure(0.85 + 0.27 * len(lives))
    axes = figure.subplots()
    for position, life in enumerate(lives):
        for state, colour in STATE_COLOURS.items():
            spans = [(it.begin_s - step.begin_s, it.end_s - it.begin_s) for it in life.spans if it.state == state]
            axes.broken_barh(spans, (position - 0.36, 0.72), facecolors=colour, linewidth=0)
        moves = [it.begin_s - step.begin_s for it in _moved(life)]
        axes.vlines(moves, position - 0.46, position + 0.46, color=INK, linewidth=1.6)
        axes.text(
            life.end_s - step.begin_s, position, f" {life.turns} turns", va="center", fontsize=7.5, color="#5b6673"
        )
    half_s = step.span_s(0.5)
    axes.axvline(half_s, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.text(half_s, -0.62, " half had ended", fontsize=7.5, va="bottom", color=INK)
    axes.set_yticks(range(len(lives)), [_shorten(life.trajectory_id) for life in lives], fontsize=8)
    axes.set_ylim(len(lives) - 0.4, -0.95)
    axes.set_xlim(min(0.0, *(life.begin_s - step.begin_s for life in lives)), max(step.makespan_s * 1.08, 1e-9))
    axes.set_xlabel(f"s since {step.name} began")
    axes.grid(axis="y", visible=False)
    names = {"generating": "turn in flight: prefill and decoding", "held": "held", "tool": "between turns: tools"}
    handles: list[Artist] = [Patch(color=colour, label=names[state]) for state, colour in STATE_COLOURS.items()]
    handles.append(Line2D([], [], color=INK, linewidth=1.6, label="moves to another replica"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
    return figure


def step_time(fits: FitQuality) -> Picture | None:
    """Predicted against measured time of engine iterations, and what is left."""
    if len(fits.points) < 2:
        return None
    predicted, measured = 1000 * np.array(fits.points).T
    figure = new_figure(3.3)
    left, right = figure.subplots(1, 2)
    top = 1.3 * float(max(np.percentile(predicted, 99), np.percentile(measured, 99)))
    left.plot([0, top], [0, top], color=GRAY, linewidth=1.0)
    left.plot(predicted, measured, ".", color=BLUE, alpha=0.35, markersize=3, markeredgewidth=0, rasterized=True)
    left.set_xlim(0, top)
    left.set_ylim(0, top)
    left.set_xlabel("predicted, ms an iteration")
    left.set_ylabel("measured, ms an iteration")
    off = 100 * (measured - predicted) / predicted
    right.hist(np.clip(off, -100, 100), bins=50, color=BLUE)
    right.axvline(0, color=INK, linewidth=0.9)
    right.axvline(float(np.median(off)), color=ORANGE, linewidth=1.2, label=f"median {np.median(off):+.1f}%")
    right.set_xlabel("measured over predicted, % (cut off at 100)")
    right.set_ylabel("windows")
    right.legend(loc="upper right")
    return Picture("Fit of the step time model", _fit_text(fits), figure)


def metrics(records: Mapping[int, Mapping[str, float]], title: str) -> Picture | None:
    """What verl's file logger holds, for the quantities that rollouts are judged by."""
    known = [name for name in METRICS if any(name in record for record in records.values())]
    if not known:
        return None
    columns = min(4, len(known))
    rows = -(-len(known) // columns)
    figure = new_figure(0.4 + 1.55 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, name in zip(grid, known, strict=False):
        points = [(step, record[name]) for step, record in sorted(records.items()) if name in record]
        axes.plot(*zip(*points, strict=True), color=BLUE, marker="." if len(points) <= 40 else None)
        axes.set_title(name, fontsize=8.5)
        least, most = min(0.0, *(value for _, value in points)), max(value for _, value in points)
        axes.set_ylim(least, most + 0.1 * (most - least) or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    for axes in grid[len(known) :]:
        axes.set_visible(False)
    return Picture(title, "Logged by verl, over training steps.", figure)


def _fit_text(fits: FitQuality) -> str:
    model, r2 = fits.model(), fits.r2()
    quality = (
        f"R2 = {r2:.3f} over {fits.windows:,} windows, {fits.model_r2():.3f} without the replicas' slowness"
        if r2 is not None
        else "R2 is unknown"
    )
    return (
        "Windows between two snapshots of an engine, each predicted before the model learned from it, times the "
        f"replica's slowness: {quality}. The model ends as {1000 * model.base_s:.2f} ms an iteration + "
        f"{1e6 * model.row_s:.2f} us a decoding request + {1e6 * model.token_s:.2f} us a token prefilled + "
        f"{1e9 * model.kv_token_s:.2f} ns a KV token in use."
    )


def _moved(life: Life) -> list[Span]:
    """The spans with which a trajectory begins on another replica."""
    served = [span for span in life.spans if span.replica_id]
    return [span for before, span in itertools.pairwise(served) if span.replica_id != before.replica_id]


def _short(step: Step) -> str:
    number = str(step.number) if step.number >= 0 else "?"
    return f"{number}v" if step.validate else number


def _shorten(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:10]}..{name[-10:]}"
