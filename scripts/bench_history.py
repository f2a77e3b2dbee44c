"""Measures our draft index beside arctic-inference's suffix cache, on the same texts::

    python -m scripts.bench_history --out recipes/baseline_comparison/results/history

Speed, memory and the delay of other threads on made-up trajectories of several sizes; accepted tokens on attempts
of the scripted coding agents with the real tools. Every arm of every size runs in a process of its own. Writes
``results.json`` and ``results.md``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from scripts.history_replay import Arctic, Drafter, Ours, replay
from scripts.history_texts import Trajectory, from_scripted_agents, made_up
from verl_war.compare.machine import describe

VOCAB_SIZE = 150_000
BATCH_ROWS = 256
MAX_DRAFT = 8
INGEST_TOKENS = 100_000
"""One text of the ingesting thread; FACTS of the baseline were measured with this length."""


def make(arm: str) -> Drafter:
    """An empty index of this arm for the made-up texts."""
    if arm == "arctic-inference":
        return Arctic()
    return Ours("verl_war", VOCAB_SIZE, max_bytes=8 << 30, learn=False)


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and maximum in microseconds."""
    values = 1e6 * np.array(seconds)
    return {"p50_us": round(float(np.quantile(values, 0.5)), 1), "p99_us": round(float(np.quantile(values, 0.99)), 1)}


def fill(drafter: Drafter, trajectories: Sequence[Trajectory]) -> tuple[list[int], int, float]:
    """Insert everything; leaves up to `BATCH_ROWS` of the last step running at two thirds.

    Returns:
        The running rows, tokens inserted behind the prompts, CPU seconds of the insertion.
    """
    last = max(trajectory.step for trajectory in trajectories)
    live, tokens, seconds = [], 0, 0.0
    for row, trajectory in enumerate(trajectories):
        prompt = int(np.argmax(trajectory.is_generated))
        runs = trajectory.step == last and len(live) < BATCH_ROWS
        end = len(trajectory.tokens) * 2 // 3 if runs else len(trajectory.tokens)
        begin = time.thread_time()
        drafter.begin_turn(row, trajectory, prompt)
        drafter.append([row], [trajectory.tokens[prompt:end]])
        if runs:
            live.append(row)
        else:
            drafter.end(row)
        seconds += time.thread_time() - begin
        tokens += end - prompt
    return live, tokens, seconds


def draft_times(drafter: Drafter, trajectories: Sequence[Trajectory], live: Sequence[int]) -> dict[str, Any]:
    """Times of single look-ups and of a whole batch, at 24 places of every running trajectory."""
    ends = [len(trajectories[row].tokens) * 2 // 3 for row in live]
    hits, misses, batches, batches_cpu = [], [], [], []
    for ahead in range(24):
        contexts = [
            trajectories[row].tokens[end + ahead - 64 : end + ahead] for row, end in zip(live, ends, strict=True)
        ]
        wall, cpu = time.perf_counter(), time.thread_time()
        drafter.draft(live, contexts, [MAX_DRAFT] * len(live))
        batches_cpu.append(time.thread_time() - cpu)
        batches.append(time.perf_counter() - wall)
        for row, context in zip(live, contexts, strict=True):
            begin = time.perf_counter()
            (draft,) = drafter.draft([row], [context], [MAX_DRAFT])
            (hits if len(draft) else misses).append(time.perf_counter() - begin)
        drafter.append(
            live, [trajectories[row].tokens[e + ahead : e + ahead + 1] for row, e in zip(live, ends, strict=True)]
        )
    return {
        "rows": len(live),
        "hit": quantiles(hits),
        "miss": quantiles(misses) if misses else None,
        "batch": quantiles(batches),
        "batch_cpu_p50_us": round(1e6 * float(np.median(batches_cpu)), 1),
    }


def forget(drafter: Drafter) -> None:
    """Evict all text, keeping the index."""
    if isinstance(drafter, Ours):
        for key in drafter.index.keys().tolist():
            drafter.index.drop(key)
        drafter.index.collect()
    elif isinstance(drafter, Arctic):
        for request in list(drafter.cache.active_requests):
            drafter.cache.stop_request(request)
        for request in list(drafter.cache.cached_requests):
            drafter.cache.evict_cached_response(request)


def delays(ingest: Callable[[], None] | None, seconds: float) -> dict[str, float]:
    """How late another Python thread wakes from 1 ms of sleep while one ingests; None: while nothing happens."""
    stop = threading.Event()

    def work() -> None:
        while ingest is not None and not stop.is_set():
            ingest()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    late = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)
    stop.set()
    thread.join()
    return {**quantiles(late), "max_us": round(1e6 * max(late), 1)}


