"""Figures over time: load and regime, KV, cache hits, speculation, held and moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from verl_war.report.analysis import Analysis
from verl_war.report.drawing import (
    BLUE,
    CURVES,
    FAINT,
    GRAY,
    GREEN,
    MAX_CURVES,
    ORANGE,
    PURPLE,
    RED,
    STATE_COLOURS,
    Picture,
    mark_steps,
    new_figure,
    percent,
    time_axis,
    whole_numbers,
)
from verl_war.report.timeline import Floats, ratio

LOW_COLOUR = "#d8efdf"

HEAT = colormaps["Blues"].with_extremes(bad="#e8e4dc")
"""Light is little; sand is no value."""


class TimeFigures:
    """Draws an analysis; a figure whose data the journal lacks is None."""

    def __init__(self, analysis: Analysis) -> None:
        self._series = analysis.series
        self._names = list(analysis.rollout.replicas)
        self._edges = analysis.series.edges()
        self._middles = (self._edges[:-1] + self._edges[1:]) / 2
        self._end_s = analysis.series.end_s - analysis.series.begin_s
        self._begins_s = [step.begin_s - analysis.series.begin_s for step in analysis.rollout.steps]

    def all(self) -> list[Picture]:
        """Every figure that there are data for, in the order of the page."""
        drawn = (self.fleet(), self.load(), self.kv(), self.hits(), self.speculation(), self.moves())
        return [picture for picture in drawn if picture is not None]

    def fleet(self) -> Picture:
        """What the trajectories of the whole fleet do."""
        figure = new_figure(2.6)
        axes = figure.subplots()
        layers = {name: np.nan_to_num(self._series.mean(name)) for name in ("generating", "tools", "held")}
        colours = [STATE_COLOURS["generating"], STATE_COLOURS["tool"], STATE_COLOURS["held"]]
        labels = ["turn in flight", "between turns (tools)", "held by admission"]
        axes.stackplot(self._middles, *layers.values(), colors=colours, labels=labels, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("trajectories")
        whole_numbers(axes)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
        self._finish(axes)
        text = "All live trajectories by what they do. Dashed lines: a rollout begins."
        return Picture("Load of the fleet", text, figure)

    def load(self) -> Picture | None:
        """Live trajectories of each replica, and its regime of speculation."""
        if not self._names:
            return None
        if len(self._names) > MAX_CURVES:
            return self._load_maps()
        figure = new_figure(0.6 + 0.95 * len(self._names))
        grid = figure.subplots(len(self._names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, name in zip(grid, self._names, strict=True):
            self._shade_low(axes, name)
            live = self._series.mean("live", name)
            axes.fill_between(self._middles, np.nan_to_num(live), color=FAINT, linewidth=0, label="live")
            axes.plot(self._middles, live, color=GRAY, linewidth=1.0)
            axes.plot(self._middles, self._series.mean("inflight", name), color=BLUE, label="turns in flight")
            if np.isfinite(self._series.mean("waiting", name)).any():
                axes.plot(self._middles, self._series.mean("waiting", name), color=RED, label="waiting in the engine")
            axes.set_ylim(bottom=0)
            axes.set_title(name, fontsize=8.5)
            whole_numbers(axes)
            self._finish(axes, is_last=axes is grid[-1])
        if self._series.replicas("low"):
            grid[0].fill_between([], [], color=LOW_COLOUR, label="regime low: drafting pays")
        grid[0].legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4)
        figure.supylabel("trajectories", fontsize=9)
        text = (
            "Live trajectories whose last turn was placed on the replica (gray), turns in flight there (blue) and "
            "requests that wait in its engine (red)." + self._regime_text()
        )
        return Picture("Load and regime of each replica", text, figure)

    def kv(self) -> Picture | None:
        """KV cache in use, and the working set that admission counts."""
        panels = [("kv_usage", "KV in use"), ("working_set", "working set over capacity"), ("trusted", "trusted share")]
        panels = [(name, label) for name, label in panels if self._is_known(name)]
        if ("trusted", "trusted share") in panels and not self._has_moved("trusted"):
            panels.pop()
        if not panels:
            return None
        text = (
            "KV in use: blocks that engines hold, as they say. Working set: contexts of the live trajectories and what "
            "they are expected to grow by, over the capacity; above 100% they cannot all stay cached. Trusted share: "
            "part of the capacity that admission fills once the engine has lost cache to its load; not shown if it "
            "stayed at 100%."
        )
        curves = [(label, "share", partial(self._series.mean, name)) for name, label in panels]
        return self._panels("KV cache", text, curves)

    def hits(self) -> Picture | None:
        """Hit rate of the prefix caches: believed by the router and told by the engines."""
        tokens = self._series.sums("prompt_tokens")
        if not tokens.any():
            return None
        is_wide = len(self._names) > 1
        figure = new_figure(2.6 if not is_wide else 2.9)
        grid = figure.subplots(1, 2, width_ratios=(2.2, 1), squeeze=False)[0] if is_wide else [figure.subplots()]
        axes = grid[0]
        actual = ratio(self._smooth(self._series.sums("cached_tokens")), self._smooth(tokens))
        axes.plot(self._middles, actual, color=BLUE, label="told by the engines")
        believed_of = self._series.sums("believed_of_tokens")
        if believed_of.any():
            believed = ratio(self._smooth(self._series.sums("believed_tokens")), self._smooth(believed_of))
            axes.plot(self._middles, believed, color=ORANGE, linestyle="--", label="believed by the router")
        percent(axes)
        axes.set_ylabel("prompt tokens from the cache")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
        self._finish(axes)
        if is_wide:
            self._hits_by_replica(grid[1])
        text = (
            "Prompt tokens of training turns that were found in a prefix cache. Belief above what engines tell means "
            "that cached contexts were evicted before their next turn. Right: each replica over the whole journal."
        )
        return Picture("Prefix cache hits", text if is_wide else text[: text.index(" Right")], figure)

    def speculation(self) -> Picture | None:
        """Acceptance, budget and expected gain."""
        if not self._series.replicas("low"):
            return None

        def acceptance(name: str) -> Floats:
            drafted = self._smooth(self._series.sums("spec_drafted_tokens", name))
            return ratio(self._smooth(self._series.sums("spec_accepted_tokens", name)), drafted)

        panels: list[tuple[str, str, Callable[[str], Floats]]] = [
            ("accepted over drafted tokens", "share", acceptance),
            ("budget, tokens", "count", partial(self._series.mean, "budget")),
            ("expected gain", "share", partial(self._series.mean, "gain")),
        ]
        text = (
            "Acceptance between two readings of an engine; there is none while it drafts nothing. Budget: longest "
            "draft that a request may have. Expected gain: in tokens per second over decoding without drafts."
        )
        return self._panels("Speculation", text, panels)

    def moves(self) -> Picture | None:
        """Held turns and turns that changed their replica."""
        held, moves, width_s = self._series.mean("held"), self._series.sums("moves"), self._series.width_s
        panels = [
            (np.nan_to_num(held), RED, "turns held by admission"),
            (moves, PURPLE, f"turns that started on another replica than the one before, per {width_s:g} s"),
        ]
        panels = [panel for panel in panels if panel[0].any()]
        if not panels:
            return None
        figure = new_figure(0.4 + 1.4 * len(panels))
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (values, colour, label) in zip(grid, panels, strict=True):
            axes.stairs(values, self._edges, fill=True, color=colour)
            axes.set_ylim(bottom=0)
            axes.set_title(label)
            whole_numbers(axes)
            self._finish(axes, is_last=axes is grid[-1])
        text = "Turns that wait for room in a KV cache, and conversations that move between two turns."
        return Picture("Held and moved", text, figure)

    # ---- parts ---------------------------------------------------------------------------------------

    def _load_maps(self) -> Picture:
        kinds = [("live trajectories", "live"), ("waiting in the engine", "waiting")]
        kinds = [kind for kind in kinds if self._is_known(kind[1])]
        has_regime = bool(self._series.replicas("low"))
        rows = len(kinds) + has_regime
        figure = new_figure(0.4 + 1.9 * rows)
        grid = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, name) in zip(grid, kinds, strict=False):
            self._map(axes, label, partial(self._series.mean, name), axes is grid[-1])
        if has_regime:
            low = ListedColormap(["#eef1f4", GREEN])
            self._map(grid[-1], "regime low: drafting pays", partial(self._series.mean, "low"), True, low)
        text = "A row for each replica, in the order of joining." + self._regime_text()
        return Picture("Load and regime of each replica", text, figure)

    def _panels(self, title: str, text: str, panels: Sequence[tuple[str, str, Callable[[str], Floats]]]) -> Picture:
        """One panel below the other, with a curve or a row of a map for each replica."""
        is_map = len(self._names) > MAX_CURVES
        figure = new_figure(0.5 + (1.9 if is_map else 1.45) * len(panels))
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, kind, values) in zip(grid, panels, strict=True):
            is_last, has_shares = axes is grid[-1], kind == "share"
            if is_map:
                self._map(axes, label, values, is_last, has_shares=has_shares)
                continue
            for colour, name in zip(CURVES, self._names, strict=False):
                axes.plot(self._middles, values(name), color=colour, label=name, linewidth=1.2)
            axes.set_title(label)
            if has_shares:
                percent(axes, None)
            else:
                axes.set_ylim(bottom=0)
                whole_numbers(axes)
            self._finish(axes, is_last=is_last)
        if not is_map and len(self._names) > 1:
            grid[0].legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4)
        return Picture(title, text, figure)

    def _map(
        self, axes: Axes, label: str, values: Callable[[str], Floats], is_last: bool,
        colours: ListedColormap | None = None, has_shares: bool = False,
    ) -> None:  # fmt: skip
        rows = np.array([values(name) for name in self._names])
        limit = 1.0 if colours is not None else max(float(np.nanmax(rows, initial=0.0)), 1e-9)
        mesh = axes.imshow(
            rows, aspect="auto", interpolation="nearest", origin="upper", vmin=0, vmax=limit,
            cmap=colours or HEAT, extent=(0.0, float(self._edges[-1]), len(rows) - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(False)
        axes.set_title(label)
        axes.set_ylabel("replica")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(6, len(rows))))
        if colours is None:
            form = FuncFormatter(lambda value, _: f"{100 * value:.0f}%") if has_shares else None
            axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=14, format=form)
        self._finish(axes, is_last=is_last)

    def _hits_by_replica(self, axes: Axes) -> None:
        tokens = np.array([self._series.sums("prompt_tokens", name).sum() for name in self._names])
        cached = np.array([self._series.sums("cached_tokens", name).sum() for name in self._names])
        positions = np.arange(len(self._names))
        # Bars of many replicas touch: gaps of less than a pixel flicker.
        height = 0.72 if len(self._names) <= 16 else 1.0
        axes.barh(positions, np.nan_to_num(ratio(cached, tokens)), color=BLUE, height=height)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        axes.grid(axis="y", visible=False)
        if len(self._names) <= 16:
            axes.set_yticks(positions, self._names, fontsize=8)
        else:
            axes.set_ylabel("replica")

    def _shade_low(self, axes: Axes, name: str) -> None:
        low = np.nan_to_num(self._series.mean("low", name)) >= 0.5
        changes = np.flatnonzero(np.diff(np.concatenate([[False], low, [False]]).astype(int)))
        for begin, end in zip(changes[::2], changes[1::2], strict=True):
            axes.axvspan(self._edges[begin], self._edges[end], color=LOW_COLOUR, linewidth=0, zorder=0.2)

    def _smooth(self, counts: Floats) -> Floats:
        """Sums over a window of a hundredth of the time: single bins hold few turns."""
        width = max(1, len(counts) // 100)
        smooth: Floats = np.convolve(counts, np.ones(width), mode="same") if len(counts) > width else counts
        return smooth

    def _is_known(self, name: str) -> bool:
        return any(np.isfinite(self._series.mean(name, it)).any() for it in self._series.replicas(name))

    def _has_moved(self, name: str) -> bool:
        return any(np.nanmax(np.abs(self._series.mean(name, it) - 1.0)) > 1e-6 for it in self._series.replicas(name))

    def _regime_text(self) -> str:
        has = bool(self._series.replicas("low"))
        return " Green: the engine speculates (regime low: drafting pays)." if has else ""

    def _finish(self, axes: Axes, is_last: bool = True) -> None:
        time_axis(axes, self._end_s, is_last)
        mark_steps(axes, self._begins_s)
