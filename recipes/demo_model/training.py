"""Supervised training of the demo policy on one CPU core."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from recipes.demo_model.copying import wire_induction
from recipes.demo_model.traces import IGNORED, Batch, TokenSequence, collate

ROPE_THETA = 1_000_000.0
"""As in Qwen's models; half of the rotary pairs then hardly turn within our contexts, as matching by content wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the policy; the defaults give about 2 million parameters, 4 MB in bfloat16."""

    hidden_size: int = 192
    num_layers: int = 4
    head_dim: int = 64
    """Half as many heads as with 32: on a CPU the attention weights are what costs most."""
    intermediate_size: int = 512
    max_context_tokens: int = 32_768
    """Only an upper limit for engines; training sees what the demonstrations have."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"model size: {name} is {getattr(self, name)}, expected at least 1")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"model size: hidden_size is {self.hidden_size}, expected a multiple of head_dim {self.head_dim}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast to train."""

    num_steps: int = 2000
    num_copy_steps: int = 200
    """The first of the steps: exercises in copying instead of demonstrations."""
    tokens_per_batch: int = 4096
    peak_lr: float = 2e-3
    warmup_fraction: float = 0.02
    weight_decay: float = 0.05
    context_weight: float = 0.1
    """Weight of the loss on tokens that the model did not write, while the first part of the training lasts.

    Prompts and tool results are most of the text and full of repetitions: predicting them makes the copying circuits
    appear earlier."""
    context_fraction: float = 0.5
    """Part of the steps during which ``context_weight`` applies; afterwards only the model's own tokens count."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "tokens_per_batch", "peak_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"schedule: {name} is {getattr(self, name)}, expected more than 0")
        for name in ("warmup_fraction", "context_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule: {name} is {getattr(self, name)}, expected 0 to 1")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to a twentieth of the peak."""
        warmup = max(1, round(self.warmup_fraction * self.num_steps))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        return self.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def _causal_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention in plain matrix products, [rows, heads, tokens, head_dim] in and tokens before heads out.

    Forward and backward in bfloat16 take 0.6 of the time of torch's fused CPU kernel at the lengths trained on.
    """
    length = query.shape[2]
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    weights = (query @ key.transpose(2, 3) * scaling + future).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


TRAINING_ATTENTION = "demo_model_causal"
AttentionInterface.register(TRAINING_ATTENTION, _causal_attention)


def new_model(tokenizer: PreTrainedTokenizerBase, size: ModelSize, *, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 model for the tokenizer."""
    torch.manual_seed(seed)
    num_heads = size.hidden_size // size.head_dim
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=size.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=TRAINING_ATTENTION,
    )
    model = Qwen3ForCausalLM(config)
    wire_induction(model, seed=seed)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Mean cross entropy in nats per token of one batch."""

    generated: float
    context: float


def train(
    model: Qwen3ForCausalLM,
    data: Iterator[Batch],
    schedule: Schedule,
    *,
    on_step: Callable[[int, Losses, float], None],
) -> int:
    """Train in place and return the number of tokens seen (with padding).

    Args:
        model: float32 model; matrix products run in bfloat16.
        data: endless batches.
        schedule: length and learning rates.
        on_step: called after each step with its number, the losses and the seconds that it took.
    """
    optimizer = _optimizer(model, schedule)
    num_tokens = 0
    model.train()
    for step in range(schedule.num_steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        batch = next(data)
        context_weight = schedule.context_weight if step < schedule.context_fraction * schedule.num_steps else 0.0
        loss, losses = _loss(model, batch, context_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += batch.token_ids.numel()
        on_step(step, losses, time.perf_counter() - start)
    model.eval()
    return num_tokens


def _optimizer(model: Qwen3ForCausalLM, schedule: Schedule) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.peak_lr, betas=(0.9, 0.95), fused=True)


def _loss(model: Qwen3ForCausalLM, batch: Batch, context_weight: float) -> tuple[torch.Tensor, Losses]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        generated = _cross_entropy(model, hidden, batch.labels)
        context = torch.zeros(())
        if context_weight:
            context = _cross_entropy(model, hidden, batch.context_labels)
    return generated + context_weight * context, Losses(generated=generated.item(), context=context.item())


def _cross_entropy(model: Qwen3ForCausalLM, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the labelled positions; only those go through the output layer."""
    chosen = labels != IGNORED
    if not chosen.any():
        return hidden.new_zeros(())
    return functional.cross_entropy(model.lm_head(hidden[chosen]).float(), labels[chosen])


@torch.no_grad()
def evaluate_loss(model: Qwen3ForCausalLM, sequences: list[TokenSequence], pad_id: int) -> float:
    """Return the mean loss in nats per generated token over held-out sequences."""
    total, count = 0.0, 0
    for start in range(0, len(sequences), 8):
        batch = collate(sequences[start : start + 8], pad_id)
        num_labels = int((batch.labels != IGNORED).sum())
        total += _loss(model, batch, 0.0)[1].generated * num_labels
        count += num_labels
    return total / count
