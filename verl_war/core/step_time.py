"""How long one engine iteration takes: one linear model, learnt while the engines run.

The manager fits it to windows between two readings of all replicas, the draft planner in each engine to single steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verl_war.core.least_squares import NonNegativeFit, OutlierRule


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one engine iteration as a linear function of what it does.

    Attributes:
        base_s: Of an iteration, whatever it computes: reading the weights, launching kernels.
        row_s: Of each request that decodes a token.
        token_s: Of each token computed beyond these: prefill.
        kv_token_s: Of each token of KV cache in use, which decoding reads.
        draft_s: Of an iteration in which any request verifies drafts.
        draft_row_s: Of each request in such a batch: all go through the rejection sampler.
        draft_token_s: Of each draft token verified.

    The defaults are the shape of an unknown machine; the level is that of the first measurement.

    Source: the linear form is DAS's (arXiv 2511.13841, step time) with a term for the KV that attention reads. Draft
    terms: step times of SmolLM2-135M on 2 CPU cores, batch 1 to 64 with 1 to 16 drafts, where a draft token costs 3.5%
    of the base, and a batch with drafts 3% of it and half as much again for each row. GPUs with spare compute are
    cheaper; the fit finds that out.
    """

    base_s: float = 0.010
    row_s: float = 100e-6
    token_s: float = 50e-6
    kv_token_s: float = 50e-9
    draft_s: float = 0.0003
    draft_row_s: float = 50e-6
    draft_token_s: float = 0.00035

    def step_s(self, rows: float, kv_tokens: float, tokens: float = 0.0) -> float:
        """Seconds of an iteration that decodes `rows` requests and prefills `tokens`, with `kv_tokens` in use."""
        return self.base_s + self.row_s * rows + self.token_s * tokens + self.kv_token_s * kv_tokens

    def base_share(self, rows: float, kv_tokens: float) -> float:
        """Share of a decode step that does not grow with its batch: by it, more requests yield more tokens a second."""
        step_s = self.step_s(rows, kv_tokens)
        return self.base_s / step_s if step_s > 0.0 else 1.0

    def prefill_s(self, tokens: float) -> float:
        """Seconds that prefilling `tokens` takes from everything else on the replica."""
        return self.token_s * tokens

    def draft_cost(self, rows: float, kv_tokens: float) -> DraftCost:
        """What drafts add to a decode step."""
        any_draft_s = self.draft_s + self.draft_row_s * rows
        return DraftCost(
            plain_s=self.step_s(rows, kv_tokens), any_draft_s=any_draft_s, row_s=0.0, token_s=self.draft_token_s
        )


class Window(NamedTuple):
    """What an engine did between two readings.

    Attributes:
        iterations: Engine iterations.
        tokens: Tokens computed, prefill and decode.
        kv_token_steps: KV tokens in use, summed over the iterations.
        busy_s: Seconds of the iterations.
        row_steps: Requests that decoded, summed over the iterations.
    """

    iterations: int
    tokens: float
    kv_token_steps: float
    busy_s: float
    row_steps: float = 0.0

    @property
    def is_telling(self) -> bool:
        """Whether these can be readings of a working engine; see `MAX_STEP_S` and what follows it."""
        most = MAX_STEP_TOKENS * self.iterations
        return (
            0 < self.iterations <= MAX_ITERATIONS
            and 0.0 < self.busy_s <= MAX_STEP_S * self.iterations
            and 0.0 <= self.tokens <= most
            and 0.0 <= self.kv_token_steps <= most
            and 0.0 <= self.row_steps <= most
        )

    @property
    def known_busy_s(self) -> float | None:
        """Seconds that the engine worked, 0 for one that waited for requests; None where there is no telling."""
        if self.iterations == 0:
            return 0.0
        return self.busy_s if self.is_telling else None

    def predicted_s(self, model: StepTime) -> float:
        """Seconds that the model gives to the same work."""
        tokens = max(0.0, self.tokens - self.row_steps)
        return (
            model.base_s * self.iterations
            + model.row_s * self.row_steps
            + model.token_s * tokens
            + model.kv_token_s * self.kv_token_steps
        )


MAX_STEP_S = 3600.0
"""An iteration that took longer was none: the process was stopped, or the clock was set."""

MAX_ITERATIONS = 1e9
"""No engine makes more of them between two readings."""

MAX_STEP_TOKENS = 1e10
"""No engine computes or holds more; such a reading is broken."""

PRIOR_ITERATIONS = 2.0
"""Weight of the prior in iterations. Its level is fitted, and the rest is measured to a few per cent by each window; a
coefficient that is wrong by 5 against the others would otherwise be believed for minutes."""

WARM_ITERATIONS = 200.0
"""Iterations from which outliers are told; until then it may be the profile that is wrong. A stall does little harm
then, since relative errors are fitted."""

