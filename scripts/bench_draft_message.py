"""What drafts cost an engine whose worker is another process, as verl runs it, while none are made.

    python -m scripts.bench_draft_message --out DIRECTORY

Three engines answer the same prompts in turn: one built without speculation, one with WAR's that is switched off, and
one of those whose drafts do not travel with the tokens (patches `vllm_drafts_*`), so that vLLM asks its worker for them
in a message of its own after every step. A second engine without speculation shows what this measurement can tell
apart. `bench_speculation_off`, whose engines share its process, sees nothing of messages.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts import bench_speculation as bench
from scripts import speculation_workload as work
from scripts.bench_speculation_off import median_ratio

ARMS = {"plain": "plain", "plain again": "plain", "war off": "war", "war off, drafts asked for": "war"}
"""Arm -> kind of engine."""

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 40


def make_engine(arm: str) -> Any:
    """An engine with a process of its own, and another one for its worker."""
    from vllm import LLM

    from verl_war.integration.vllm.proposer import engine_options

    engine = LLM(
        model=str(bench.DEMO_MODEL),
        dtype=bench.machine_dtype(),
        enforce_eager=True,
        max_model_len=work.MAX_CONTEXT_TOKENS,
        max_num_seqs=max(bench.BATCHES),
        max_num_batched_tokens=2048,
        distributed_executor_backend="mp",
        seed=0,
        **(engine_options({"mode": "off"}, bench.MAX_DRAFT_TOKENS) if ARMS[arm] == "war" else {}),
    )
    if arm.endswith("asked for"):
        engine.collective_rpc(_without_patch)
    return engine


def _without_patch(wrapper: Any) -> None:
    """Let the worker send tokens alone again, as it did before it was patched."""
    worker = wrapper.worker
    worker.sample_tokens = partial(type(worker).sample_tokens.__wrapped__, worker)


def measure(engines: Mapping[str, Any], batch: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per step of every engine, one value for each repeat after the first."""
    from vllm import SamplingParams

    rng = random.Random(batch)
    sampling = SamplingParams(
        temperature=1.0, max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    seconds: dict[str, list[float]] = {arm: [] for arm in engines}
    for repeat in range(repeats + 1):
        texts = [[rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        for arm in work.shuffled(list(engines), repeat):
            begin = time.perf_counter()
            answers = engines[arm].generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
            taken = time.perf_counter() - begin
            tokens = [len(answer.outputs[0].token_ids) for answer in answers]
            if tokens != [OUTPUT_TOKENS] * batch:
                raise RuntimeError(f"{arm}: answers of {sorted(set(tokens))} tokens; expected {OUTPUT_TOKENS} each")
            if repeat:
                seconds[arm].append(taken / OUTPUT_TOKENS)
    return seconds


def summary(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median step of the plain engine, and medians of the others' ratios to it, repeat by repeat, with their error."""
    result = {"plain ms": 1e3 * statistics.median(seconds["plain"])}
    for arm in list(seconds)[1:]:
        result[f"{arm} ratio"], result[f"{arm} error"] = median_ratio(seconds[arm], seconds["plain"])
    return result


def table(cells: Mapping[int, Mapping[str, float]]) -> str:
    """Markdown."""
    arms = list(ARMS)[1:]
    lines = [
        f"| live | plain engine, ms per step | {' | '.join(f'{arm} / plain' for arm in arms)} |",
        "|---" * (2 + len(arms)) + "|",
    ]
    for batch, cell in cells.items():
        ratios = [f"{cell[f'{arm} ratio']:.3f} +- {cell[f'{arm} error']:.3f}" for arm in arms]
        lines.append(f"| {batch} | {cell['plain ms']:.2f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run the bench; writes draft_message.json and draft_message.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=24, help="measured at each batch size")
    parser.add_argument("--out", type=Path, default=bench.RESULTS / "off")
    options = parser.parse_args(arguments)
    os.environ.update(bench.ENVIRONMENT, OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function is sent to the worker
    engines = {arm: make_engine(arm) for arm in ARMS}
    cells = {}
    for batch in options.batches:
        cells[batch] = summary(measure(engines, batch, options.repeats))
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.4f}" for name, value in cells[batch].items()), flush=True)
    facts = bench.facts("scripts.bench_draft_message", arguments, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    work.save_json(options.out / "draft_message.json", facts | {"repeats": options.repeats, "batches": cells})
    report = f"Command: `{facts['command']}`\n\n{table(cells)}\n"
    (options.out / "draft_message.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
