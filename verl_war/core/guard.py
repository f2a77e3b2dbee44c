"""Whether scheduling and admission are faster than stock verl: measured on the very run that they serve."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from verl_war.core.config import GuardConfig

FORGETTING = 0.9
"""Weight that evidence keeps with every newer trial: policies and their contexts change over training."""

PRIOR_DEVIATION = 0.1
PRIOR_TRIALS = 4.0
"""Standard deviation of a trial's log ratio before there are any, and the trials that this counts for: steps differ in
their trajectories, and two trials that happen to agree prove little."""

STEPS_KEPT = 32
"""Differences between neighbouring steps that tell how much steps scatter by themselves."""

SIGMAS = 2.0
"""Standard errors by which the controls must lose before they are switched off."""


@dataclass(frozen=True, slots=True)
class GuardChange:
    """The controls were switched off or on again, and why, for the log."""

    old: str
    new: str
    cause: str


class ControlGuard:
    """Compares whole training steps with the controls in force and without them, in pairs.

    Now and then one loaded step is decided by the other rule (a trial: stock verl's while the controls are on), and its
    seconds per generated token are compared with those of the steps before and after it. Nothing is modelled. What it
    costs is bounded: a trial loses what the controls gain, in one of `first_trial_steps` loaded steps at first, and in
    half as many after every trial that they won clearly. A step counts only if no trajectory lived when it began, as in
    synchronous training; asynchronous trainers have no steps to compare, and get no trials.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self.is_losing = False
        self.in_force = True
        self.trials = 0
        self._interval_steps = config.first_trial_steps
        self._steps_since_trial = 0
        self._is_trial = False
        self._was_trial = False
        self._begin_s: float | None = None
        self._last_end_s = 0.0
        self._tokens = 0
        self._before: float | None = None
        self._trial: float | None = None
        self._weight = self._sum = self._squares = 0.0
        self._differences: deque[float] = deque(maxlen=STEPS_KEPT)

    @property
    def speedup(self) -> float:
        """Stock verl's seconds per token over those with the controls, geometric mean of the trials; 1 before one."""
        return math.exp(self._sum / self._weight) if self._weight else 1.0

    @property
    def was_trial(self) -> bool:
        """Whether the last step that ended was decided by the other rule."""
        return self._was_trial

    def on_step_begin(self, is_idle: bool, now_s: float) -> None:
        """A rollout begins; `is_idle` when no trajectory lives."""
        self._begin_s = now_s if is_idle else None
        self._tokens = 0
        self.in_force = self.is_losing == (self._is_trial and is_idle)

    def on_turn_end(self, completion_tokens: int) -> None:
        """A training turn returned."""
        self._tokens += completion_tokens

    def on_trajectory_end(self, now_s: float) -> None:
        """A training trajectory ended."""
        self._last_end_s = now_s

    def on_step_end(self, was_loaded: bool) -> GuardChange | None:
        """All trajectories of the step have ended; `was_loaded` when the controls would have decided in it."""
        begin_s, self._begin_s = self._begin_s, None
        self._was_trial = False
        if begin_s is None or not self._config.enabled or not self._tokens or self._last_end_s <= begin_s:
            return None
        was_trial, self._is_trial = self._is_trial, False
        if not was_loaded:
            self._before = self._trial = None  # other work: not to be compared with what comes
            return None
        self._was_trial = was_trial
        value = math.log((self._last_end_s - begin_s) / self._tokens)
        if was_trial:
            self._trial = value
            return None
        change = None
        if self._trial is not None and self._before is not None:
            change = self._on_pair(self._trial - (self._before + value) / 2)
        elif self._before is not None:
            self._differences.append(abs(value - self._before))
        self._before, self._trial = value, None
        self._steps_since_trial += 1
        if self._steps_since_trial >= self._interval_steps:
            self._is_trial, self._steps_since_trial = True, 0
        return change

    def _trial_variance(self, mean: float) -> float:
        """Variance of a trial's log ratio: as the trials scatter, but no less than the steps without trials tell.

        Of steps of deviation s, neighbours differ by 2^0.5 s, in the median by 0.6745 times that, and a step from the
        mean of its neighbours by 1.5^0.5 s.
        """
        squares = self._squares - self._weight * mean * mean + PRIOR_TRIALS * PRIOR_DEVIATION**2
        of_trials = max(0.0, squares) / (self._weight + PRIOR_TRIALS)
        typical = median(self._differences) if self._differences else 0.0
        return max(of_trials, 1.5 * (typical / 0.6745) ** 2 / 2)

    def _on_pair(self, trial_over_usual: float) -> GuardChange | None:
        """Take in a trial's log ratio to its neighbours."""
        self.trials += 1
        gain = -trial_over_usual if self.is_losing else trial_over_usual
        self._weight = self._weight * FORGETTING + 1.0
        self._sum = self._sum * FORGETTING + gain
        self._squares = self._squares * FORGETTING + gain * gain
        mean = self._sum / self._weight
        margin = SIGMAS * math.sqrt(self._trial_variance(mean) / self._weight)
        is_clear = abs(mean) > margin
        self._interval_steps = (
            min(2 * self._interval_steps, self._config.max_trial_steps) if is_clear else self._config.first_trial_steps
        )
        # Once off, they come back when they are no longer slower; the next trials tell.
        is_losing = mean < 0 if self.is_losing else mean < -margin
        if is_losing == self.is_losing:
            return None
        names = ("on", "off") if is_losing else ("off", "on")
        self.is_losing = is_losing
        self._before, self._interval_steps = None, self._config.first_trial_steps
        cause = f"stock verl's rule took {math.exp(mean):.2f} times as long per token, +-{margin:.2f}, in {self.trials}"
        return GuardChange(*names, f"{cause} trials")
