"""The plot of a study: how much faster than stock verl each policy is, over the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from verl_war.sim.runner import BASE, Summary


def draw_ratios(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Write a PNG of the mean ratio with its range over the seeds."""
    # Without pyplot there is no global state and no display to look for.
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"]
    policies = [name for name in dict.fromkeys(summary.policy for summary in summaries) if name != BASE]
    for index, policy in enumerate(policies):
        mine = [summary for summary in summaries if summary.policy == policy]
        loads = [summary.load for summary in mine]
        style = "--" if policy in ("upper_bound", "ideal") else "-"
        width = 2.5 if policy.startswith("war") else 1.2
        colour = colours(index % 20)
        axes.plot(
            loads,
            [s.ratio_mean for s in mine],
            marker="o",
            color=colour,
            linewidth=width,
            label=policy,
            linestyle=style,
        )
        axes.fill_between(loads, [s.ratio_least for s in mine], [s.ratio_most for s in mine], color=colour, alpha=0.1)
    axes.axhline(1.0, color="black", linewidth=1, label=BASE)
    if len({summary.load for summary in summaries}) > 1:
        axes.set_xscale("log", base=2)
    loads = sorted({summary.load for summary in summaries})
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel("trajectories per replica")
    axes.set_ylabel("makespan of stock verl / makespan, mean and range over seeds")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
