"""Reward curves and distributions of lengths of two arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from verl_war.compare.unchanged.trajectories import Trajectories
from verl_war.report.drawing import GRAY, RED, STYLE, new_figure

COLOURS = (GRAY, RED)
"""Of the base and of what is compared with it, as in the other plots of comparisons."""


def draw(studies: Sequence[Trajectories], results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG with a row for each comparison."""
    with matplotlib.rc_context(STYLE):
        figure = new_figure(2.7 * len(studies), 8.0)
        grid = figure.subplots(len(studies), 2, squeeze=False)
        for (left, right), study, result in zip(grid, studies, results, strict=True):
            _draw_curves(left, study, result)
            _draw_lengths(right, study)
        figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, study: Trajectories, result: dict[str, Any]) -> None:
    steps = np.arange(1, study.steps + 1)
    for colour, arm in zip(COLOURS, study.arms, strict=True):
        runs = np.array(list(result["curves"][arm].values()))
        axes.fill_between(steps, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, runs.mean(axis=0), color=colour, marker=".", label=arm)
    axes.set_title(f"{study.title}: {len(study.seeds)} seeds, mean and range")
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left")


def _draw_lengths(axes: Axes, study: Trajectories) -> None:
    lengths = study.values["generated_tokens"]
    for style, scope, rows in (("-", "step 1", study.step == 1), (":", "all steps", study.step >= 1)):
        for colour, arm, of_arm in zip(COLOURS, study.arms, (~study.treated, study.treated), strict=True):
            axes.ecdf(lengths[rows & of_arm], color=colour, linestyle=style, label=f"{arm}, {scope}")
    axes.set_title("distribution of lengths")
    axes.set_xlabel("generated tokens of a trajectory")
    axes.set_ylabel("share that is shorter")
    axes.legend(loc="lower right")
