"""What a decision costs: the core alone, and the Ray actor around it, by replicas and live trajectories.

    python scripts/bench_router.py                       # everything: about 15 minutes on 2 idle cores
    python scripts/bench_router.py --only core --replicas 2,1000 --trajectories 1000
    python scripts/bench_router.py --only core --profile # where the core spends its time, largest fleet only

Scheduling and admission are on and the fleet is loaded to 160% of its KV, so that a good part of the trajectories is
held.
Times of the core are CPU time of its thread, which other processes on the machine do not lengthen; the actor's rate is
given as measured and as what its own CPU time per decision would allow. Writes router.json and router.md.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import os
import platform
import pstats
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_war.core.config import AdmissionConfig, SchedulingConfig, WarConfig
from verl_war.core.manager import WorkloadManager
from verl_war.core.types import Placement, ReplicaSnapshot, Turn, TurnResult

OUT = Path(__file__).parents[1] / "recipes" / "baseline_comparison" / "results" / "router"
CONFIG = WarConfig(
    scheduling=SchedulingConfig(enabled=True),
    admission=AdmissionConfig(enabled=True, wait_for_thrash=False, max_hold_s=1e6),
    seed=0,
)
REPLICAS = (2, 8, 64, 256, 1000)
TRAJECTORIES = (100, 1_000, 10_000, 100_000)
GROUP_SIZE = 8
PROMPT_TOKENS = 1024
GROWTH_TOKENS = 256
TURNS = 8
OVERLOAD = 1.6
"""Needs of the live trajectories over the capacity of the fleet."""


class Load:
    """Endless trajectories of `TURNS` turns, in groups, in random order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._count = 0
        self._turns: dict[str, int] = {}
        self._chains: dict[str, tuple[int, ...]] = {}

    def begin(self) -> Turn:
        """First turn of a new trajectory."""
        number = self._count
        self._count += 1
        name, group = f"t{number}", f"g{number // GROUP_SIZE}"
        prompt = random.Random(number // GROUP_SIZE)
        self._turns[name] = 1 + self._rng.randrange(TURNS)
        self._chains[name] = tuple(prompt.getrandbits(63) for _ in range(PROMPT_TOKENS // CONFIG.block_size_tokens))
        return self._turn(name, group)

    def next(self, turn: Turn) -> Turn | None:
        """The following turn of a trajectory; None when it is over."""
        name = turn.trajectory_id
        self._turns[name] -= 1
        if self._turns[name] == 0:
            del self._turns[name], self._chains[name]
            return None
        self._chains[name] += tuple(self._rng.getrandbits(63) for _ in range(GROWTH_TOKENS // CONFIG.block_size_tokens))
        return self._turn(name, turn.group_id)

    def _turn(self, name: str, group: str) -> Turn:
        chain = self._chains[name]
        return Turn(session_id=f"{name}s", trajectory_id=name, group_id=group, block_hashes=chain,
                    prompt_tokens=len(chain) * CONFIG.block_size_tokens)  # fmt: skip


def capacity_tokens(replicas: int, trajectories: int) -> int:
    """KV of one replica such that the trajectories' needs are `OVERLOAD` times that of all."""
    need = PROMPT_TOKENS / GROUP_SIZE + (TURNS / 4 + CONFIG.admission.growth_turns) * GROWTH_TOKENS
    return max(4 * PROMPT_TOKENS, int(trajectories * need / replicas / OVERLOAD))


def snapshot(capacity: int, steps: int) -> ReplicaSnapshot:
    """A reading of a busy engine."""
    return ReplicaSnapshot(running_requests=16, waiting_requests=0, kv_usage=0.7, kv_usage_peak=0.8,
                           kv_capacity_tokens=capacity, preemptions=0, engine_steps=steps, computed_tokens=64 * steps,
                           kv_token_steps=0.7 * capacity * steps, busy_s=0.02 * steps)  # fmt: skip


class CoreBench:
    """A manager with a full load, and the times of its events."""

    def __init__(self, replicas: int, trajectories: int) -> None:
        self.manager = WorkloadManager(CONFIG)
        self.load = Load(1)
        self.rng = random.Random(2)
        self.now_s = 0.0
        self.times_us: dict[str, list[float]] = {}
        self.capacity = capacity_tokens(replicas, trajectories)
        self.turns: dict[str, Turn] = {}
        self.running: list[tuple[str, str]] = []
        self.replicas = [f"10.0.{i // 256}.{i % 256}:8000" for i in range(replicas)]
        for replica in self.replicas:
            self.manager.on_replica_up(replica, self.now_s)
            self.manager.on_snapshot(replica, snapshot(self.capacity, 0), self.now_s)
        self.manager.on_step_begin(0, trajectories, self.now_s, GROUP_SIZE)
        for _ in range(trajectories):
            self.ask(self.load.begin())
        self.first_us = self.times_us.pop("on_turn")

    def timed(self, event: str, *arguments: Any) -> None:
        """Let an event happen and take its time; what starts is running."""
        self.now_s += 1e-3
        method = getattr(self.manager, event)
        begin_ns = time.thread_time_ns()
        placements: list[Placement] = method(*arguments, self.now_s)
        self.times_us.setdefault(event, []).append((time.thread_time_ns() - begin_ns) / 1e3)
        self.running += [(placement.trajectory_id, placement.replica_id) for placement in placements]

    def ask(self, turn: Turn) -> None:
        """A client wants a turn."""
        self.turns[turn.trajectory_id] = turn
        self.timed("on_turn", turn)

    def step(self, number: int) -> None:
        """One turn ends, and its trajectory asks for the next or is replaced by a new one."""
        position = self.rng.randrange(len(self.running))
        self.running[position], self.running[-1] = self.running[-1], self.running[position]
        name, replica = self.running.pop()
        turn = self.turns.pop(name)
        result = TurnResult(completion_tokens=128, num_cached_tokens=max(0, turn.prompt_tokens - GROWTH_TOKENS))
        self.timed("on_turn_end", name, turn.session_id, replica, result)
        following = self.load.next(turn)
        if following is None:
            self.timed("on_trajectory_end", name, False)
            following = self.load.begin()
        self.ask(following)
        if number % 16 == 0:
            replica = self.rng.choice(self.replicas)
            self.timed("on_snapshot", replica, snapshot(self.capacity, number))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def bench_core(replicas: int, trajectories: int, steps: int) -> dict[str, Any]:
    """Costs of the core's events in steady state."""
    bench = CoreBench(replicas, trajectories)
    for number in range(steps):
        bench.step(number)
    times = bench.times_us
    total_us = sum(map(sum, times.values()))
    return {
        **{"replicas": replicas, "trajectories": trajectories, "turns": len(times["on_turn"])},
        "held": bench.manager.held_turns,
        "decisions_per_s": len(times["on_turn"]) / total_us * 1e6,
        "events": {name: {"p50_us": quantile(values, 0.5), "p99_us": quantile(values, 0.99), "max_us": max(values),
                          "mean_us": sum(values) / len(values)} for name, values in times.items()},
        "burst": {"p50_us": quantile(bench.first_us, 0.5), "p99_us": quantile(bench.first_us, 0.99)},
    }  # fmt: skip


class Replicas:
    """A server that stands for any number of replicas."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._steps = 0

    async def war_snapshot(self) -> ReplicaSnapshot:
        """A reading of a busy engine."""
        self._steps += 10
        return snapshot(self._capacity, self._steps)


class Clients:
    """A process of agent loops whose turns take no time."""

    def __init__(self, router: Any, seed: int) -> None:
        from verl_war.integration.verl.link import RouterLink

        self._link = RouterLink(router, CONFIG, False)
        self._load = Load(seed)
        self._seed = seed
        self.decisions = 0

    async def run(self, trajectories: int, seconds: float) -> tuple[int, float, list[float]]:
        """Keep so many trajectories asking. Returns the turns granted, the time it took, and waits of those at once."""
        import asyncio

        end_s = time.monotonic() + seconds
        waits: list[float] = []

        async def one() -> None:
            turn: Turn | None = None
            while time.monotonic() < end_s:
                turn = turn or self._load.begin()
                begin_s = time.perf_counter()
                replica, _, _ = await self._link.acquire(turn)
                waits.append(time.perf_counter() - begin_s)
                self.decisions += 1
                result = TurnResult(completion_tokens=128, num_cached_tokens=max(0, turn.prompt_tokens - GROWTH_TOKENS))
                self._link.end_turn(turn, replica, result)
                following = self._load.next(turn)
                if following is None:
                    self._link.end_trajectory(turn.trajectory_id, False)
                turn = following

        begin_s = time.monotonic()
        tasks = [asyncio.ensure_future(one()) for _ in range(trajectories)]
        await asyncio.wait(tasks, timeout=seconds + 1.0)
        granted, took_s = self.decisions, time.monotonic() - begin_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return granted, took_s, waits


def bench_actor(ray: Any, replicas: int, trajectories: int, seconds: float, processes: int = 2) -> dict[str, Any]:
    """Turns granted per second by the Ray actor to clients in other processes."""
    from verl_war.integration.verl.router import WarRouterActor

    def cpu_s(_: Any) -> float:
        return time.process_time()

    server = ray.remote(num_cpus=0, max_concurrency=1000)(Replicas).remote(capacity_tokens(replicas, trajectories))
    router = WarRouterActor.remote({f"10.0.{i // 256}.{i % 256}:8000": server for i in range(replicas)}, {})
    clients = [ray.remote(num_cpus=0)(Clients).remote(router, 1000 * (1 + i)) for i in range(processes)]
    ray.get([client.run.remote(1, 0.5) for client in clients])
    time.sleep(max(1.0, replicas / 250))  # every replica is read once
    before_s = ray.get(router.__ray_call__.remote(cpu_s))
    runs = ray.get([client.run.remote(trajectories // processes, seconds) for client in clients])
    cpu = ray.get(router.__ray_call__.remote(cpu_s)) - before_s
    granted = sum(run[0] for run in runs)
    waits = [wait for run in runs for wait in run[2]]
    for actor in (*clients, router, server):
        ray.kill(actor)
    return {
        **{"replicas": replicas, "trajectories": trajectories, "turns": granted},
        "decisions_per_s": granted / max(run[1] for run in runs),
        "router_cpu_us_per_decision": 1e6 * cpu / max(1, granted),
        "decisions_per_cpu_s": granted / cpu if cpu else 0.0,
        "wait_p50_ms": 1e3 * quantile(waits, 0.5),
        "wait_p99_ms": 1e3 * quantile(waits, 0.99),
    }


def profile(replicas: int, trajectories: int, steps: int) -> None:
    """Print where the core spends its time."""
    bench = CoreBench(replicas, trajectories)
    profiler = cProfile.Profile()
    profiler.enable()
    for number in range(steps):
        bench.step(number)
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def table(results: dict[str, Any]) -> str:
    """Markdown of the results."""
    lines = [f"{results['machine']}; {results['versions']}; load average {results['load_average']:.0f} at the end.", ""]
    if results["core"]:
        lines += ["| replicas | trajectories | held | decisions/s | on_turn p50 us | p99 us | on_turn_end p99 us | "
                  "on_snapshot p99 us | burst p99 us |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in results["core"]:
        events = row["events"]
        cells = [row["replicas"], row["trajectories"], row["held"], f"{row['decisions_per_s']:.0f}",
                 f"{events['on_turn']['p50_us']:.0f}", f"{events['on_turn']['p99_us']:.0f}",
                 f"{events['on_turn_end']['p99_us']:.0f}", f"{events['on_snapshot']['p99_us']:.0f}",
                 f"{row['burst']['p99_us']:.0f}"]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if results["actor"]:
        lines += ["", "| replicas | trajectories | actor: decisions/s | per CPU second of its process | CPU us each | "
                  "wait p50 ms | p99 ms |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in results["actor"]:
        cells = [row["replicas"], row["trajectories"], f"{row['decisions_per_s']:.0f}",
                 f"{row['decisions_per_cpu_s']:.0f}", f"{row['router_cpu_us_per_decision']:.0f}",
                 f"{row['wait_p50_ms']:.1f}", f"{row['wait_p99_ms']:.1f}"]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def numbers(text: str) -> tuple[int, ...]:
    """`2,8,64` as integers."""
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("core", "actor"), help="one of the two")
    parser.add_argument("--replicas", type=numbers, default=REPLICAS, metavar="N,N")
    parser.add_argument("--trajectories", type=numbers, default=TRAJECTORIES, metavar="N,N")
    parser.add_argument("--steps", type=int, default=20_000, help="turns measured by each run of the core")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each run of the actor")
    parser.add_argument("--profile", action="store_true", help="profile the core at the largest fleet instead")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.profile:
        profile(max(options.replicas), max(options.trajectories), options.steps)
        return
    pairs = [(r, t) for r in options.replicas for t in options.trajectories if t >= 2 * r]
    results: dict[str, Any] = {"core": [], "actor": []}
    if options.only != "actor":
        for replicas, trajectories in pairs:
            results["core"].append(bench_core(replicas, trajectories, options.steps))
            print(json.dumps(results["core"][-1]), flush=True)
    if options.only != "core":
        results["actor"] = bench_actors(pairs, options.seconds)
    import ray

    results["machine"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    results["versions"] = f"Python {platform.python_version()}, Ray {ray.__version__}"
    results["load_average"] = os.getloadavg()[0]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "router.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "router.md").write_text(table(results))
    print(table(results))


def bench_actors(pairs: Sequence[tuple[int, int]], seconds: float) -> list[dict[str, Any]]:
    """`bench_actor` for each pair in a cluster of its own."""
    import tempfile

    import ray

    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="war") as directory:
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=200_000_000, _temp_dir=directory,
                 _system_config={"worker_niceness": 0}, log_to_driver=False,
                 runtime_env={"env_vars": {"PYTHONPATH": root}})  # fmt: skip
        results = []
        for replicas, trajectories in pairs:
            results.append(bench_actor(ray, replicas, trajectories, seconds))
            print(json.dumps(results[-1]), flush=True)
        ray.shutdown()
    return results


if __name__ == "__main__":
    main()
