"""Speculation of one simulated replica: the live `DraftPlanner` decides, the workload's text tells what is accepted.

The planner is called as `integration.vllm.speculation` calls it, and is left alone as often while nothing is drafted.
Left out: text that is not read in yet, and the CPU time of a planner that drafts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from verl_war.core.draft_budget import kv_limit
from verl_war.core.history_config import SOURCES
from verl_war.core.speculation import DraftPlanner
from verl_war.core.speculation_limits import MAX_DRAFT_TOKENS, SpeculationLimits
from verl_war.core.types import SpeculationReading
from verl_war.sim.draft_world import CLASS_MATCHES
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.kv_cache import BLOCK_TOKENS, blocks_for
from verl_war.sim.request import Request

REST_STEPS = 3
"""Steps between two looks while drafts do not pay (`integration.vllm.speculation`)."""

SHADOW_ROWS = 8
SHADOW_TOKENS = 8
SHADOW_INTERVAL_S = 0.2
"""Requests, length and least interval of look-ups while nothing is drafted (`integration.vllm.speculation_shadow`)."""


@dataclass(slots=True)
class Batch:
    """What is about to run in one engine step.

    Attributes:
        requests: Requests in the batch, those that prefill included.
        kv_tokens: Tokens of all decoding contexts.
        decoding: The decoding requests.
        step: The replica's step counter.
        free_blocks: KV blocks that drafts may take.
        is_steady: Only decoding, of the same requests as in the step before: its time tells what a step costs.
        now_s: When it begins.
    """

    requests: int
    kv_tokens: int
    decoding: Iterable[Request]
    step: int
    free_blocks: int
    is_steady: bool
    now_s: float


@dataclass(slots=True)
class Draft:
    """One request's draft: its class, and how many of its tokens are accepted."""

    request: Request
    kind: int
    length: int
    accepted: int


class StepDrafts:
    """The drafts that one step verifies, no more than the batch's free blocks hold.

    Attributes:
        pairs: (query, key) pairs of their attention.
    """

    __slots__ = ("drafts", "tokens", "accepted", "pairs")

    def __init__(self, batch: Batch, candidates: Iterable[Draft]) -> None:
        self.drafts: list[Draft] = []
        self.tokens = self.accepted = 0
        self.pairs = 0.0
        free = batch.free_blocks
        for draft in candidates:
            context = draft.request.context(batch.step)
            blocks = blocks_for(context + 1 + draft.length) - blocks_for(context + 1)
            if draft.length == 0 or blocks > free:
                continue
            free -= blocks
            self.drafts.append(draft)
            self.tokens += draft.length
            self.accepted += draft.accepted
            self.pairs += draft.length * (context + (draft.length + 1) / 2)


class Drafter(Protocol):
    """Decides before every engine step of a replica what is drafted."""

    @property
    def plain_steps(self) -> int:
        """Steps without drafts that may follow one another before it is asked again."""

    @property
    def switches(self) -> int:
        """Changes between drafting and not."""

    def propose(self, batch: Batch) -> StepDrafts | None:
        """Drafts for the coming step; None for none."""

    def observe(self, batch: Batch, drafts: StepDrafts | None, steps: int, seconds: float) -> None:
        """The steps that began with this batch are over."""

    def on_end(self, output_tokens: int) -> None:
        """A turn has generated all its tokens."""

    def reading(self, steps: int, busy_s: float) -> SpeculationReading:
        """What the engine would report after so many steps."""


class _Counts:
    """Counters since the engine started."""

    def __init__(self) -> None:
        self._drafting_steps = self._drafting_rows = self._drafted = self._accepted = 0

    def _count(self, drafts: StepDrafts) -> None:
        self._drafting_steps += 1
        self._drafting_rows += len(drafts.drafts)
        self._drafted += drafts.tokens
        self._accepted += drafts.accepted


