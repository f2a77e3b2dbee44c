"""What all figures have in common: colours, axes, and the way into the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

WIDTH_IN = 9.6

BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#2c6fbb", "#dd7a1f", "#3a9a5b", "#c8403a", "#7a5bb0", "#8a94a0"
INK, FAINT = "#2b3440", "#e3e7ec"
CURVES = (BLUE, ORANGE, GREEN, PURPLE, RED, "#1f9aa5", "#9a7b2c", GRAY)
"""Of replicas, where each has a curve."""

STATE_COLOURS = {"generating": BLUE, "held": RED, "tool": "#f2c879"}

MAX_CURVES = 8
"""More replicas than this share a heat map instead of having a curve each."""

STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": "#b6bec8",
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "xtick.color": "#5b6673",
    "ytick.color": "#5b6673",
    "lines.linewidth": 1.4,
    "svg.hashsalt": "verl_war",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of the page.

    Attributes:
        title: Its heading.
        text: What it shows and how to read it.
        figure: The drawing.
    """

    title: str
    text: str
    figure: Figure


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """An empty figure. Without pyplot there is no global state and no display to look for."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def as_svg(figure: Figure) -> str:
    """An SVG element for a page of HTML; it refers to nothing outside."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # Its size comes from the page.
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg height="[^"]*" ', r"<svg \1", svg, count=1)


def time_axis(axes: Axes, end_s: float, is_labelled: bool = True) -> None:
    """Seconds, minutes or hours, whichever suits the length."""
    unit, seconds = next((it for it in (("h", 3600.0), ("min", 60.0)) if end_s >= 3 * it[1]), ("s", 1.0))
    axes.set_xlim(0, max(end_s, 1e-9))
    steps = [step * factor for factor in (1, 10, 100, 1000) for step in (1, 2, 5)]
    wanted = max(end_s, 1e-9) / seconds / 9
    step = next((step for step in (0.1, 0.2, 0.5, *steps) if step >= wanted), wanted) * seconds
    axes.set_xticks([step * number for number in range(int(end_s / step) + 1)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / seconds:g}"))
    if is_labelled:
        axes.set_xlabel(f"time since the journal began, {unit}")
    else:
        axes.tick_params(labelbottom=False)


def whole_numbers(axes: Axes) -> None:
    """Ticks of a count."""
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))


def percent(axes: Axes, top: float | None = 1.0) -> None:
    """A share from 0 on."""
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def mark_steps(axes: Axes, begins_s: Sequence[float]) -> None:
    """A thin line where each rollout begins, unless they would be all that one sees."""
    if len(begins_s) <= 40:
        for begin_s in begins_s:
            axes.axvline(begin_s, color="#aab3be", linewidth=0.8, linestyle=(0, (3, 2)), zorder=0.5)
