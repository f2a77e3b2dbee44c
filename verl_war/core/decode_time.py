"""How long the coming decode step of one engine takes, with drafts and without: what the draft planner decides by."""

from __future__ import annotations

from bisect import bisect_left

from verl_war.core.least_squares import NonNegativeFit, OutlierRule
from verl_war.core.step_time import (
    MAX_STEP_S,
    MAX_STEP_TOKENS,
    UNKNOWN_MACHINE,
    DraftCost,
    StepTime,
    StepTimeFit,
    Window,
)

BUCKETS_PER_OCTAVE = 4
"""Batch sizes above 8 share a bucket with those within 19%: a step's time differs less than it is noisy there."""

PLAIN_MEMORY_STEPS = 64.0
"""Plain steps that the mean of a bucket remembers: contexts grow by about this many tokens meanwhile."""

DRAFT_HALF_LIFE_STEPS = 180.0
"""Of the drafting steps of a bucket; its fit has three unknowns and must see several draft lengths."""

PRIOR_STEPS = 4.0
"""Weight of what other batch sizes say of a bucket's drafts, in steps: a handful of measurements overrules it."""

LEARN_STEPS = 16
"""Plain steps of a batch size from which the linear model learns at a time: a sum tells it as much as its parts."""


def _thresholds(limit: int) -> list[int]:
    sizes = list(range(1, 9))
    step = 2.0 ** (1.0 / BUCKETS_PER_OCTAVE)
    upper = 8.0
    while upper < limit:
        upper *= step
        sizes.append(round(upper))
    return sizes


_BUCKET_UPPER = _thresholds(1 << 16)


def bucket_of(rows: int) -> int:
    """Index of the batch-size bucket that holds ``rows`` requests."""
    return bisect_left(_BUCKET_UPPER, rows)


class _Bucket:
    """What was measured of the steps of one batch-size bucket, and what the linear model has not learnt of yet."""

    __slots__ = (
        *("drafts", "drafts_s", "kv_tokens", "new_kv_tokens", "new_rows", "new_s", "new_steps", "outliers"),
        *("plain_s", "rows", "steps"),
    )

    def __init__(self) -> None:
        self.outliers = OutlierRule()
        self.steps = self.plain_s = self.rows = self.kv_tokens = 0.0
        self.drafts = NonNegativeFit(3, half_life=DRAFT_HALF_LIFE_STEPS, prior_observations=PRIOR_STEPS)
        self.drafts_s = (0.0, 0.0, 0.0)
        self._learnt()

    def _learnt(self) -> None:
        self.new_steps, self.new_rows, self.new_kv_tokens, self.new_s = 0, 0, 0.0, 0.0

    def add_plain(self, rows: int, kv_tokens: float, seconds: float) -> None:
        """Count a step in the means and in what is to be learnt of."""
        self.steps = min(self.steps + 1.0, PLAIN_MEMORY_STEPS)
        share = 1.0 / self.steps
        self.plain_s += (seconds - self.plain_s) * share
        self.rows += (rows - self.rows) * share
        self.kv_tokens += (kv_tokens - self.kv_tokens) * share
        self.new_steps += 1
        self.new_rows += rows
        self.new_kv_tokens += kv_tokens
        self.new_s += seconds

    def take_window(self) -> Window | None:
        """The steps that the linear model has not learnt of, once they are enough; while the bucket is new, each."""
        if self.new_steps < min(LEARN_STEPS, self.steps):
            return None
        window = Window(self.new_steps, self.new_rows, self.new_kv_tokens, self.new_s, self.new_rows)
        self._learnt()
        return window


