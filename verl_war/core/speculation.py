"""Draft length of every request in the coming engine step: what maximises expected committed tokens per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from verl_war.core.acceptance import AcceptanceTable
from verl_war.core.decode_time import DecodeTime
from verl_war.core.draft_budget import Budget, best_budget, best_length, expected_accepted
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.core.step_time import DraftCost, StepTime
from verl_war.core.turn_lengths import WEIGHTS, TurnLengths
from verl_war.core.types import Regime
from verl_war.core.watchdog import Watchdog

REFRESH_STEPS = 16
"""A decision for a batch size is reused for so many steps: acceptance and step times move more slowly than that, and
the decision costs 0.1 ms."""

PLAIN_EVERY_STEPS = 128
"""While drafting, one step in so many goes without, so that the model still knows what a plain step costs: at a gain
of 2x this gives up 0.4%."""

KEEP_GAIN_SHARE = 0.5
"""A regime that drafts stands still while the gain is below this share of `min_gain`, which was needed to enter it.
Longer drafts of few rows leave as much of the gain of all."""

AGE_ON_WEIGHTS = 0.5
"""Part of the acceptance counts that survives a weight update: the new policy resembles the old one."""

OPTIMISTIC_COST = 0.25
"""A real probe measures the price of drafts where they would pay if they cost only this share of what is believed."""


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
        self.turn_lengths = TurnLengths()
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

    def allocate(
        self,
        rows: int,
        kv_tokens: float,
        kinds: Sequence[int],
        lengths: Sequence[int],
        generated: Sequence[int] = (),
    ) -> list[int]:
        """How much of every draft that was found goes into the coming step.

        Args:
            rows: Requests in the batch, those without a draft included.
            kv_tokens: Tokens of all contexts.
            kinds: Class of each draft, -1 for none.
            lengths: Tokens found for each.
            generated: Tokens that the turn of each look-up has generated: those that lasted long get more, see
                `TurnLengths`. Empty = all get alike.

        Returns:
            Draft length per look-up, in the order given; all 0 when these drafts do not pay together.
        """
        chosen = self._allocate(rows, kv_tokens, kinds, lengths, generated)
        self.watchdog.handed_out(sum(chosen))
        return chosen

    def _allocate(
        self, rows: int, kv_tokens: float, kinds: Sequence[int], lengths: Sequence[int], generated: Sequence[int]
    ) -> list[int]:
        self._is_for_gain = False
        if self.limits.mode == "always":
            return list(lengths)
        cost = self.step_time.cost(rows, kv_tokens)
        if cost is None:
            return [0] * len(lengths)
        counts = Counter(kinds)
        counts.pop(-1, None)
        rates = {kind: self.acceptance.rates(kind) for kind in counts}
        is_probe = self.regime == "high"
        if is_probe:
            cost = _cheaper(cost)
        budget = best_budget(cost, rows, list(counts.items()), rates, self._cap(rows))
        chosen = budget.cut(kinds, lengths)
        if is_probe:
            return chosen
        self._is_for_gain = True
        longer = self._longer(rows, cost, budget, kinds, chosen, lengths, rates, generated)
        gain = self._gain(rows, cost, kinds, chosen, rates)
        if longer is not chosen and self._gain(rows, cost, kinds, longer, rates) > max(0.0, KEEP_GAIN_SHARE * gain):
            return longer
        return chosen if gain > 0.0 else [0] * len(lengths)

    def _longer(
        self,
        rows: int,
        cost: DraftCost,
        budget: Budget,
        kinds: Sequence[int],
        chosen: list[int],
        lengths: Sequence[int],
        rates: dict[int, tuple[float, float]],
        generated: Sequence[int],
    ) -> list[int]:
        """The chosen drafts, longer for turns whose tokens are worth more than those of others.

        At the budget's price a second is worth so many tokens, and these are worth more than one each.
        """
        if not (generated and budget.lengths and self.limits.favour_long_turns):
            return chosen
        weights = self.turn_lengths.weights(generated)
        best = {
            (kind, weight): best_length(*rates[kind], budget.price / weight, cost, self._cap(rows))[0]
            for kind, weight in set(zip(kinds, weights, strict=True))
            if kind >= 0 and weight > 1.0
        }
        if not best:
            return chosen
        return [
            max(least, min(length, best.get((kind, weight), 0)))
            for least, length, kind, weight in zip(chosen, lengths, kinds, weights, strict=True)
        ]

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
        """Longest draft that may be worth its tokens in such a batch, whoever's it is, and the gain of drafting."""
        if self._step - self._decisions_at_step >= REFRESH_STEPS:
            self._decisions.clear()
            self._decisions_at_step = self._step
        known = self._decisions.get(rows)
        if known is None:
            cost = self.step_time.cost(rows, kv_tokens)
            budget = Budget() if cost is None or cap == 0 else self._expected(cost, rows, cap)
            known = self._decisions[rows] = (self._longest(budget, cost, cap), budget.gain)
        return known

    def _longest(self, budget: Budget, cost: DraftCost | None, cap: int) -> int:
        if cost is None or not budget.lengths:
            return 0
        price = budget.price / (WEIGHTS[-1] if self.limits.favour_long_turns else 1.0)
        return max(best_length(*self.acceptance.rates(kind), price, cost, cap)[0] for kind in budget.lengths)

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

    def _gain(
        self,
        rows: int,
        cost: DraftCost,
        kinds: Sequence[int],
        chosen: Sequence[int],
        rates: dict[int, tuple[float, float]],
    ) -> float:
        """Gain in tokens per second of drafts of these very lengths; those found may be shorter than was wished."""
        by_length = Counter(zip(kinds, chosen, strict=True))
        accepted = sum(n * expected_accepted(*rates[kind], length) for (kind, length), n in by_length.items() if length)
        seconds = cost.plain_s + cost.extra_s(len(chosen) - chosen.count(0), sum(chosen))
        return (rows + accepted) * cost.plain_s / (rows * seconds) - 1.0


def _cheaper(cost: DraftCost) -> DraftCost:
    return DraftCost(
        plain_s=cost.plain_s,
        any_draft_s=cost.any_draft_s * OPTIMISTIC_COST,
        row_s=cost.row_s * OPTIMISTIC_COST,
        token_s=cost.token_s * OPTIMISTIC_COST,
    )
