"""How long one engine step takes, learnt while the engine runs: plain, and with drafts in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BUCKETS_PER_OCTAVE = 4
"""Batch sizes above 8 share a bucket with those within 19%: a step's time differs less than it is noisy there."""

PLAIN_MEMORY_STEPS = 64.0
"""Plain steps that the mean of a bucket remembers: contexts grow by about this many tokens meanwhile."""

DRAFT_MEMORY_STEPS = 256.0
"""Drafting steps that the fit of a bucket remembers; it has three unknowns and must see several draft lengths."""

PRIOR_STEPS = 4.0
"""Weight of the prior table, in steps: a handful of measurements overrules it."""

OUTLIER_FACTOR = 3.0
"""A step is counted as at most this many times (or this fraction of) what was expected: one pause of the process
must not move the model."""

WARM_STEPS = 4
"""Measurements after which a bucket is trusted on its own, and from which outliers are told."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """What drafts add to a step of a given batch, in seconds.

    Attributes:
        plain_s: The step without drafts.
        any_draft_s: Added once when any row drafts: the whole batch takes the rejection sampler's way.
        row_s: Added by every drafting row.
        token_s: Added by every draft token.
    """

    plain_s: float
    any_draft_s: float
    row_s: float
    token_s: float

    def extra_s(self, drafting_rows: float, draft_tokens: float) -> float:
        """Seconds that ``draft_tokens`` on ``drafting_rows`` rows add to the step."""
        if drafting_rows <= 0:
            return 0.0
        return self.any_draft_s + self.row_s * drafting_rows + self.token_s * draft_tokens


def prior_cost(rows: int, plain_s: float) -> DraftCost:
    """What drafts cost before any was measured, as shares of the plain step.

    Source: step times of SmolLM2-135M on 2 CPU cores, batch 1 to 64 with 1 to 16 drafts: at batch 1 a draft token adds
    4% and the sampler's other way 3%; at batch 64 they add 0.7% and 45%. GPUs with spare compute are cheaper; the fit
    finds that out.
    """
    return DraftCost(
        plain_s=plain_s,
        any_draft_s=plain_s * (0.02 + 0.45 * rows / (rows + 12.0)),
        row_s=plain_s * 0.002,
        token_s=plain_s * 0.04 / (1.0 + rows / 12.0),
    )


@dataclass(slots=True)
class _Bucket:
    """Sums over the steps of one batch-size bucket."""

    steps: float = 0.0
    mean_s: float = 0.0
    mean_kv_tokens: float = 0.0
    drafted_steps: float = 0.0
    # Normal equations of the extra seconds over (1, drafting rows, draft tokens), upper triangle.
    gram: list[float] = field(default_factory=lambda: [0.0] * 6)
    moment: list[float] = field(default_factory=lambda: [0.0] * 3)
    scale: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])


class StepTimeModel:
    """Seconds of a step as a function of its batch; every method is a few microseconds.

    ``T(B, kv, R, D) = plain(B) + c_kv * (kv - kv_mean(B)) + [R > 0] * any(B) + row(B) * R + token(B) * D``, all
    coefficients at least 0.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._kv_slope_s = 0.0
        self._kv_xy = 0.0
        self._kv_xx = 0.0

    def observe(self, *, rows: int, kv_tokens: float, drafting_rows: int, draft_tokens: int, seconds: float) -> None:
        """Count one measured step that held no prefill.

        Args:
            rows: Requests in the batch.
            kv_tokens: Tokens of all contexts.
            drafting_rows: Rows that verified at least one draft token.
            draft_tokens: Draft tokens verified.
            seconds: Time of the step.
        """
        if rows < 1 or seconds <= 0.0:
            return
        bucket = self._buckets.setdefault(bucket_of(rows), _Bucket())
        if draft_tokens == 0:
            self._observe_plain(bucket, kv_tokens, seconds)
        elif bucket.steps > 0:
            self._observe_drafted(bucket, rows, kv_tokens, drafting_rows, draft_tokens, seconds)

    def plain_s(self, rows: int, kv_tokens: float) -> float | None:
        """Seconds of a step without drafts; None before any was measured near this batch size."""
        bucket = self._nearest(bucket_of(rows))
        return None if bucket is None else self._plain_of(bucket, kv_tokens)

    def cost(self, rows: int, kv_tokens: float) -> DraftCost | None:
        """What drafts cost in such a step; None before any plain step was measured near this batch size."""
        index = bucket_of(rows)
        bucket = self._nearest(index)
        if bucket is None:
            return None
        plain = self._plain_of(bucket, kv_tokens)
        prior = prior_cost(rows, plain)
        own = self._buckets.get(index)
        if own is None or own.drafted_steps == 0.0:
            return prior
        any_draft, row, token = _fit(own, prior)
        return DraftCost(plain_s=plain, any_draft_s=any_draft, row_s=row, token_s=token)

    def _nearest(self, index: int) -> _Bucket | None:
        """The bucket, or a measured one within an octave; further away the plain time says nothing."""
        for distance in range(BUCKETS_PER_OCTAVE + 1):
            for candidate in (index - distance, index + distance):
                bucket = self._buckets.get(candidate)
                if bucket is not None and bucket.steps > 0:
                    return bucket
        return None

    def _plain_of(self, bucket: _Bucket, kv_tokens: float) -> float:
        # Never below half of what was measured: the slope is a small correction, not a second model.
        return max(bucket.mean_s * 0.5, bucket.mean_s + self._kv_slope_s * (kv_tokens - bucket.mean_kv_tokens))

    def _observe_plain(self, bucket: _Bucket, kv_tokens: float, seconds: float) -> None:
        if bucket.steps >= WARM_STEPS:
            expected = self._plain_of(bucket, kv_tokens)
            seconds = min(max(seconds, expected / OUTLIER_FACTOR), expected * OUTLIER_FACTOR)
            dx, dy = kv_tokens - bucket.mean_kv_tokens, seconds - bucket.mean_s
            keep = 1.0 - 1.0 / DRAFT_MEMORY_STEPS
            self._kv_xy = self._kv_xy * keep + dx * dy
            self._kv_xx = self._kv_xx * keep + dx * dx
            self._kv_slope_s = max(0.0, self._kv_xy / self._kv_xx) if self._kv_xx > 0 else 0.0
        bucket.steps = min(bucket.steps + 1.0, PLAIN_MEMORY_STEPS)
        bucket.mean_s += (seconds - bucket.mean_s) / bucket.steps
        bucket.mean_kv_tokens += (kv_tokens - bucket.mean_kv_tokens) / bucket.steps

    def _observe_drafted(
        self, bucket: _Bucket, rows: int, kv_tokens: float, drafting_rows: int, draft_tokens: int, seconds: float
    ) -> None:
        plain = self._plain_of(bucket, kv_tokens)
        if bucket.drafted_steps >= WARM_STEPS:
            any_draft, row, token = _fit(bucket, prior_cost(rows, plain))
            expected = plain + any_draft + row * drafting_rows + token * draft_tokens
            seconds = min(max(seconds, expected / OUTLIER_FACTOR), expected * OUTLIER_FACTOR)
        keep = 1.0 - 1.0 / DRAFT_MEMORY_STEPS
        bucket.drafted_steps = bucket.drafted_steps * keep + 1.0
        x1, x2, y = float(drafting_rows), float(draft_tokens), seconds - plain
        terms = (1.0, x1, x2, x1 * x1, x1 * x2, x2 * x2)
        bucket.gram = [old * keep + term for old, term in zip(bucket.gram, terms, strict=True)]
        bucket.moment = [old * keep + y * x for old, x in zip(bucket.moment, (1.0, x1, x2), strict=True)]
        bucket.scale = [1.0, max(1.0, x1), max(1.0, x2)]


def _fit(bucket: _Bucket, prior: DraftCost) -> tuple[float, float, float]:
    """Least squares with every coefficient at least 0, pulled towards ``prior`` by `PRIOR_STEPS` typical steps.

    Source: cyclic coordinate descent for non-negative least squares (Franc, Hlavac and Navara, CAIP 2005).
    """
    g, m = bucket.gram, bucket.moment
    rows = ((g[0], g[1], g[2]), (g[1], g[3], g[4]), (g[2], g[4], g[5]))
    start = (prior.any_draft_s, prior.row_s, prior.token_s)
    ridge = [PRIOR_STEPS * scale * scale for scale in bucket.scale]
    beta = list(start)
    for _ in range(12):
        for i in range(3):
            others = sum(rows[i][j] * beta[j] for j in range(3) if j != i)
            beta[i] = max(0.0, (m[i] + ridge[i] * start[i] - others) / (rows[i][i] + ridge[i]))
    return beta[0], beta[1], beta[2]
