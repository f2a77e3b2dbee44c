"""Seconds of engine work: the one unit in which placements, moves and holds are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_war.core.types import ReplicaSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one engine iteration as a linear function of what it does.

    Attributes:
        base_s: Of an iteration, whatever it computes: reading the weights, launching kernels.
        token_s: Of each token computed, prefill and decode alike.
        kv_token_s: Of each token of KV cache in use, which decoding reads.

    Source: the linear form is DAS's (arXiv 2511.13841, step time) with a term for the KV that attention reads.
    """

    base_s: float = 0.010
    token_s: float = 50e-6
    kv_token_s: float = 50e-9

    def step_s(self, tokens: float, kv_tokens: float) -> float:
        """Seconds of an iteration that computes `tokens` with `kv_tokens` in use."""
        return self.base_s + self.token_s * tokens + self.kv_token_s * kv_tokens

    def prefill_s(self, tokens: float) -> float:
        """Seconds that prefilling `tokens` takes from everything else on the replica."""
        return self.token_s * tokens


PRIOR_ITERATIONS = 20.0
"""Weight of the prior in iterations: about a second of decoding outweighs a wrong profile."""

HALF_LIFE_ITERATIONS = 2_000.0
"""Measurements this old count half, so that a fit follows a policy whose contexts grow over a step."""

REFIT_SHARE = 0.01
"""New iterations, as a share of those remembered, from which the fit is solved again. Solving takes 200 us,
and many replicas report."""

OUTLIER_RATIO = 5.0
"""A window this many times slower or faster than the fit counts as if at that bound: weight updates and
first-time compilation stall an engine without telling anything of its iterations."""


@dataclass(slots=True)
class StepTimeFit:
    """Non-negative least squares of measured windows, with forgetting and a prior.

    A window of n iterations gives one equation, busy_s = base_s*n + token_s*tokens + kv_token_s*sum(kv): the
    model is linear, so sums of iterations fit as well as single ones. Each equation is divided by n, and
    weighted by n.
    """

    prior: StepTime = field(default_factory=StepTime)
    iterations: float = 0.0
    _normal: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _target: list[float] = field(default_factory=lambda: [0.0] * 3)
    _fitted: StepTime | None = None
    _unfitted: float = 0.0

    def observe(self, iterations: int, tokens: float, kv_token_steps: float, busy_s: float) -> None:
        """Take in a window. Windows without iterations, or whose time is not a positive number, are ignored."""
        if iterations <= 0 or not (0 < busy_s < math.inf):
            return
        row = (1.0, tokens / iterations, kv_token_steps / iterations)
        seconds = busy_s / iterations
        if self.iterations > PRIOR_ITERATIONS:
            expected = self.value().step_s(row[1], row[2])
            seconds = min(max(seconds, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)
        keep = 0.5 ** (iterations / HALF_LIFE_ITERATIONS)
        self.iterations = self.iterations * keep + iterations
        for i in range(3):
            self._target[i] = self._target[i] * keep + iterations * row[i] * seconds
            for j in range(3):
                self._normal[i][j] = self._normal[i][j] * keep + iterations * row[i] * row[j]
        self._unfitted += iterations
        if self._unfitted >= REFIT_SHARE * self.iterations:
            self._fitted = None

    def value(self) -> StepTime:
        """The model as fitted so far; the prior before the first window."""
        if self._fitted is None:
            self._fitted = self._solve() if self.iterations else self.prior
            self._unfitted = 0.0
        return self._fitted

    def _solve(self) -> StepTime:
        """Coordinate descent over the three coefficients, scaled so that the prior is all ones."""
        scale = (self.prior.base_s, self.prior.token_s, self.prior.kv_token_s)
        normal = [[self._normal[i][j] * scale[i] * scale[j] for j in range(3)] for i in range(3)]
        target = [self._target[i] * scale[i] for i in range(3)]
        typical_s = sum(target) / self.iterations
        # The prior pulls each coefficient towards the profile's, in proportion to how little was measured.
        pull = PRIOR_ITERATIONS * typical_s**2 / 9 * min(1.0, PRIOR_ITERATIONS / self.iterations)
        solution = [1.0, 1.0, 1.0]
        for _ in range(50):
            for i in range(3):
                rest = target[i] - sum(normal[i][j] * solution[j] for j in range(3) if j != i)
                if normal[i][i] + pull > 0:
                    solution[i] = max(0.0, (rest + pull) / (normal[i][i] + pull))
        base_s, token_s, kv_token_s = (solution[i] * scale[i] for i in range(3))
        return StepTime(base_s=max(base_s, 1e-6), token_s=max(token_s, 1e-9), kv_token_s=kv_token_s)


YIELD_WINDOW_TOKENS = 512
"""Generated tokens from which accepted drafts over them say something; a few turns of one replica."""

YIELD_SMOOTHING = 0.5
"""Weight of the newest window: acceptance changes with the batch within seconds."""


@dataclass(slots=True)
class DraftYield:
    """Tokens that a request gets per engine iteration: 1 without drafts.

    Of n tokens that requests were given, those accepted from drafts took no iteration of their own.
    """

    tokens_per_iteration: float = 1.0
    _generated: int = 0
    _accepted: int | None = None
    """Accepted tokens at the last window's end; None before the first reading."""

    def on_turn_end(self, completion_tokens: int) -> None:
        """A turn of the replica returned so many tokens."""
        self._generated += completion_tokens

    def on_reading(self, accepted_tokens: int) -> None:
        """The engine has accepted so many draft tokens since it started; one that was restarted counts from zero."""
        if self._accepted is None or accepted_tokens < self._accepted:
            self._accepted, self._generated = accepted_tokens, 0
        if self._generated < YIELD_WINDOW_TOKENS:
            return
        # Turns are counted at their end and drafts at once, so that a window may seem to accept more than it gave.
        share = min(accepted_tokens - self._accepted, 0.95 * self._generated) / self._generated
        self.tokens_per_iteration += YIELD_SMOOTHING * (1 / (1 - share) - self.tokens_per_iteration)
        self._accepted, self._generated = accepted_tokens, 0


SLOWNESS_HALF_LIFE_S = 2.0
"""Time over which a replica's observed speed replaces what was known of it."""


@dataclass(slots=True)
class ReplicaPace:
    """How slow a replica is against the fleet's model: measured over modelled seconds, 1 = as modelled."""

    slowness: float = 1.0
    _last: ReplicaSnapshot | None = None
    _last_s: float = -math.inf

    def window(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[int, int, float, float] | None:
        """Iterations, tokens, KV token steps and busy seconds since the last snapshot.

        None for the first one, and after the engine restarted or the clock went back.
        """
        last, self._last = self._last, snapshot
        is_later = now_s > self._last_s
        self._last_s = now_s
        if last is None or not is_later or snapshot.engine_steps < last.engine_steps:
            return None
        return (
            snapshot.engine_steps - last.engine_steps,
            snapshot.computed_tokens - last.computed_tokens,
            snapshot.kv_token_steps - last.kv_token_steps,
            snapshot.busy_s - last.busy_s,
        )

    def update(self, window: tuple[int, int, float, float], model: StepTime) -> None:
        """Compare a window with the fleet's model."""
        iterations, tokens, kv_token_steps, busy_s = window
        if iterations <= 0 or busy_s <= 0 or tokens < 0:
            return
        modelled_s = iterations * model.step_s(tokens / iterations, kv_token_steps / iterations)
        ratio = min(max(busy_s / modelled_s, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
        keep = 0.5 ** (busy_s / SLOWNESS_HALF_LIFE_S)
        self.slowness = self.slowness * keep + ratio * (1 - keep)
