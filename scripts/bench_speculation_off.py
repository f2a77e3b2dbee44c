"""What an engine that could draft loses while it does not, against one that was built without speculation.

    python -m scripts.bench_speculation_off --out DIRECTORY

Three engines decode the same requests, one step of each in turn: one with WAR's speculation switched off, one without
speculation, and a second one without, whose ratio to the first shows what this measurement can tell apart. Steps that
follow one another see the same machine, so medians of their ratios are good to a fraction of a per cent where whole
runs are not.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from scripts import bench_speculation as bench
from scripts import speculation_workload as work

ARMS = ("plain", "plain again", "off")
PROMPT_TOKENS = 200


def measure(engines: dict[str, Any], batch: int, steps: int, label: str) -> dict[str, list[float]]:
    """Seconds of decoding steps of every engine, step by step in turn."""
    from vllm import SamplingParams

    rng = random.Random(label)
    prompts = [[rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    sampling = SamplingParams(temperature=1.0, max_tokens=steps + 10, ignore_eos=True)
    for engine in engines.values():
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{label}:{number}", {"prompt_token_ids": prompt}, sampling)
    for engine in engines.values():  # until all prompts are read
        for _ in range(2 + batch * PROMPT_TOKENS // 2048):
            engine.step()
    times: dict[str, list[float]] = {arm: [] for arm in engines}
    order = list(engines)
    for _ in range(steps):
        order.append(order.pop(0))
        for arm in order:
            begin = time.perf_counter()
            engines[arm].step()
            times[arm].append(time.perf_counter() - begin)
    for arm, engine in engines.items():
        while engine.has_unfinished_requests():
            engine.step()
        engine.reset_prefix_cache()
        if len(times[arm]) != steps:
            raise RuntimeError(f"{arm} took {len(times[arm])} steps, expected {steps}")
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Median step, and medians of the ratios of neighbouring steps over the plain engine's, with their error."""
    result = {f"{arm} ms": 1e3 * statistics.median(times[arm]) for arm in times}
    for arm in ARMS[1:]:
        ratios = sorted(time_s / plain_s for time_s, plain_s in zip(times[arm], times["plain"], strict=True))
        quarter = len(ratios) // 4
        spread = ratios[-quarter - 1] - ratios[quarter]
        result[f"{arm} ratio"] = statistics.median(ratios)
        # Of the median of n values: 1.2533 * sigma / sqrt(n), sigma from the quartiles of a normal distribution.
        result[f"{arm} error"] = 1.2533 * spread / 1.349 / len(ratios) ** 0.5
    return result


def table(model: str, cells: dict[int, dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        f"### {model}",
        "",
        "| live | plain engine, ms per step | speculation off / plain | plain again / plain |",
        "|---|---|---|---|",
    ]
    for batch, cell in cells.items():
        ratios = [f"{cell[f'{arm} ratio']:.4f} +- {cell[f'{arm} error']:.4f}" for arm in ("off", "plain again")]
        lines.append(f"| {batch} | {cell['plain ms']:.2f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run the bench; writes off.json and off.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo` or the path of a checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=list(bench.BATCHES))
    parser.add_argument("--steps", type=int, default=400, help="measured at each batch size")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=bench.RESULTS / "off")
    options = parser.parse_args(arguments)
    os.environ.update(bench.ENVIRONMENT, OMP_NUM_THREADS=str(options.threads))
    model = str(bench.DEMO_MODEL) if options.model == "demo" else options.model
    engines = {arm: bench.make_engine(model, speculative=arm == "off").llm_engine for arm in ARMS}
    measure(engines, 2, 20, "warm-up")
    cells = {}
    for batch in options.batches:
        cells[batch] = summary(measure(engines, batch, options.steps, f"batch{batch}"))
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.4f}" for name, value in cells[batch].items()), flush=True)
    name = "demo policy" if options.model == "demo" else Path(model).name
    facts = bench.facts("scripts.bench_speculation_off", arguments, options.threads)
    work.save_json(options.out / "off.json", facts | {"model": name, "steps": options.steps, "batches": cells})
    (options.out / "off.md").write_text(f"Command: `{facts['command']}`\n\n{table(name, cells)}\n")
    print(table(name, cells))


if __name__ == "__main__":
    main(sys.argv[1:])