class PlannedDrafts(_Counts):
    """The drafter of the live system.

    Args:
        limits: Its limits.
        per_match: Longest draft as a multiple of the context that matches; None for no such bound.
    """

    def __init__(self, limits: SpeculationLimits, per_match: float | None = None) -> None:
        super().__init__()
        self.planner = DraftPlanner(limits, SOURCES, CLASS_MATCHES)
        self.plain_steps = 1
        self._per_match = per_match
        self._budget = 0
        self._steps_since_look = 1
        self._shadow_due_s = 0.0
        self._shadow_due_step = 0
        self._shadow_first = 0

    @property
    def switches(self) -> int:
        return self.planner.switches

    def propose(self, batch: Batch) -> StepDrafts | None:
        rows, kv_tokens = batch.requests, float(batch.kv_tokens)
        limit = self.planner.lookup_limit(rows, kv_tokens, batch.now_s, self._steps_since_look)
        is_known = self.planner.step_time.plain_s(rows, kv_tokens) is not None
        self.plain_steps = 1 if self.planner.is_drafting or not is_known else 1 + REST_STEPS
        self._budget = limit = kv_limit(limit, rows, batch.free_blocks * BLOCK_TOKENS, BLOCK_TOKENS)
        if limit == 0:
            self._look_aside(batch)
            return None
        found = [self._look_up(request, batch.step, limit) for request in batch.decoding]
        self._observe_mix(found)
        kinds, lengths = [draft.kind for draft in found], [draft.length for draft in found]
        generated = [draft.request.position(batch.step) for draft in found]
        chosen = self.planner.allocate(rows, kv_tokens, kinds, lengths, generated)
        for draft, length in zip(found, chosen, strict=True):
            draft.length = length
            draft.accepted = min(draft.accepted, length)
        drafts = StepDrafts(batch, found)
        return drafts if drafts.drafts else None

    def observe(self, batch: Batch, drafts: StepDrafts | None, steps: int, seconds: float) -> None:
        self._steps_since_look = steps
        if drafts is not None:
            self._count(drafts)
            for draft in drafts.drafts:
                self.planner.observe_draft(draft.kind, draft.length, draft.accepted)
        if batch.is_steady or steps > 1:
            self.planner.observe_step(
                rows=batch.requests,
                kv_tokens=float(batch.kv_tokens + (steps - 1) * batch.requests),
                drafting_rows=0 if drafts is None else len(drafts.drafts),
                draft_tokens=0 if drafts is None else drafts.tokens,
                accepted_tokens=0 if drafts is None else drafts.accepted,
                seconds=seconds / steps,
            )

    def on_end(self, output_tokens: int) -> None:
        self.planner.turn_lengths.observe(output_tokens)

    def reading(self, steps: int, busy_s: float) -> SpeculationReading:
        return SpeculationReading(
            steps=steps,
            drafting_steps=self._drafting_steps,
            drafting_rows=self._drafting_rows,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            draft_s=0.0,
            step_s=busy_s,
            regime=self.planner.regime,
            budget_tokens=self._budget,
            expected_gain=self.planner.gain,
        )

    def _look_up(self, request: Request, step: int, limit: int) -> Draft:
        position = request.position(step)
        room = min(limit, request.output_tokens - position - 1)
        if room < 1:
            return Draft(request, -1, 0, 0)
        return Draft(request, *request.known_drafts.look_up(position, room, self._per_match))

    def _observe_mix(self, found: Sequence[Draft]) -> None:
        counts: dict[int, int] = {}
        for draft in found:
            counts[draft.kind] = counts.get(draft.kind, 0) + 1
        self.planner.acceptance.observe_mix(counts, len(found))

    def _look_aside(self, batch: Batch) -> None:
        """Look some drafts up only to learn what would be accepted."""
        is_due = batch.now_s >= self._shadow_due_s and batch.step >= self._shadow_due_step
        if self.planner.limits.mode != "auto" or not is_due:
            return
        self._shadow_due_s = batch.now_s + SHADOW_INTERVAL_S
        self._shadow_due_step = batch.step + SHADOW_TOKENS + 1
        decoding = list(batch.decoding)
        start = self._shadow_first % len(decoding)
        self._shadow_first += SHADOW_ROWS
        picked = islice(decoding[start:] + decoding[:start], SHADOW_ROWS)
        found = [self._look_up(request, batch.step, SHADOW_TOKENS) for request in picked]
        self._observe_mix(found)
        for draft in found:
            if draft.kind >= 0:
                self.planner.acceptance.observe(draft.kind, draft.length, draft.accepted)


class OracleDrafts(_Counts):
    """Knows what the model will say: drafts just what is accepted, whenever that is faster."""

    plain_steps = 1
    switches = 0

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__()
        self._hardware = hardware

    def propose(self, batch: Batch) -> StepDrafts | None:
        drafts = StepDrafts(batch, (self._right_part(request, batch.step) for request in batch.decoding))
        if not drafts.drafts:
            return None
        hardware, rows = self._hardware, batch.requests
        plain_s = hardware.step_s(rows, batch.kv_tokens)
        seconds = hardware.step_s(rows, batch.kv_tokens, drafts.tokens, drafts.pairs)
        seconds += hardware.draft_s(rows, drafts.tokens)
        return drafts if (rows + drafts.accepted) * plain_s > rows * seconds else None

    def observe(self, batch: Batch, drafts: StepDrafts | None, steps: int, seconds: float) -> None:
        if drafts is not None:
            self._count(drafts)

    def on_end(self, output_tokens: int) -> None:
        pass

    def reading(self, steps: int, busy_s: float) -> SpeculationReading:
        return SpeculationReading(
            steps=steps,
            drafting_steps=self._drafting_steps,
            drafting_rows=self._drafting_rows,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            draft_s=0.0,
            step_s=busy_s,
            regime="low",
            budget_tokens=MAX_DRAFT_TOKENS,
            expected_gain=0.0,
        )

    def _right_part(self, request: Request, step: int) -> Draft:
        position = request.position(step)
        room = min(MAX_DRAFT_TOKENS, request.output_tokens - position - 1)
        kind, _, accepted = request.known_drafts.look_up(position, room) if room > 0 else (-1, 0, 0)
        return Draft(request, kind, accepted, accepted)