def ingest_delays(arm: str, seconds: float) -> dict[str, Any]:
    """Delay of another thread during bulk ingest, and of a decode batch.

    "hashing" is the control: a thread that computes as much and never holds the GIL.
    """
    texts = [t.tokens for t in made_up(tokens=INGEST_TOKENS, seed=9)]
    text = np.concatenate(texts)[:INGEST_TOKENS]
    drafter, count = make(arm), 0

    def ingest() -> None:
        nonlocal count
        count += 1
        if isinstance(drafter, Ours):
            drafter.index.restore(0, 0, text)
        elif isinstance(drafter, Arctic):
            drafter.cache.start_request(count, text[:1])
            drafter.cache.add_active_response(count, text)
            drafter.cache.stop_request(count)

    block = bytes(1 << 20)
    out = {
        "idle": delays(None, seconds),
        "hashing": delays(lambda: hashlib.sha256(block).digest() and None, seconds),
        "ingest": delays(ingest, seconds),
        "texts": count,
    }
    if isinstance(drafter, Ours):
        out["decode_batch"] = decode_during(drafter, text, seconds)
    return out


def decode_during(drafter: Ours, text: np.ndarray, seconds: float) -> dict[str, Any]:
    """Time of a batch of look-ups, alone and while another thread ingests."""
    rows = list(range(32))
    for row in rows:
        drafter.index.begin(row, 1, 1, text[row * 500 : row * 500 + 700])
    most, out = [MAX_DRAFT] * len(rows), {}
    for name, busy in (("alone", False), ("during ingest", True)):
        stop = threading.Event()
        thread = threading.Thread(
            target=lambda stop=stop, busy=busy: [
                drafter.index.restore(0, 0, text) for _ in iter(stop.is_set, True) if busy
            ]
        )
        thread.start()
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            drafter.draft(rows, [], most)
            times.append(time.perf_counter() - begin)
            time.sleep(0.001)
        stop.set()
        thread.join()
        out[name] = quantiles(times)
    return out


def measure_size(arm: str, tokens: int) -> dict[str, Any]:
    """Insertion, memory and look-ups at one size."""
    trajectories = made_up(tokens=tokens, seed=1)
    drafter = make(arm)
    empty = resident_bytes()
    live, inserted, seconds = fill(drafter, trajectories)
    if isinstance(drafter, Ours):
        drafter.index.collect()
    full = resident_bytes()
    out: dict[str, Any] = {
        "inserted_tokens": inserted,
        "insert_cpu_us_per_token": round(1e6 * seconds / inserted, 3),
        "resident_bytes_per_token": round((full - empty) / inserted, 1),
        **draft_times(drafter, trajectories, live),
    }
    before = resident_bytes()
    forget(drafter)
    # The measurement itself has taken some memory since.
    out["resident_share_after_eviction"] = round(1 - (before - resident_bytes()) / (full - empty), 3)
    return out


def quality_arms(vocab_size: int) -> list[Drafter]:
    """What is replayed: arctic as vLLM uses it, and our sources one after the other."""
    return [
        Arctic("arctic-inference"),
        Ours("own", vocab_size, sources=("own",)),
        Ours("own + siblings", vocab_size, sources=("own", "siblings")),
        Ours("own + siblings + earlier steps", vocab_size, sources=("own", "siblings", "earlier_steps")),
        Ours("all", vocab_size),
        Ours("all, min_prob 0.4", vocab_size, min_prob=0.4),
    ]


