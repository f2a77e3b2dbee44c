"""Curves of a comparison as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_war.compare.report import QUANTITIES, REWARD_KEY, Runs
from verl_war.compare.series import Series

Curve = Callable[[Series], dict[int, float]]

COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:green")

_BY_NAME = {quantity.name: quantity.per_step for quantity in QUANTITIES}

PLOTS: dict[str, tuple[tuple[str, Curve], ...]] = {
    "reward": (("mean reward of a step", lambda series: series.values(REWARD_KEY)),),
    "tokens": (
        ("prompt tokens of a step", _BY_NAME["prompt tokens"]),
        ("response tokens of a step", _BY_NAME["response tokens (generated and tool results)"]),
    ),
    "seconds": (
        ("step, s", lambda series: series.values("timing_s/step")),
        ("rollout, s", lambda series: series.values("timing_s/gen")),
    ),
}
"""File name -> its panels: axis label and curve."""


def draw(runs: Runs, folder: Path) -> list[Path]:
    """Write one PNG per entry of :data:`PLOTS` and return the paths. Repeats share a colour."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw_file(runs, folder / f"{name}.png", panels) for name, panels in PLOTS.items()]


def _draw_file(runs: Runs, path: Path, panels: tuple[tuple[str, Curve], ...]) -> Path:
    # Without pyplot there is no global state and no display to look for.
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (label, curve) in zip(grid[0], panels, strict=True):
        _draw_panel(axes, runs, label, curve)
    figure.savefig(path, dpi=120)
    return path


def _draw_panel(axes: Axes, runs: Runs, label: str, curve: Curve) -> None:
    for colour, (arm, trials) in zip(COLOURS, runs.items(), strict=False):
        for repeat, series in enumerate(trials):
            values = curve(series)
            axes.plot(list(values), list(values.values()), marker=".", color=colour, label=None if repeat else arm)
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