HALF_LIFE_ITERATIONS = 2_000.0
"""Measurements this old count half, so that a fit follows a policy whose contexts grow over a step."""

LEAST_SCALE_SHARE = 0.1
"""A coefficient that a profile puts at 0 may still be found to be something: it is taken to be uncertain by this share
of what it would be on the unknown machine."""

UNKNOWN_MACHINE = StepTime()

PLAIN_TERMS = ("base_s", "row_s", "token_s", "kv_token_s")
DRAFT_TERMS = ("draft_s", "draft_row_s", "draft_token_s")


class StepTimeFit:
    """The model of step times, from what is measured and a prior.

    A window of n iterations gives one equation, busy_s = base_s*n + row_s*rows + token_s*tokens + kv_token_s*sum(kv):
    the model is linear, so sums of iterations fit as well as single ones. Of the prior, the proportions count: its
    level is fitted, so that a machine that is slower in everything is known after one window.

    Args:
        prior: A machine's profile; None = unknown.
    """

    def __init__(self, prior: StepTime | None = None) -> None:
        self.is_calibrated = prior is not None
        self.prior = UNKNOWN_MACHINE if prior is None else prior
        own = {name: getattr(self.prior, name) for name in (*PLAIN_TERMS, *DRAFT_TERMS)}
        size = LEAST_SCALE_SHARE * self.prior.base_s / UNKNOWN_MACHINE.base_s
        least = {name: size * getattr(UNKNOWN_MACHINE, name) for name in own}
        self._plain_prior = [own[name] for name in PLAIN_TERMS]
        self._plain_scale = [max(own[name], least[name]) for name in PLAIN_TERMS]
        self._draft_prior = [own[name] for name in DRAFT_TERMS]
        self._draft_scale = [max(own[name], least[name]) for name in DRAFT_TERMS]
        self._plain = NonNegativeFit(4, half_life=HALF_LIFE_ITERATIONS, prior_observations=PRIOR_ITERATIONS)
        self._drafts = NonNegativeFit(3, half_life=HALF_LIFE_ITERATIONS, prior_observations=PRIOR_ITERATIONS)
        self._outliers = OutlierRule()
        self._value = self.prior

    @property
    def iterations(self) -> float:
        """Iterations remembered."""
        return self._plain.count

    @property
    def observations(self) -> float:
        """Effective number of windows that the fit rests on."""
        return self._plain.observations

    def r2(self) -> float | None:
        """Share of the variance of plain iterations that the model explains; None where they did not vary."""
        model = self.value()
        return self._plain.r2([getattr(model, name) for name in PLAIN_TERMS])

    def observe(
        self, iterations: int, tokens: float, kv_token_steps: float, busy_s: float, row_steps: float = 0.0
    ) -> None:
        """Take in a window, see `Window`. One that can't be, as with negative or infinite numbers, is ignored."""
        window = Window(iterations, tokens, kv_token_steps, busy_s, row_steps)
        if not window.is_telling:
            return
        seconds, expected_s = busy_s / iterations, window.predicted_s(self.value()) / iterations
        if self._plain.count >= WARM_ITERATIONS:
            seconds = self._outliers.bounded(seconds, expected_s)
        prefilled = max(0.0, tokens - row_steps)
        features = (1.0, row_steps / iterations, prefilled / iterations, kv_token_steps / iterations)
        # The greater of both: what was expected too low must not weigh more, and a stall weighs little.
        self._plain.add(iterations, features, seconds, max(seconds, expected_s))

    @property
    def has_drafts(self) -> bool:
        """Whether the cost of drafts was ever measured."""
        return self._drafts.count > 0

    def observe_drafts(self, rows: int, draft_tokens: int, extra_s: float, step_s: float) -> None:
        """Take in what drafts added to a step that was expected to take ``step_s`` with them."""
        self._drafts.add(1.0, (1.0, float(rows), float(draft_tokens)), extra_s, step_s)

    def value(self) -> StepTime:
        """The model as fitted so far; the prior before the first window."""
        if self._plain.is_due or self._drafts.is_due:
            self._value = self._solve()
        return self._value

    def _solve(self) -> StepTime:
        level = self._plain.level(self._plain_prior)
        base, row, token, kv = self._plain.solve(_times(level, self._plain_prior), _times(level, self._plain_scale))
        # What drafts cost goes with the machine's level, until some were measured.
        level *= max(LEAST_SCALE_SHARE, self._drafts.level(_times(level, self._draft_prior)))
        any_s, any_row, draft = self._drafts.solve(_times(level, self._draft_prior), _times(level, self._draft_scale))
        return StepTime(
            base_s=max(base, 1e-6), row_s=row, token_s=max(token, 1e-9), kv_token_s=kv,
            draft_s=any_s, draft_row_s=any_row, draft_token_s=draft,
        )  # fmt: skip


def _times(factor: float, values: list[float]) -> list[float]:
    return [factor * value for value in values]
