"""Build the demo policy: demonstrations of both recipes, tokenizer, supervised training, checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3ForCausalLM

from recipes.code_agent.demonstrations import demonstrations as code_demonstrations
from recipes.demo_model.copying import copy_exercises
from recipes.demo_model.tokenizer import train_tokenizer
from recipes.demo_model.traces import Batch, TokenSequence, batches, render_all
from recipes.demo_model.training import Losses, ModelSize, Schedule, evaluate_loss, new_model, train
from recipes.search_agent.demonstrations import demonstrations as search_demonstrations

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """Everything that decides which checkpoint comes out, besides the recipes and the library versions."""

    num_traces: int = 8000
    """Of each recipe; about as many as the default number of steps uses once."""
    num_held_out: int = 100
    """Of each recipe, for the final loss."""
    vocab_size: int = 1536
    """Upper limit; the demonstrations have fewer frequent words."""
    max_trace_tokens: int = 2048
    seed: int = 0
    size: ModelSize = field(default_factory=ModelSize)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.num_held_out < 1 or self.num_traces <= self.num_held_out:
            raise ValueError(
                f"num_traces is {self.num_traces}, expected more than num_held_out {self.num_held_out}, which must be "
                "at least 1"
            )


class Progress:
    """What a caller may show while the build runs; this one shows nothing."""

    def phase(self, text: str, total: int) -> None:
        """A part of the work with so many units begins."""

    def advance(self, note: str = "") -> None:
        """One more unit is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """A trained policy and how it was trained."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, float]


def build(config: BuildConfig, progress: Progress) -> BuildResult:
    """Train a policy; the same configuration and versions give the same weights on the same machine.

    Must be called in the main thread, because demonstrations run tests with an alarm.
    """
    start_s = time.perf_counter()
    progress.phase("demonstrations", 2 * config.num_traces)
    traces = list(_counted(_demonstrations(config), progress))
    progress.phase("tokenizer", 1)
    tokenizer = _fit_tokenizer(traces, config)
    progress.advance()
    progress.phase("tokenising", len(traces))
    sequences, num_dropped = render_all(tokenizer, _counted(traces, progress), max_tokens=config.max_trace_tokens)
    held_out, training = sequences[: 2 * config.num_held_out], sequences[2 * config.num_held_out :]
    model = new_model(tokenizer, config.size, seed=config.seed)
    progress.phase("training", config.schedule.num_steps)
    num_tokens = train(model, _batches(training, tokenizer, config), config.schedule, on_step=_shown_losses(progress))
    metrics = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "traces_trained_on": len(training),
        "traces_too_long": num_dropped,
        "tokens_trained_on": num_tokens,
        "held_out_loss_nats": round(evaluate_loss(model, held_out, tokenizer.pad_token_id), 4),
        "build_s": round(time.perf_counter() - start_s, 1),
    }
    return BuildResult(model=model, tokenizer=tokenizer, metrics=metrics)


def _batches(training: list[TokenSequence], tokenizer: PreTrainedTokenizerBase, config: BuildConfig) -> Iterator[Batch]:
    """Exercises in copying first, then demonstrations for ever."""
    num_tokens, seed = config.schedule.tokens_per_batch, config.seed
    exercises = copy_exercises(vocab_size=len(tokenizer), tokens_per_batch=num_tokens, seed=seed)
    demonstrations = batches(training, tokens_per_batch=num_tokens, pad_id=tokenizer.pad_token_id, seed=seed)
    return itertools.chain(itertools.islice(exercises, config.schedule.num_copy_steps), demonstrations)


def _demonstrations(config: BuildConfig) -> Iterator[Trace]:
    """Alternate between the recipes, so that any stretch has both."""
    pairs = zip(
        code_demonstrations(config.num_traces, config.seed),
        search_demonstrations(config.num_traces, config.seed),
        strict=True,
    )
    return itertools.chain.from_iterable(pairs)


def _counted(items: Any, progress: Progress) -> Iterator[Any]:
    for item in items:
        yield item
        progress.advance()


def _fit_tokenizer(traces: list[Trace], config: BuildConfig) -> PreTrainedTokenizerBase:
    """Learn merges from the demonstrations as the chat template writes them; it needs a tokenizer to be rendered."""
    template = train_tokenizer([], vocab_size=config.vocab_size, max_context_tokens=config.size.max_context_tokens)
    texts = (template.apply_chat_template(t["messages"], tools=t["tools"], tokenize=False) for t in traces)
    return train_tokenizer(texts, vocab_size=config.vocab_size, max_context_tokens=config.size.max_context_tokens)


def _shown_losses(progress: Progress) -> Callable[[int, Losses, float], None]:
    """Report a running mean: single batches are small, so their losses jump."""
    mean = None

    def show(_step: int, losses: Losses, _seconds: float) -> None:
        nonlocal mean
        mean = losses.generated if mean is None else 0.95 * mean + 0.05 * losses.generated
        progress.advance(f"loss {mean:.3f}")

    return show


def save(result: BuildResult, config: BuildConfig, command: str, out: Path) -> None:
    """Write a checkpoint that transformers and vLLM load, with ``BUILD.json`` about its origin.

    ``BUILD.json`` is written last: a directory without it is an unfinished checkpoint.
    """
    out.mkdir(parents=True, exist_ok=True)
    record = out / "BUILD.json"
    record.unlink(missing_ok=True)
    result.model.generation_config = GenerationConfig(
        eos_token_id=result.tokenizer.eos_token_id,
        pad_token_id=result.tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    result.model.to(torch.bfloat16).save_pretrained(out)
    result.tokenizer.save_pretrained(out)
    write_record(out, {"command": command, **asdict(config), "versions": _versions(), "metrics": result.metrics})


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Replace ``BUILD.json`` of a checkpoint in one go."""
    scratch = out / ".BUILD.json.new"
    scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, out / "BUILD.json")


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