def measure_quality(tasks: int, replaced: float) -> dict[str, Any]:
    """Accepted tokens on attempts of the scripted coding agents, by arm and policy step."""
    trajectories = from_scripted_agents(tasks=tasks, steps=2, replaced=replaced, seed=5)
    arms = {}
    for drafter in quality_arms(1 + max(int(trajectory.tokens.max()) for trajectory in trajectories)):
        tallies = replay(drafter, trajectories, concurrent=64, max_draft=MAX_DRAFT)
        arms[drafter.name] = [tally.row() for tally in tallies]
    return {"replaced": replaced, "episodes": len(trajectories), "arms": arms}


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a fresh process: memory of one arm must not help or hurt another."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def sizes_table(rows: list[dict[str, Any]]) -> list[str]:
    """Speed and memory."""
    columns = (
        "tokens",
        "index",
        "insert us/token",
        "bytes/token",
        "hit p50/p99 us",
        "miss p50/p99 us",
        "batch ms, CPU ms",
    )
    lines = ["| " + " | ".join((*columns, "left after eviction")) + " |", "|" + "---|" * 8]
    for row in rows:
        miss = row["miss"] or {"p50_us": "-", "p99_us": "-"}
        lines.append(
            f"| {row['inserted_tokens']:,} | {row['arm']} | {row['insert_cpu_us_per_token']} | "
            f"{row['resident_bytes_per_token']} | {row['hit']['p50_us']} / {row['hit']['p99_us']} | "
            f"{miss['p50_us']} / {miss['p99_us']} | {row['rows']} rows: {row['batch']['p50_us'] / 1000:.2f}, "
            f"{row['batch_cpu_p50_us'] / 1000:.2f} | {row['resident_share_after_eviction']:.0%} |"
        )
    return lines


def delays_table(arms: dict[str, Any]) -> list[str]:
    """How long other threads are held up."""
    lines = ["How late a sleeping thread wakes, p50/p99/max ms:", ""]
    lines += ["| while another one | ingests 100k-token texts | hashes without the GIL | does nothing |"]
    lines += ["|---|---|---|---|"]
    for arm, row in arms.items():
        cells = [
            " / ".join(f"{row[kind][q] / 1000:.2f}" for q in ("p50_us", "p99_us", "max_us"))
            for kind in ("ingest", "hashing", "idle")
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    decode = arms["verl_war"]["decode_batch"]
    cells = [f"{name}: {each['p50_us']:.0f} / {each['p99_us']:.0f}" for name, each in decode.items()]
    return [*lines, "", f"Batch of 32 look-ups of verl_war, p50/p99 us: {'; '.join(cells)}"]


def attempts_table(qualities: list[dict[str, Any]]) -> list[str]:
    """Accepted tokens."""
    lines = []
    for quality in qualities:
        share = f"{quality['replaced']:.0%}"
        lines += [f"Attempts of the scripted agents, {share} of their tokens replaced at random:", ""]
        lines += ["| draft source | step | accepted per look-up | drafted | accepted of drafted |"]
        lines += ["|---|---|---|---|---|"]
        for arm, steps in quality["arms"].items():
            for step, row in enumerate(steps):
                lines.append(
                    f"| {arm} | {step} | {row['mean_accepted_tokens']} | {row['mean_drafted_tokens']} | "
                    f"{row['accepted_of_drafted']} |"
                )
        lines.append("")
    return lines[:-1]


PARTS = {"sizes": sizes_table, "delays": delays_table, "attempts": attempts_table}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown; every part with the command and the state of the machine that it was measured with."""
    lines: list[str] = []
    for part, show in PARTS.items():
        if part in results:
            found = results[part]
            lines += [f"Command: `{found['command']}`", "", *show(found["results"]), ""]
            lines += ["; ".join(f"{key} {value}" for key, value in found["machine"].items()), ""]
    return "\n".join(lines)


def measure(part: str, given: argparse.Namespace) -> Any:
    """Results of one part."""
    arms = ("verl_war", "arctic-inference")
    if part == "delays":
        return {arm: in_process(ingest_delays, arm, given.seconds) for arm in arms}
    if part == "attempts":
        return [in_process(measure_quality, given.tasks, float(share)) for share in given.replaced.split(",")]
    rows = []
    for size in (int(float(text)) for text in given.sizes.split(",")):
        for arm in arms:
            rows.append({"arm": arm, **in_process(measure_size, arm, size)})
            print(rows[-1], file=sys.stderr)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results of other parts that are there are kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", default="1e5,1e6,5e6", help="tokens, comma-separated; 5e6 needs 3 GB")
    parser.add_argument("--tasks", type=int, default=16, help="groups of 8 attempts")
    parser.add_argument("--replaced", default="0,0.1", help="shares of generated tokens to replace at random")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of delays")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    command = ["python", "-m", "scripts.bench_history", *(sys.argv[1:] if arguments is None else arguments)]
    for part in given.parts:
        machine = {
            **describe(Path.cwd()),
            "arctic-inference": metadata.version("arctic-inference"),
            "load average at the start": f"{os.getloadavg()[0]:.1f}",
        }
        results[part] = {"command": shlex.join(command), "machine": machine, "results": measure(part, given)}
        path.write_text(json.dumps(results, indent=2) + "\n")
        (given.out / "results.md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
