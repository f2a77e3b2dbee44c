"""What speculation costs where it gains nothing: switched off, or on with text that nothing can predict.

    python -m scripts.bench_speculation_off --out DIRECTORY
    python -m scripts.bench_speculation_off --mode auto --temperature 2 --out DIRECTORY

Three engines decode the same requests, one step of each in turn: one with WAR's speculation, one that was built without
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import bench_speculation as bench
from scripts import speculation_workload as work

ARMS = ("plain", "plain again", "war")
PROMPT_TOKENS = 200
BLOCK_STEPS = 8
"""Steps whose seconds per token are compared at once: a step with drafts gives several tokens."""


class OwnClock:
    """Time of one engine, which stands still while the others work: what is paced by time is as often as alone."""

    def __init__(self) -> None:
        self._others_s = 0.0
        self._left_s = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._others_s

    def enter(self) -> None:
        """The engine goes on."""
        self._others_s += time.perf_counter() - self._left_s

    def leave(self) -> None:
        """Others go on."""
        self._left_s = time.perf_counter()


def measure(
    engines: dict[str, Any], batch: int, steps: int, label: str, temperature: float, clock: OwnClock
) -> dict[str, list[float]]:
    """Seconds per token and request of every engine, one value per block of steps, step by step in turn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(label)
    prompts = [[rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    # More than any engine comes to, with or without drafts.
    limit = work.MAX_CONTEXT_TOKENS - PROMPT_TOKENS
    sampling = SamplingParams(
        temperature=temperature, max_tokens=limit, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    names = [f"{label}:{number}" for number in range(batch)]
    for engine in engines.values():
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for engine in engines.values():  # until all prompts are read
        for _ in range(2 + batch * PROMPT_TOKENS // 2048):
            engine.step()
    seconds: dict[str, list[float]] = {arm: [] for arm in engines}
    tokens: dict[str, list[int]] = {arm: [] for arm in engines}
    order = list(engines)
    for _ in range(steps):
        order.append(order.pop(0))
        for arm in order:
            if arm == "war":
                clock.enter()
            begin = time.perf_counter()
            outputs = engines[arm].step()
            seconds[arm].append(time.perf_counter() - begin)
            if arm == "war":
                clock.leave()
            tokens[arm].append(sum(len(output.outputs[0].token_ids) for output in outputs))
    for arm, engine in engines.items():
        if min(tokens[arm]) < batch:
            raise RuntimeError(f"{arm}: a step gave {min(tokens[arm])} tokens to {batch} requests; use fewer --steps")
        engine.abort_request(names)
        engine.step()
        engine.reset_prefix_cache()
    return {arm: _per_token(seconds[arm], tokens[arm], batch) for arm in engines}


def _per_token(seconds: list[float], tokens: list[int], batch: int) -> list[float]:
    starts = range(0, len(seconds) - BLOCK_STEPS + 1, BLOCK_STEPS)
    return [batch * sum(seconds[at : at + BLOCK_STEPS]) / sum(tokens[at : at + BLOCK_STEPS]) for at in starts]


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and medians of the ratios of neighbouring blocks over the plain engine's, with their error."""
    result = {f"{arm} ms": 1e3 * statistics.median(times[arm]) for arm in times}
    for arm in ARMS[1:]:
        result[f"{arm} ratio"], result[f"{arm} error"] = median_ratio(times[arm], times["plain"])
    return result


def median_ratio(times: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Median of the ratios of neighbours, and its standard error.

    Of the median of n values that is 1.2533 * sigma / sqrt(n), sigma from the quartiles of a normal distribution.
    """
    ratios = sorted(time_s / plain_s for time_s, plain_s in zip(times, plain, strict=True))
    quarter = len(ratios) // 4
    spread = ratios[-quarter - 1] - ratios[quarter]
    return statistics.median(ratios), 1.2533 * spread / 1.349 / len(ratios) ** 0.5


def table(title: str, cells: dict[int, dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        f"### {title}",
        "",
        "| live | plain engine, ms per token | speculation / plain | plain again / plain | accepted / drafted |",
        "|---|---|---|---|---|",
    ]
    for batch, cell in cells.items():
        ratios = [f"{cell[f'{arm} ratio']:.4f} +- {cell[f'{arm} error']:.4f}" for arm in ("war", "plain again")]
        drafts = f"{cell['accepted_tokens']:.0f} / {cell['drafted_tokens']:.0f}"
        lines.append(f"| {batch} | {cell['plain ms']:.2f} | " + " | ".join(ratios) + f" | {drafts} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run the bench; writes MODE.json and MODE.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo` or the path of a checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=list(bench.BATCHES))
    parser.add_argument("--mode", choices=("off", "auto"), default="off", help="of WAR's speculation")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=400, help="measured at each batch size")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=bench.RESULTS / "off")
    options = parser.parse_args(arguments)
    os.environ.update(bench.ENVIRONMENT, OMP_NUM_THREADS=str(options.threads))
    model = str(bench.DEMO_MODEL) if options.model == "demo" else options.model
    engines = {arm: bench.make_engine(model, speculative=arm == "war").llm_engine for arm in ARMS}
    executor = engines["war"].engine_core.engine_core.model_executor
    drafter = executor.driver_worker.worker.model_runner.drafter.war
    drafter.set_limits({"mode": options.mode})
    drafter.speculation._clock = clock = OwnClock()
    measure(engines, 2, 20, "warm-up", options.temperature, clock)
    cells = {}
    for batch in options.batches:
        before = drafter.report()
        times = measure(engines, batch, options.steps, f"batch{batch}", options.temperature, clock)
        after = drafter.report()
        cells[batch] = summary(times) | {
            name: after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens", "draft_s", "step_s")
        }
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.4f}" for name, value in cells[batch].items()), flush=True)
    name = "demo policy" if options.model == "demo" else Path(model).name
    title = f"{name}, temperature {options.temperature:g}, speculation {options.mode}"
    facts = bench.facts("scripts.bench_speculation_off", arguments, options.threads)
    settings = {"model": name, "mode": options.mode, "temperature": options.temperature, "steps": options.steps}
    options.out.mkdir(parents=True, exist_ok=True)
    work.save_json(options.out / f"{options.mode}.json", facts | settings | {"batches": cells})
    report = f"Command: `{facts['command']}`\n\n{table(title, cells)}\n"
    (options.out / f"{options.mode}.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
