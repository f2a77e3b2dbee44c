"""What makes a replica's seconds differ from the model's: how slow it is, and how many tokens an iteration yields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_war.core.step_time import StepTime, Window
from verl_war.core.types import ReplicaSnapshot

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

IDLE_HALF_LIFE_S = 30.0
"""Time over which what was known of a replica's speed fades while its engine has no work: one that was slow and is
avoided would otherwise never show that it has recovered."""

SLOWNESS_WINDOWS = 3
"""Of so many windows the median counts: a stall is in one of them, and a replica that is slow is so in all."""


@dataclass(slots=True)
class ReplicaPace:
    """How slow a replica is against the fleet's model: measured over modelled seconds, 1 = as modelled."""

    slowness: float = 1.0
    _ratios: list[float] = field(default_factory=lambda: [1.0] * (SLOWNESS_WINDOWS - 1))
    _last: ReplicaSnapshot | None = None
    _last_s: float = -math.inf
    _waited_s: float = 0.0
    """Since the snapshot before the last one."""

    def window(self, snapshot: ReplicaSnapshot, now_s: float) -> Window | None:
        """What the engine did since the last snapshot.

        None for the first one, and after the engine restarted or the clock went back.
        """
        last, self._last = self._last, snapshot
        is_later = now_s > self._last_s
        self._waited_s = now_s - self._last_s
        self._last_s = now_s
        if last is None or not is_later or snapshot.engine_steps < last.engine_steps:
            return None
        return Window(
            iterations=snapshot.engine_steps - last.engine_steps,
            tokens=snapshot.computed_tokens - last.computed_tokens,
            kv_token_steps=snapshot.kv_token_steps - last.kv_token_steps,
            busy_s=snapshot.busy_s - last.busy_s,
            row_steps=snapshot.row_steps - last.row_steps,
        )

    def update(self, window: Window, model: StepTime) -> None:
        """Compare a window with the fleet's model. One that can't be is ignored, one without work forgets a little."""
        if window.iterations == 0:
            self.slowness = 1.0 + (self.slowness - 1.0) * 0.5 ** (self._waited_s / IDLE_HALF_LIFE_S)
        if not window.is_telling:
            return
        self._ratios = [*self._ratios[1 - SLOWNESS_WINDOWS :], window.busy_s / window.predicted_s(model)]
        keep = 0.5 ** (window.busy_s / SLOWNESS_HALF_LIFE_S)
        self.slowness = self.slowness * keep + sorted(self._ratios)[SLOWNESS_WINDOWS // 2] * (1 - keep)
