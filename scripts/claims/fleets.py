"""Simulated fleets."""

from __future__ import annotations

from typing import Any

from scripts.claims.marks import claim
from scripts.claims.results import read, spread, table, times

DEFAULT_LOADS = (4, 16, 48, 64, 128)

FLEETS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("default, {}", "h100_8b", DEFAULT_LOADS),
    ("default, {}, in a later step", "h100_8b_later", (64, 128)),
    ("fast tools, {}", "fast_tools", (64, 128)),
    ("one replica half as fast, {}", "one_slow", (64,)),
    ("default, {}, replicas report 0.6 of their KV", "capacity_0.6", (128,)),
    ("default, {}, 1.5 times their KV", "capacity_1.5", (128,)),
    ("default, {}, 3 times their KV", "capacity_3.0", (128,)),
)
"""Workload with its load, folder, loads."""

GPU_FLEETS = (("one node, 64 per replica", "gpu_one_node", 64), ("two nodes, 128 per replica", "gpu_two_nodes", 128))
"""What `recipes/baseline_comparison/gpu` would run."""

Rows = dict[tuple[float, str], Any]


def _summary(folder: str) -> Rows:
    return {(row["load"], row["policy"]): row for row in read(f"{folder}/simulate.json")["summary"]}


def _spread(row: Any) -> str:
    return spread(row["ratio_mean"], row["ratio_least"], row["ratio_most"])


@claim
def made_with(folder: str) -> str:
    """Commit of the code that made a study; those made before that was recorded are older than all others."""
    version = read(f"{folder}/simulate.json")["versions"]["verl_war"]
    return version.partition(" ")[2] or "not recorded"


@claim
def fleets() -> str:
    """Scheduling alone, by workload and load."""
    rows = []
    for workload, folder, loads in FLEETS:
        summary = _summary(folder)
        for load in loads:
            peer = f"{summary[load, 'thunderagent_like']['ratio_mean']:.2f}"
            peak = f"{summary[load, 'stock']['kv_demand_peak']:.2f}"
            name, code = (f"`{folder}`", made_with(folder)) if load == loads[0] else ("", "")
            rows.append([workload.format(load), peak, _spread(summary[load, "war"]), peer, name, code])
    head = ["workload, trajectories per replica", "peak of contexts over KV", "WAR", "like ThunderAgent", "folder"]
    head.append("commit")
    return table(head, rows)


@claim
def gpu_fleets() -> str:
    """What the simulator expects of the comparison on GPUs."""
    rows = []
    for name, folder, load in GPU_FLEETS:
        summary = _summary(folder)
        stock, peer, war = (summary[load, policy] for policy in ("stock", "thunderagent_like", "war"))
        numbers = [f"{stock['kv_demand_peak']:.1f}", f"{stock['makespan_s']:.0f}", _spread(peer), _spread(war)]
        rows.append([name, *numbers, f"[{folder}](../results/{folder}/simulate.txt)"])
    head = ["", "peak of contexts over KV", "stock, s", "like ThunderAgent", "WAR", "results"]
    return table(head, rows)


@claim
def sweep(folder: str) -> str:
    """All policies of a folder, a load per column; the range for WAR alone."""
    summary = _summary(folder)
    loads = list(dict.fromkeys(load for load, _ in summary))
    policies = [policy for policy in dict.fromkeys(policy for _, policy in summary) if policy != "stock"]
    peaks = [f"{summary[load, 'stock']['kv_demand_peak']:.2f}" for load in loads]
    rows = [["peak of contexts over KV", *peaks]]
    for policy in policies:
        cells = [summary[load, policy] for load in loads]
        ratios = [_spread(cell) if policy == "war" else f"{cell['ratio_mean']:.2f}" for cell in cells]
        rows.append([f"`{policy}`", *ratios])
    return table(["trajectories per replica", *(f"{load:g}" for load in loads)], rows)


@claim
def ratio(folder: str, policy: str, load: str) -> str:
    """A policy at one load, and its range over the seeds."""
    return _spread(_summary(folder)[float(load), policy])


@claim
def speedup(folder: str, policy: str, *loads: str) -> str:
    """A policy at some loads."""
    summary = _summary(folder)
    return times(summary[float(load), policy]["ratio_mean"] for load in loads)


@claim
def seeds(folder: str) -> str:
    """How many seeds a study has."""
    return str(len(read(f"{folder}/simulate.json")["seeds"]))


@claim
def share_of(folder: str, policy: str, *loads: str) -> str:
    """WAR's least share of the speed-up of another policy, at some loads."""
    summary = _summary(folder)
    shares = [summary[float(x), "war"]["ratio_mean"] / summary[float(x), policy]["ratio_mean"] for x in loads]
    return f"{min(shares):.0%}"


@claim
def keeps_up_with_parts(folder: str) -> str:
    """At how many loads WAR is at least as fast as the faster of its parts alone."""
    summary = _summary(folder)
    loads = list(dict.fromkeys(load for load, _ in summary))
    parts = ("war_speculation_only", "war_scheduling_only")
    kept = [
        summary[load, "war"]["ratio_mean"] >= max(summary[load, part]["ratio_mean"] for part in parts) for load in loads
    ]
    return f"{sum(kept)} of {len(kept)} loads"
