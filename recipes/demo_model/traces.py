"""From demonstrations to token sequences: exactly what verl's tool agent loop builds during a rollout."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of tokens that carry no loss; ``torch.nn.functional.cross_entropy`` skips it by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One conversation as tokens; ``is_generated[i]`` says whether the model wrote token ``i``."""

    token_ids: list[int]
    is_generated: list[bool]


def render(tokenizer: PreTrainedTokenizerBase, trace: dict[str, Any]) -> TokenSequence:
    """Tokenise a demonstration, ``{"messages": ..., "tools": ...}``, up to the end of its last assistant turn."""
    rendered = tokenizer.apply_chat_template(
        trace["messages"],
        tools=trace["tools"],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    is_generated = [bool(flag) for flag in rendered["assistant_masks"]]
    length = len(is_generated) - is_generated[::-1].index(True) if any(is_generated) else 0
    return TokenSequence(token_ids=rendered["input_ids"][:length], is_generated=is_generated[:length])


def render_all(
    tokenizer: PreTrainedTokenizerBase, traces: Iterable[dict[str, Any]], *, max_tokens: int
) -> tuple[list[TokenSequence], int]:
    """Tokenise demonstrations; return those of at most ``max_tokens`` tokens and how many were longer."""
    sequences, num_dropped = [], 0
    for trace in traces:
        sequence = render(tokenizer, trace)
        if len(sequence.token_ids) <= max_tokens:
            sequences.append(sequence)
        else:
            num_dropped += 1
    return sequences, num_dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right, all tensors [rows, tokens] of int64; the label of position i is token i + 1."""

    token_ids: torch.Tensor
    labels: torch.Tensor
    """Tokens that the model wrote; the others are ``IGNORED``."""
    context_labels: torch.Tensor
    """The others: prompts, tool results and markup."""


def batches(sequences: list[TokenSequence], *, tokens_per_batch: int, pad_id: int, seed: int) -> Iterator[Batch]:
    """Yield batches for ever, one shuffled pass over the sequences after the other.

    Sequences of similar length share a batch, so little is padding; a batch has about ``tokens_per_batch`` tokens
    with the padding. Causal attention never looks right, so no attention mask is needed.
    """
    rng = random.Random(seed)
    while True:
        groups = _group_by_length(sequences, tokens_per_batch, rng)
        rng.shuffle(groups)
        for group in groups:
            yield collate(group, pad_id)


def _group_by_length(
    sequences: list[TokenSequence], tokens_per_batch: int, rng: random.Random
) -> list[list[TokenSequence]]:
    order = sorted(sequences, key=lambda sequence: (len(sequence.token_ids), rng.random()))
    groups: list[list[TokenSequence]] = [[]]
    for sequence in order:
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence.token_ids) > tokens_per_batch:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def collate(group: list[TokenSequence], pad_id: int) -> Batch:
    """Pad the sequences of a batch to the longest and set their labels."""
    shape = (len(group), max(len(sequence.token_ids) for sequence in group))
    token_ids = torch.full(shape, pad_id)
    labels, context_labels = torch.full(shape, IGNORED), torch.full(shape, IGNORED)
    for row, sequence in enumerate(group):
        ids, is_generated = torch.tensor(sequence.token_ids), torch.tensor(sequence.is_generated)
        token_ids[row, : len(ids)] = ids
        labels[row, : len(ids) - 1] = ids.masked_fill(~is_generated, IGNORED)[1:]
        context_labels[row, : len(ids) - 1] = ids.masked_fill(is_generated, IGNORED)[1:]
    return Batch(token_ids=token_ids, labels=labels, context_labels=context_labels)
