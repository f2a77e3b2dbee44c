"""Speculation of one worker: once per engine step, which drafts go into the next one. Knows no vLLM classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_war.core.acceptance import PROB_LEVELS
from verl_war.core.draft_budget import kv_limit
from verl_war.core.speculation import DraftPlanner
from verl_war.core.speculation_limits import SpeculationLimits, change_limits
from verl_war.core.step_time import StepTime
from verl_war.history.index import MATCH_BUCKETS, SOURCES, DraftBatch
from verl_war.integration.vllm.speculation_shadow import ShadowProbes
from verl_war.integration.vllm.speculation_stats import SpeculationCounts
from verl_war.integration.vllm.speculation_step import KvRoom, StepInput
from verl_war.integration.vllm.speculation_text import DraftStore, LiveRequest, TrajectoryTexts, TurnEnds

CLASS_MATCHES = (1, 3, 5, 9, 17, 33)
"""Smallest match length of each class of drafts: half as many as the index keeps, so that each sees enough drafts."""

INGEST_S = 0.0005
"""Time per engine step for text of requests that left or wait to be read in; keeps a short step's delay under 1 ms."""

INGEST_SHARE = 0.02
"""The same as a share of the last step, for long ones: with 64 short turns a dozen contexts come in every step, and who
waits to be read in gets no drafts. With 0.5 ms for all of them 8 of 64 requests drafted."""

MAX_INGEST_S = 0.01
"""Bound of that share, for steps that prefill for seconds."""

REST_STEPS = 3
"""Steps that go by between two looks while drafts do not pay and the batch stays the same. A look that drafts nothing
costs 0.05 to 0.15 ms, up to 1.5% of a step of 10 ms."""

ACCEPTANCE_EVERY_STEPS = 64
"""Steps looked at between two hand-overs of the measured acceptance to the index, 20 us each."""