class DecodeTime:
    """Seconds of a decode step of one engine as a function of its batch, with drafts and without.

    The linear model, corrected by what was measured of batches of the same size: their mean plain step, and what drafts
    added to theirs. Every method takes a few microseconds.

    Args:
        prior: The machine's profile; None = unknown. Then nothing is said of batches that are more than an octave
            smaller or larger than all that were measured.
    """

    def __init__(self, prior: StepTime | None = None) -> None:
        self.fit = StepTimeFit(prior)
        self._buckets: dict[int, _Bucket] = {}

    def observe(self, *, rows: int, kv_tokens: float, drafting_rows: int, draft_tokens: int, seconds: float) -> None:
        """Count one measured step that held no prefill; one that can't be, as with negative numbers, is ignored.

        Args:
            rows: Requests in the batch.
            kv_tokens: Tokens of all contexts.
            drafting_rows: Rows that verified at least one draft token.
            draft_tokens: Draft tokens verified.
            seconds: Time of the step.
        """
        if not (1 <= rows <= MAX_STEP_TOKENS and 0.0 <= kv_tokens <= MAX_STEP_TOKENS and 0.0 < seconds <= MAX_STEP_S):
            return
        if draft_tokens == 0:
            self._observe_plain(rows, kv_tokens, seconds)
        elif 0 < drafting_rows <= rows and drafting_rows <= draft_tokens <= MAX_STEP_TOKENS:
            self._observe_drafted(rows, kv_tokens, drafting_rows, draft_tokens, seconds)

    def plain_s(self, rows: int, kv_tokens: float) -> float | None:
        """Seconds of a step without drafts; None when nothing is known of such batch sizes."""
        index = bucket_of(rows)
        bucket = self._nearest(index)
        if bucket is not None:
            return self._corrected_s(bucket, rows, kv_tokens)
        return self.fit.value().step_s(rows, kv_tokens) if self._is_known(index) else None

    def cost(self, rows: int, kv_tokens: float) -> DraftCost | None:
        """What drafts cost in such a step; None when nothing is known of such batch sizes."""
        plain_s = self.plain_s(rows, kv_tokens)
        if plain_s is None:
            return None
        bucket = self._buckets.get(bucket_of(rows))
        any_s, row_s, token_s = self._drafts_s(bucket, rows, plain_s)
        return DraftCost(plain_s=plain_s, any_draft_s=any_s, row_s=row_s, token_s=token_s)

    def _bucket_of(self, rows: int) -> _Bucket:
        index = bucket_of(rows)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket()
        return bucket

    def _nearest(self, index: int) -> _Bucket | None:
        """The bucket, or a measured one within an octave; further away the linear model knows more."""
        for distance in range(BUCKETS_PER_OCTAVE + 1):
            for candidate in (index - distance, index + distance):
                bucket = self._buckets.get(candidate)
                if bucket is not None and bucket.steps > 0:
                    return bucket
        return None

    def _is_known(self, index: int) -> bool:
        """Whether the linear model can be believed for a batch size that was not measured."""
        measured = self._buckets
        return self.fit.is_calibrated or (bool(measured) and min(measured) < index < max(measured))

    def _corrected_s(self, bucket: _Bucket, rows: int, kv_tokens: float) -> float:
        model = self.fit.value()
        change_s = model.row_s * (rows - bucket.rows) + model.kv_token_s * (kv_tokens - bucket.kv_tokens)
        # Never below half of what was measured: a correction, not a second model.
        return max(bucket.plain_s * 0.5, bucket.plain_s + change_s)

    def _drafts_s(self, bucket: _Bucket | None, rows: int, plain_s: float) -> tuple[float, float, float]:
        """What drafts cost once, by drafting row and by token."""
        if bucket is not None and bucket.drafts.count and not bucket.drafts.is_due:
            return bucket.drafts_s
        model = self.fit.value()
        prior = (model.draft_s + model.draft_row_s * rows, 0.0, model.draft_token_s)
        if not self.fit.has_drafts:
            # Drafts that a profile makes dear would never be tried, and the profile never be found wrong.
            unknown = UNKNOWN_MACHINE.draft_cost(rows, 0.0)
            share = plain_s / unknown.plain_s
            return min(prior[0], unknown.any_draft_s * share), 0.0, min(prior[2], unknown.token_s * share)
        if bucket is None or not bucket.drafts.count:
            return prior
        scale = (max(prior[0], 0.01 * plain_s), max(prior[2], 0.001 * plain_s), max(prior[2], 0.001 * plain_s))
        bucket.drafts_s = bucket.drafts.solve(prior, scale)  # type: ignore[assignment]
        return bucket.drafts_s

    def _observe_plain(self, rows: int, kv_tokens: float, seconds: float) -> None:
        expected_s = self.plain_s(rows, kv_tokens)
        bucket = self._bucket_of(rows)
        if expected_s is not None:
            seconds = bucket.outliers.bounded(seconds, expected_s)
            if bucket.outliers.is_persistent:
                bucket.steps = 0.0  # the machine is another one now, or the mean began with a stall
        bucket.add_plain(rows, kv_tokens, seconds)
        window = bucket.take_window()
        if window is not None:
            self.fit.observe(*window)

    def _observe_drafted(
        self, rows: int, kv_tokens: float, drafting_rows: int, draft_tokens: int, seconds: float
    ) -> None:
        cost = self.cost(rows, kv_tokens)
        if cost is None:
            return
        bucket = self._bucket_of(rows)
        expected_s = cost.plain_s + cost.extra_s(drafting_rows, draft_tokens)
        seconds = bucket.outliers.bounded(seconds, expected_s)
        extra_s = seconds - cost.plain_s
        size_s = max(seconds, expected_s)
        bucket.drafts.add(1.0, (1.0, float(drafting_rows), float(draft_tokens)), extra_s, size_s)
        self.fit.observe_drafts(rows, draft_tokens, extra_s, size_s)
