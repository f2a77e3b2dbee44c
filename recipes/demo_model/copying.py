"""A head start in copying: an induction circuit wired into the initial weights, and exercises for it.

Tool calls quote names, paths and lines from the context. Attention learns to quote by itself, but late and suddenly:
after 1.6 million tokens, a quarter of the budget, a randomly initialised model had not begun to. A few heads are enough
to start from, and training turns them into what it needs:

* in layer 0, a head attends to the token before and stores what it is;
* in layer 1, a head looks for places whose token before is the current one, and reads the token there.

All other blocks write nothing at first, so that they can't disturb it.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from recipes.demo_model.traces import IGNORED, Batch

CONSTANT_FEATURE = 0.1
"""Feature 0 of every embedding: what queries and keys read when they must not depend on the token. The other features
have a standard deviation of 0.02, so this is a tenth of the squared norm."""
NUM_POSITION_PAIRS = 8
"""So many of the fastest rotary pairs tell neighbouring positions apart; slower ones would only blur them."""
SHARPNESS = 2.0
"""Weight of the query and key norms in wired layers; with 1, attention over hundreds of tokens is nearly flat."""
STORED_SCALE, COPIED_SCALE = 0.04, 0.2
"""What a wired head writes, per feature of 1 that it reads: twice the size of an embedding to be found again, and much
more to decide the next token."""


@torch.no_grad()
def wire_induction(model: Qwen3ForCausalLM, *, seed: int) -> None:
    """Overwrite head 0 of the first two layers of a freshly initialised model, and what all blocks write.

    Raises:
        ValueError: the model has a single layer, or its residual stream has no room for two heads.
    """
    layers, width, head_dim = model.model.layers, model.config.hidden_size, model.config.head_dim
    if len(layers) < 2 or width < 2 * head_dim:
        raise ValueError(
            f"model has {len(layers)} layers and hidden size {width}, expected at least 2 layers and hidden size "
            f"{2 * head_dim}, twice the head_dim"
        )
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, 2 * head_dim, generator=generator)).Q.T.clone()
    directions[:, 0] = 0
    identity, stored = directions[:head_dim], directions[head_dim:]
    model.model.embed_tokens.weight[:, 0] = CONSTANT_FEATURE
    before, after = layers[0].self_attn, layers[1].self_attn
    _attend_to_token_before(before, model.config.rope_parameters["rope_theta"])
    _move(before, source=identity, target=STORED_SCALE * stored)
    _attend_after_same_token(after, identity, stored)
    _move(after, source=identity, target=COPIED_SCALE * identity)


def _attend_to_token_before(attention: Qwen3Attention, rope_theta: float) -> None:
    """Constant query and key; the key is turned by one position, so that they align at a distance of one."""
    half = attention.head_dim // 2
    pairs = torch.arange(min(NUM_POSITION_PAIRS, half))
    angles = rope_theta ** (-pairs / half)
    _clear(attention)
    attention.q_proj.weight[pairs, 0] = 1.0
    attention.k_proj.weight[pairs, 0] = angles.cos()
    attention.k_proj.weight[pairs + half, 0] = angles.sin()


def _attend_after_same_token(attention: Qwen3Attention, identity: torch.Tensor, stored: torch.Tensor) -> None:
    """Query: what this token is. Key: what the token before is. Only slow rotary pairs, so distance hardly matters."""
    half = attention.head_dim // 2
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, 2 * half)])
    _clear(attention)
    attention.q_proj.weight[slow] = identity[slow]
    attention.k_proj.weight[slow] = stored[slow]


def _clear(attention: Qwen3Attention) -> None:
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)
    attention.q_proj.weight[: attention.head_dim] = 0
    attention.k_proj.weight[: attention.head_dim] = 0


def _move(attention: Qwen3Attention, *, source: torch.Tensor, target: torch.Tensor) -> None:
    """Read one subspace where the head attends and write it into another; both [head_dim, hidden_size]."""
    attention.v_proj.weight[: attention.head_dim] = source
    attention.o_proj.weight[:, : attention.head_dim] = target.T


ROW_TOKENS, NUM_SPANS, SPAN_TOKENS = 128, 8, (3, 10)
"""Of an exercise: short rows are cheap, and what is learnt from them holds at any distance."""


def copy_exercises(*, vocab_size: int, tokens_per_batch: int, seed: int) -> Iterator[Batch]:
    """Yield batches of rows in which a few random spans of tokens come again and again.

    Labelled are the tokens that repeat an earlier span, except its first, which nobody can know.
    """
    rng = random.Random(f"demo_model/copying/{seed}")
    while True:
        rows = [_exercise(rng, vocab_size) for _ in range(max(1, tokens_per_batch // ROW_TOKENS))]
        token_ids = torch.tensor([ids for ids, _ in rows])
        labels = torch.full_like(token_ids, IGNORED)
        is_copy = torch.tensor([flags for _, flags in rows])[:, 1:]
        labels[:, :-1] = token_ids[:, 1:].masked_fill(~is_copy, IGNORED)
        yield Batch(token_ids=token_ids, labels=labels, context_labels=torch.full_like(token_ids, IGNORED))


def _exercise(rng: random.Random, vocab_size: int) -> tuple[list[int], list[bool]]:
    spans = [[rng.randrange(vocab_size) for _ in range(rng.randint(*SPAN_TOKENS))] for _ in range(NUM_SPANS)]
    token_ids: list[int] = []
    is_copy: list[bool] = []
    seen: set[int] = set()
    while len(token_ids) < ROW_TOKENS:
        chosen = rng.randrange(NUM_SPANS)
        token_ids += spans[chosen]
        is_copy += [False] + [chosen in seen] * (len(spans[chosen]) - 1)
        seen.add(chosen)
    return token_ids[:ROW_TOKENS], is_copy[:ROW_TOKENS]
