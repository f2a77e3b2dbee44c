"""How long the drafts of one engine step should be: what maximises committed tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_war.core.step_time import DraftCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The best draft length of every class of look-ups for one batch.

    Attributes:
        gain: Expected committed tokens per second over those without drafts, minus 1; 0 when drafting does not pay.
        lengths: Draft tokens for a row of each class; classes that are not named get none.
        price: Tokens per second that they come to: what a second is worth.
    """

    gain: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    price: float = 0.0

    def cut(self, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Drafts of these classes and lengths, none longer than is best for its class."""
        longest = self.lengths
        return [
            (length if length < longest[kind] else longest[kind]) if kind in longest else 0
            for kind, length in zip(kinds, lengths, strict=True)
        ]


def expected_accepted(first: float, later: float, length: int) -> float:
    """Expected accepted tokens of a draft of ``length`` tokens.

    Source: Leviathan et al. 2023 (arXiv 2211.17192) section 3.1, with an acceptance of its own for the first token.
    """
    if length <= 0:
        return 0.0
    return first * (1.0 - later**length) / (1.0 - later)


def best_length(first: float, later: float, price: float, cost: DraftCost, limit: int) -> tuple[int, float]:
    """Draft length of one row that earns most at ``price`` tokens per second, and what it earns in tokens.

    The marginal gain ``first * later**(k-1)`` falls with k, so the last token worth its time solves an equation.
    """
    token_price = price * cost.token_s
    if first <= token_price or limit < 1:
        return 0, 0.0
    length = limit
    if later <= 0.0:
        length = 1
    elif token_price > 0.0:
        length = min(limit, 1 + int(math.log(token_price / first) / math.log(later)))
    earned = expected_accepted(first, later, length) - token_price * length - price * cost.row_s
    return (length, earned) if earned > 0.0 else (0, 0.0)


def best_budget(
    cost: DraftCost,
    rows: int,
    counts: Sequence[tuple[int, float]],
    rates: dict[int, tuple[float, float]],
    limit: int,
) -> Budget:
    """Draft lengths that maximise ``(rows + accepted) / seconds`` of a step.

    Args:
        cost: Seconds of the step.
        rows: Requests in the batch; each commits one token without drafts.
        counts: Class and number of rows in it. Numbers below 1 are expectations: then the price of any draft is paid
            in that share of the steps.
        rates: Acceptance of first and later tokens by class.
        limit: Longest draft.

    Source: Dinkelbach 1967 for the ratio: at a given price in tokens per second every row decides alone, and the
    price is raised until nothing is left to earn.
    """
    plain_price = price = rows / cost.plain_s
    best = Budget()
    for _ in range(8):
        lengths: dict[int, int] = {}
        accepted = drafting = tokens = 0.0
        for kind, count in counts:
            first, later = rates[kind]
            length, _ = best_length(first, later, price, cost, limit)
            if length:
                lengths[kind] = length
                accepted += count * expected_accepted(first, later, length)
                drafting += count
                tokens += count * length
        seconds = cost.plain_s + cost.any_draft_s * min(1.0, drafting) + cost.row_s * drafting + cost.token_s * tokens
        ratio = (rows + accepted) / seconds
        if ratio <= price * (1.0 + 1e-9):
            break
        price = ratio
        best = Budget(gain=ratio / plain_price - 1.0, lengths=lengths, price=price)
    return best


def kv_limit(limit: int, rows: int, free_tokens: int, block_tokens: int) -> int:
    """Longest draft for which the engine finds room for every row without preempting one of them.

    Args:
        limit: Longest draft wanted.
        rows: Requests in the batch.
        free_tokens: Tokens' worth of KV blocks that no running request holds.
        block_tokens: Tokens of a block; a draft may begin at the end of one.
    """
    return max(0, min(limit, free_tokens // rows - block_tokens))
