"""Draft length of every request in the coming engine step: what maximises expected committed tokens per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_war.core.acceptance import AcceptanceTable
from verl_war.core.decode_time import DecodeTime
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.core.step_time import DraftCost, StepTime
from verl_war.core.types import Regime
from verl_war.core.watchdog import Watchdog

REFRESH_STEPS = 16
"""A decision for a batch size is reused for so many steps: acceptance and step times move more slowly than that, and
the decision costs 0.1 ms."""

PLAIN_EVERY_STEPS = 128
"""While drafting, one step in so many goes without, so that the model still knows what a plain step costs: at a gain
of 2x this gives up 0.4%."""

KEEP_GAIN_SHARE = 0.5
"""A regime that drafts stands still while the gain is below this share of `min_gain`, which was needed to enter it."""

AGE_ON_WEIGHTS = 0.5
"""Part of the acceptance counts that survives a weight update: the new policy resembles the old one."""

OPTIMISTIC_COST = 0.25
"""A real probe measures the price of drafts where they would pay if they cost only this share of what is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The best draft length of every class of look-ups for one batch.

    Attributes:
        gain: Expected committed tokens per second over those without drafts, minus 1; 0 when drafting does not pay.
        lengths: Draft tokens for a row of each class; classes that are not named get none.
    """

    gain: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)


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
        best = Budget(gain=ratio / plain_price - 1.0, lengths=lengths)
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


class DraftPlanner:
    """Decides before every engine step whether to look drafts up, and then how much of each to use.

    In the regime `low` drafting is possible, in `high` only probing is. Each lasts `dwell_s`, but what a dwell costs is
    bounded: in a step for which drafts do not pay nothing is drafted, whatever the regime, and `high` is entered only
    when that went on for `dwell_s`.

    Pure: the caller measures time and passes ``now_s``.
    """

    def __init__(
        self,
        limits: SpeculationLimits,
        sources: Sequence[str],
        match_buckets: Sequence[int],
        prior: StepTime | None = None,
    ) -> None:
        self.limits = limits
        self.acceptance = AcceptanceTable(sources, match_buckets)
        self.step_time = DecodeTime(prior)
        self.watchdog = Watchdog()
        self.regime: Regime = "high"
        self.is_drafting = False
        """Whether the last step that was asked for may draft for its own gain, so that the next should be asked for."""
        self.gain = 0.0
        self.switches = 0
        self.switch_rows = 0
        self._step = 0
        self._now_s = self._switched_at_s = self._paid_at_s = -math.inf
        self._plain_at_step = 0
        self._decisions: dict[int, tuple[int, float]] = {}
        self._decisions_at_step = 0
        self._probe_at_s = -math.inf
        self._is_for_gain = False

    def set_limits(self, limits: SpeculationLimits) -> None:
        """New limits; they count from the next step on."""
        self.limits = limits
        self._decisions.clear()
        if limits.mode == "off":
            self.gain = 0.0
            self._enter("high", 0)

    def on_weights_updated(self) -> None:
        """Half-forget acceptance: another policy generates from now on."""
        self.acceptance.age(AGE_ON_WEIGHTS)
        self._decisions.clear()

    def lookup_limit(self, rows: int, kv_tokens: float, now_s: float, steps: int = 1) -> int:
        """Longest draft to look up for the coming step; 0 when none can pay. No look-up was made for this answer.

        Args:
            rows: Requests in the batch.
            kv_tokens: Tokens of all contexts.
            now_s: Time in seconds, monotonic.
            steps: Engine steps since the last call; more than 1 where the caller lets some go by.
        """
        self._step += steps
        self._now_s = now_s
        cap = self._cap(rows)
        self.is_drafting, self.gain = False, 0.0
        if self.limits.mode == "off" or self.watchdog.blocks(self.limits, now_s):
            self._enter("high", rows)
            return 0
        if self.limits.mode == "always":
            self.is_drafting = cap > 0
            self._enter("low" if cap else "high", rows)
            return cap
        length, self.gain = self._decide(rows, kv_tokens, cap)
        pays = self._pays_at(self.gain)
        self._dwell(rows, pays)
        if self.regime == "high":
            return self._probe(rows, kv_tokens, cap)
        self.is_drafting = pays
        if not pays:
            return 0
        if self._step - self._plain_at_step >= PLAIN_EVERY_STEPS:
            self._plain_at_step = self._step
            return 0
        return length

    def allocate(self, rows: int, kv_tokens: float, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How much of every draft that was found goes into the coming step.

        Args:
            rows: Requests in the batch, those without a draft included.
            kv_tokens: Tokens of all contexts.
            kinds: Class of each draft, -1 for none.
            lengths: Tokens found for each.

        Returns:
            Draft length per look-up, in the order given; all 0 when these drafts do not pay together.
        """
        chosen = self._allocate(rows, kv_tokens, kinds, lengths)
        self.watchdog.handed_out(sum(chosen))
        return chosen

    def _allocate(self, rows: int, kv_tokens: float, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        self._is_for_gain = False
        if self.limits.mode == "always":
            return list(lengths)
        counts = Counter(kinds)
        counts.pop(-1, None)
        cost = self.step_time.cost(rows, kv_tokens)
        none = [0] * len(lengths)
        if not counts or cost is None:
            return none
        probing = self.regime == "high"
        self._is_for_gain = not probing
        if probing:
            cost = _cheaper(cost)
        rates = {kind: self.acceptance.rates(kind) for kind in counts}
        budget = best_budget(cost, rows, list(counts.items()), rates, self._cap(rows))
        if not budget.lengths:
            return none
        longest = budget.lengths
        chosen = [
            (length if length < longest[kind] else longest[kind]) if kind in longest else 0
            for kind, length in zip(kinds, lengths, strict=True)
        ]
        return chosen if probing or self._pays(rows, cost, kinds, chosen, rates) else none

    def observe_draft(self, kind: int, drafted: int, accepted: int) -> None:
        """Count one verified draft of a class: ``accepted`` of its ``drafted`` tokens."""
        self.acceptance.observe(kind, drafted, accepted)
        self.watchdog.verified(drafted, accepted, self.limits)

    def observe_step(
        self,
        *,
        rows: int,
        kv_tokens: float,
        drafting_rows: int,
        draft_tokens: int,
        accepted_tokens: int,
        seconds: float,
    ) -> None:
        """Count one measured step that held no prefill; see `DecodeTime.observe`."""
        if draft_tokens == 0:
            self._plain_at_step = self._step
        elif self._is_for_gain and (plain_s := self.step_time.plain_s(rows, kv_tokens)) is not None:
            self.watchdog.timed(seconds, plain_s * (1.0 + accepted_tokens / rows))
        self.step_time.observe(
            rows=rows,
            kv_tokens=kv_tokens,
            drafting_rows=drafting_rows,
            draft_tokens=draft_tokens,
            seconds=seconds,
        )

    def _cap(self, rows: int) -> int:
        """Longest draft that the limits allow in a batch of ``rows``: few live requests get long ones."""
        if rows < 1 or rows > self.limits.max_batch:
            return 0
        return min(self.limits.max_draft_tokens, max(1, self.limits.max_step_draft_tokens // rows))

    def _decide(self, rows: int, kv_tokens: float, cap: int) -> tuple[int, float]:
        if self._step - self._decisions_at_step >= REFRESH_STEPS:
            self._decisions.clear()
            self._decisions_at_step = self._step
        known = self._decisions.get(rows)
        if known is None:
            cost = self.step_time.cost(rows, kv_tokens)
            budget = Budget() if cost is None or cap == 0 else self._expected(cost, rows, cap)
            known = self._decisions[rows] = (max(budget.lengths.values(), default=0), budget.gain)
        return known

    def _expected(self, cost: DraftCost, rows: int, cap: int) -> Budget:
        mix = self.acceptance.mix()
        rates = {kind: self.acceptance.rates(kind) for kind, _ in mix}
        return best_budget(cost, rows, [(kind, share * rows) for kind, share in mix], rates, cap)

    def _pays_at(self, gain: float) -> bool:
        """Whether drafts of this gain are worth it: more is asked for to begin than to go on."""
        share = KEEP_GAIN_SHARE if self.regime == "low" else 1.0
        return gain > 0.0 and gain >= share * self.limits.min_gain

    def _dwell(self, rows: int, pays: bool) -> None:
        """Change the regime when the old one lasted long enough, and drafts now pay, or have long not paid."""
        now_s = self._now_s
        if pays:
            self._paid_at_s = now_s
        since_s = self._switched_at_s if self.regime == "high" else max(self._switched_at_s, self._paid_at_s)
        if pays == (self.regime == "high") and now_s - since_s >= self.limits.dwell_s:
            self._enter("low" if pays else "high", rows)

    def _enter(self, regime: Regime, rows: int) -> None:
        if regime != self.regime:
            self.regime = regime
            self.switches += 1
            self.switch_rows = rows
            self._switched_at_s = self._now_s
            self._plain_at_step = self._step

    def _probe(self, rows: int, kv_tokens: float, cap: int) -> int:
        """A short draft now and then, to measure what drafts cost, where they would pay if they cost less."""
        now_s = self._now_s
        if cap == 0 or now_s < self._probe_at_s:
            return 0
        cost = self.step_time.cost(rows, kv_tokens)
        if cost is None:
            return 0
        limit = min(cap, self.limits.probe_draft_tokens)
        extra_s = cost.extra_s(rows, rows * limit)
        self._probe_at_s = now_s + max(self.limits.probe_interval_s, extra_s / self.limits.probe_share)
        return limit if self._expected(_cheaper(cost), rows, limit).gain >= self.limits.min_gain else 0

    def _pays(
        self,
        rows: int,
        cost: DraftCost,
        kinds: Sequence[int],
        chosen: Sequence[int],
        rates: dict[int, tuple[float, float]],
    ) -> bool:
        """Whether drafts of these very lengths are faster than none; those found may be shorter than was wished."""
        by_length = Counter(zip(kinds, chosen, strict=True))
        accepted = sum(n * expected_accepted(*rates[kind], length) for (kind, length), n in by_length.items() if length)
        seconds = cost.plain_s + cost.extra_s(len(chosen) - chosen.count(0), sum(chosen))
        return (rows + accepted) * cost.plain_s > rows * seconds


def _cheaper(cost: DraftCost) -> DraftCost:
    return DraftCost(
        plain_s=cost.plain_s,
        any_draft_s=cost.any_draft_s * OPTIMISTIC_COST,
        row_s=cost.row_s * OPTIMISTIC_COST,
        token_s=cost.token_s * OPTIMISTIC_COST,
    )