class Speculation:
    """Drafts of one worker. Any exception out of `step` leaves it unusable until `reset`."""

    def __init__(
        self,
        store: DraftStore,
        limits: SpeculationLimits,
        clock: Callable[[], float] = time.perf_counter,
        prior: StepTime | None = None,
    ) -> None:
        self.store = store
        self.index = store.index
        self.planner = DraftPlanner(limits, SOURCES, CLASS_MATCHES, prior)
        self.texts = TrajectoryTexts(store)
        self.counts = SpeculationCounts.of(SOURCES)
        self._clock = clock
        self._shadow = ShadowProbes(self)
        self._req_ids: list[str] = []
        self._rows: list[LiveRequest | None] = []
        self._live: dict[str, LiveRequest] = {}
        self._ends = TurnEnds()
        self._limit_tokens = np.zeros(0, dtype=np.int64)
        self._free_tokens = np.zeros(0, dtype=np.int64)
        self._pending: dict[str, tuple[int, int]] = {}
        self._entered_s = 0.0
        self._last_step_s = 0.0
        self._steady = False
        self._busy = False
        self._rested_steps = self._rest_steps = 0
        self._looks = 0
        self._budget = 0

    @property
    def limits(self) -> SpeculationLimits:
        """Limits in force."""
        return self.planner.limits

    def change(self, params: Mapping[str, Any]) -> None:
        """New limits from the next step on.

        Raises:
            ValueError: A parameter is unknown or out of range; nothing changes then.
        """
        self.planner.set_limits(change_limits(self.limits, params))
        if self.limits.mode == "off":
            self._budget = 0

    def on_policy_step(self, step: int, rewards: Mapping[str, float]) -> None:
        """The weights are those of policy step ``step`` now: age what was measured, forget text that is too old.

        Args:
            step: verl's `global_steps`.
            rewards: What trajectories of the step before were worth, by name, as far as it is known.
        """
        self.planner.on_weights_updated()
        for req_id, request in self._live.items():  # who has finished meanwhile is not known before the next step
            self.texts.leave(request)
            self._ends.leave(req_id, request)
        self._live, self._req_ids, self._pending, self._steady = {}, [], {}, False
        self.texts.work_off(float("inf"), self._clock)
        self.texts.finish_idle()
        self.texts.set_rewards(rewards)
        self.store.on_step(step)

    def rests(self, req_ids: Sequence[str]) -> bool:
        """Whether the step of these requests needs no call of `step`.

        Nothing waits to be read in or verified, the batch is the same, and speculation is switched off, or did not pay
        within the last `REST_STEPS` steps.
        """
        if self._pending or self.texts.backlog or req_ids != self._req_ids:
            return False
        if self.limits.mode != "off" and self._rested_steps >= self._rest_steps:
            return False
        now = self._clock()
        self._busy = True
        self._count_step(now - self._entered_s)
        self._entered_s = now
        self._rested_steps += 1
        return True

    def step(self, step: StepInput, max_tokens: int) -> list[list[int]]:
        """Drafts for the coming step, one list per row; all empty when drafting does not pay.

        Args:
            step: The step that has just been computed.
            max_tokens: Longest draft that the engine can take.
        """
        now = self._clock()
        rows = len(step.req_ids)
        self._busy = rows > 0
        has_new = step.req_ids != self._req_ids and self._update_rows(step)
        kv_tokens = float(step.num_tokens.sum())
        self._measure(step, rows, kv_tokens, now, has_new)
        steps, self._rested_steps = 1 + self._rested_steps, 0
        limit = min(self.planner.lookup_limit(rows, kv_tokens, now, steps), max_tokens)
        # Before it knows what a plain step takes, the planner cannot say that drafts do not pay.
        is_known = self.planner.step_time.plain_s(rows, kv_tokens) is not None
        self._rest_steps = 0 if self.planner.is_drafting or not is_known else REST_STEPS
        self._budget = limit = self._fit_kv(step.kv, rows, kv_tokens, limit)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        if limit:
            self._draft(step, limit, kv_tokens, drafts)
        else:
            self._shadow.step(self._rows, now, steps)
        if self.texts.backlog:
            self.texts.work_off(self._clock() + self._ingest_s, self._clock)
        self._finish_step(now)
        return drafts

    def report(self) -> dict[str, Any]:
        """Counters, what is in force, and the size of the index."""
        report: dict[str, Any] = dict(self.counts.report())
        history = self.store.stats()
        report.update(
            regime=self.planner.regime,
            regime_switches=self.planner.switches,
            regime_switch_rows=self.planner.switch_rows,
            expected_gain=self.planner.gain,
            budget_tokens=self._budget,
            mode=self.limits.mode,
            watchdog=self.planner.watchdog.reason,
            watchdog_trips=self.planner.watchdog.trips,
            refused_requests=self.texts.refused_requests,
            backlog_requests=self.texts.backlog,
            **{f"history/{name}": value for name, value in history.items()},
        )
        return report

    def look_up(
        self, requests: Sequence[LiveRequest], max_tokens: npt.NDArray[np.int32]
    ) -> tuple[DraftBatch, list[int]]:
        """Drafts for requests whose text is in the index, and the class of each (-1: none was found)."""
        keys = np.fromiter((request.key for request in requests), dtype=np.int64, count=len(requests))
        batch = self.index.draft_batch(keys, max_tokens, self.limits.min_token_prob)
        self.counts.lookups += len(requests)
        return batch, classes_of(batch)

    def observe_mix(self, kinds: Sequence[int]) -> None:
        """Count in which classes look-ups ended."""
        counts: dict[int, int] = {}
        for kind in kinds:
            counts[kind] = counts.get(kind, 0) + 1
        self.planner.acceptance.observe_mix(counts, len(kinds))

    # -- one step -----------------------------------------------------------------------------------------------------

    def _update_rows(self, step: StepInput) -> bool:
        """The batch changed: requests came, left or moved to other rows. Returns whether some came."""
        known = set(self._req_ids)
        before, self._live = self._live, {}
        self._req_ids = list(step.req_ids)
        self._rows = []
        # First those that left: the next turn of one of their trajectories may be among those that came.
        present = set(self._req_ids)
        gone = [req_id for req_id in before if req_id not in present]
        for req_id in gone:
            self.texts.leave(before[req_id])
            self._ends.leave(req_id, before[req_id])
        for tokens in self._ends.settle(present, step.is_alive):
            self.planner.turn_lengths.observe(tokens)
        self._busy = len(gone) < len(before)  # otherwise the engine may have waited for requests meanwhile
        for row, req_id in enumerate(self._req_ids):
            request = before.get(req_id)
            if request is None:
                request = step.describe(row)
                if request is not None:
                    self.texts.arrive(req_id, request)
            if request is not None:
                self._live[req_id] = request
            self._rows.append(request)
        self._limit_tokens = np.array([0 if r is None else r.limit_tokens for r in self._rows], dtype=np.int64)
        self._free_tokens = np.array([0 if r is None else r.free_tokens for r in self._rows], dtype=np.int64)
        return not present <= known

    def _measure(self, step: StepInput, rows: int, kv_tokens: float, now: float, has_new: bool) -> None:
        """Count what the step accepted, and how long it took unless it read prompts.

        Requests may have left: with short turns few steps have the very batch of the one before.
        """
        drafting_rows = draft_tokens = accepted_tokens = 0
        if self._pending:
            where = {req_id: row for row, req_id in enumerate(step.req_ids)}
            for req_id, (kind, _) in self._pending.items():
                row = where.get(req_id)
                drafted = 0 if row is None else step.verified_tokens(row)
                if row is None or drafted == 0 or not step.sampled[row]:
                    continue
                accepted = min(len(step.sampled[row]) - 1, drafted)
                self.planner.observe_draft(kind, drafted, accepted)
                self.counts.verified(SOURCES[self.planner.acceptance.source_of(kind)], drafted, accepted)
                drafting_rows += 1
                draft_tokens += drafted
                accepted_tokens += accepted
            self._pending = {}
        steady = all(step.sampled)
        seconds = now - self._entered_s
        self._count_step(seconds)
        if self._busy and not has_new and steady and self._steady:
            self.planner.observe_step(
                rows=rows,
                kv_tokens=kv_tokens,
                drafting_rows=drafting_rows,
                draft_tokens=draft_tokens,
                accepted_tokens=accepted_tokens,
                seconds=seconds,
            )
        self._steady = steady
        self._entered_s = now
        self.counts.drafting_rows += drafting_rows
        self.counts.drafting_steps += drafting_rows > 0

    def _count_step(self, seconds: float) -> None:
        self.counts.steps += 1
        if self._busy:
            self.counts.step_s += seconds
            self._last_step_s = seconds

    def _fit_kv(self, kv: KvRoom, rows: int, kv_tokens: float, limit: int) -> int:
        """The limit, or less where drafts would take blocks that are short."""
        # Contexts that share blocks are counted twice here: enough to see that there is room, and cheap.
        if limit == 0 or kv_tokens + rows * (limit + kv.block_tokens) <= kv.capacity_tokens:
            return limit
        fitting = kv_limit(limit, rows, kv.free_tokens(), kv.block_tokens)
        self.counts.kv_limited_steps += fitting < limit
        return fitting

    @property
    def _ingest_s(self) -> float:
        """Time for reading text in, in this step."""
        return max(INGEST_S, min(INGEST_SHARE * self._last_step_s, MAX_INGEST_S))

    def _draft(self, step: StepInput, limit: int, kv_tokens: float, drafts: list[list[int]]) -> None:
        rows = self._ingest(step)
        if not rows:
            return
        at = np.asarray(rows)
        now_tokens = step.num_tokens[at]
        ends = np.where(now_tokens < self._free_tokens[at], self._free_tokens[at], self._limit_tokens[at])
        room = np.minimum(ends, self._limit_tokens[at]) - now_tokens - 1
        max_tokens = np.clip(room, 0, limit).astype(np.int32)
        requests = [self._rows[row] for row in rows]
        batch, kinds = self.look_up(requests, max_tokens)  # type: ignore[arg-type]
        self.observe_mix(kinds)
        offsets = batch.offsets.tolist()
        found = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
        generated = [len(request.outputs) for request in requests]  # type: ignore[union-attr]
        chosen = self.planner.allocate(len(self._rows), kv_tokens, kinds, found, generated)
        tokens = batch.tokens.tolist()
        for row, begin, length, kind in zip(rows, offsets, chosen, kinds, strict=False):
            if length:
                drafts[row] = tokens[begin : begin + length]
                self._pending[self._req_ids[row]] = (kind, length)

    def _ingest(self, step: StepInput) -> list[int]:
        """Bring the index up to date with the rows that sampled; returns those that can draft."""
        until_s = self._clock() + self._ingest_s
        ready: list[int] = []
        behind: list[int] = []
        for row, request in enumerate(self._rows):
            sampled = step.sampled[row]
            if request is None or request.refused or request.ended_at >= 0 or not sampled:
                continue
            if len(sampled) > 1 and not request.stop_ids.isdisjoint(sampled):
                continue  # it ends here; its text is taken over when it leaves
            new = request.num_tokens - request.known
            if request.key >= 0 and new == len(sampled):
                behind.append(row)
            elif request.key >= 0 and new == 0:
                ready.append(row)
            elif self._clock() < until_s:
                self.texts.catch_up(request)
                if not request.refused:
                    ready.append(row)
        if behind:
            ready += self._extend(step, behind)
            ready.sort()
        return ready

    def _extend(self, step: StepInput, rows: list[int]) -> list[int]:
        """Append what ``rows`` have just sampled, in one call."""
        requests = [self._rows[row] for row in rows]
        lengths = [len(step.sampled[row]) for row in rows]
        flat = np.fromiter(chain.from_iterable(step.sampled[row] for row in rows), dtype=np.int32, count=sum(lengths))
        keys = np.array([request.key for request in requests], dtype=np.int64)  # type: ignore[union-attr]
        starts = np.array([request.known for request in requests], dtype=np.int64)  # type: ignore[union-attr]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        try:
            self.index.extend_batch(keys, starts, offsets, flat)
        except (ValueError, KeyError):  # one row is to blame, and none was appended: find it
            for request in requests:
                self.texts.catch_up(request)  # type: ignore[arg-type]
        else:
            for request, length in zip(requests, lengths, strict=True):
                request.known += length  # type: ignore[union-attr]
        return [row for row, request in zip(rows, requests, strict=True) if not request.refused]  # type: ignore[union-attr]

    def _finish_step(self, entered_s: float) -> None:
        self._looks += 1
        if self._looks % ACCEPTANCE_EVERY_STEPS == 0:
            self.index.set_acceptance(np.asarray(self.planner.acceptance.by_match())[:, _INDEX_BUCKETS])
        seconds = self._clock() - entered_s
        self.counts.draft_s += seconds
        self.counts.max_draft_s = max(self.counts.max_draft_s, seconds)


def classes_of(batch: DraftBatch) -> list[int]:
    """Class of every draft of ``batch`` as in `AcceptanceTable.class_of`, -1 where nothing was found."""
    begin, end = batch.offsets[:-1], batch.offsets[1:]
    found = end > begin
    if not found.any():
        return [-1] * len(found)
    prob = batch.probs[np.minimum(begin, len(batch.probs) - 1)]
    bucket = np.maximum(np.searchsorted(_BUCKETS, batch.match_length, side="right") - 1, 0)
    level = np.searchsorted(_LEVELS, prob, side="right") - 1
    kinds = (batch.source * len(_BUCKETS) + bucket) * len(_LEVELS) + level
    return np.where(found, kinds, -1).tolist()


_BUCKETS = np.asarray(CLASS_MATCHES)
_INDEX_BUCKETS = np.searchsorted(_BUCKETS, np.asarray(MATCH_BUCKETS), side="right") - 1  # class of each index bucket
_LEVELS = np.asarray(PROB_LEVELS, dtype=np.float32)
