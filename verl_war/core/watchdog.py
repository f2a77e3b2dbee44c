"""Switches speculation off when it was measured only to cost, whatever the planner believes of it."""

from __future__ import annotations

import math

from verl_war.core.least_squares import OUTLIER_RATIO
from verl_war.core.speculation_limits import SpeculationLimits

LEDGER_MEMORY_STEPS = 512.0
"""Drafting steps whose savings are remembered: some ten seconds of decoding."""

LEDGER_MIN_STEPS = 64.0
"""Drafting steps that must have been measured before they say something."""

LEDGER_MIN_LOSS = 0.01
"""Share of the time that must be lost: plain steps, against which savings are counted, are not known better."""

LEDGER_SIGMAS = 2.0
"""Standard errors by which the mean saving must be below that."""


class Watchdog:
    """Stops speculation for a while when drafts are hardly ever accepted, make steps longer than they save, or when
    nothing is heard of them. It knows nothing of prices and predictions, and so catches what is wrong in them."""

    def __init__(self) -> None:
        self.reason = ""
        self.trips = 0
        self._drafted = 0.0
        self._accepted = 0.0
        self._unheard = 0
        self._ledger = _SavingLedger()
        self._until_s = -math.inf

    def handed_out(self, tokens: int) -> None:
        """Count draft tokens given to the engine and not heard of yet."""
        self._unheard += tokens

    def verified(self, drafted: int, accepted: int, limits: SpeculationLimits) -> None:
        """Count draft tokens that the engine verified."""
        self._unheard = 0
        keep = max(0.0, 1.0 - drafted / (2.0 * limits.watchdog_min_tokens))
        self._drafted = self._drafted * keep + drafted
        self._accepted = self._accepted * keep + accepted

    def timed(self, seconds: float, plain_s: float) -> None:
        """Count a step with drafts that took `seconds`; its tokens take `plain_s` without drafts, as measured."""
        seconds = min(seconds, OUTLIER_RATIO * plain_s)  # a pause of the process is not the drafts' fault
        self._ledger.add(plain_s - seconds, seconds)

    def blocks(self, limits: SpeculationLimits, now_s: float) -> bool:
        """Whether speculation has to stay off now. Sets `reason` when it trips and clears it when it lets go."""
        if self.reason:
            if now_s < self._until_s:
                return True
            self.reason = ""
            self._drafted = self._accepted = 0.0
            self._unheard = 0
            self._ledger = _SavingLedger()
        reason = self._find_reason(limits)
        if reason:
            self.reason = reason
            self._until_s = now_s + limits.watchdog_retry_s * 2 ** min(self.trips, 4)
            self.trips += 1
        return bool(self.reason)

    def _find_reason(self, limits: SpeculationLimits) -> str:
        if self._unheard >= limits.watchdog_min_tokens:
            return f"{self._unheard} draft tokens were handed out and none came back verified"
        if self._drafted >= limits.watchdog_min_tokens and (
            self._accepted < limits.watchdog_acceptance * self._drafted
        ):
            return (
                f"{self._accepted / self._drafted:.4f} of the last {self._drafted:.0f} draft tokens were accepted, "
                f"fewer than watchdog_acceptance={limits.watchdog_acceptance}"
            )
        if self._ledger.is_losing:
            return (
                f"the last {self._ledger.steps:.0f} steps with drafts took {-self._ledger.saved_share:.1%} longer than "
                "their tokens without"
            )
        return ""


class _SavingLedger:
    """Mean and spread of what each drafting step saved, in seconds, with exponential forgetting."""

    def __init__(self) -> None:
        self.steps = 0.0
        self._seconds = 0.0
        self._saved_s = 0.0
        self._squares = 0.0

    def add(self, saved_s: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / LEDGER_MEMORY_STEPS
        self.steps = self.steps * keep + 1.0
        self._seconds = self._seconds * keep + seconds
        self._saved_s = self._saved_s * keep + saved_s
        self._squares = self._squares * keep + saved_s * saved_s

    @property
    def saved_share(self) -> float:
        """Saved over spent time."""
        return self._saved_s / self._seconds

    @property
    def is_losing(self) -> bool:
        """Whether the mean saving is negative beyond its standard error, and not by a trifle."""
        if self.steps < LEDGER_MIN_STEPS:
            return False
        mean = self._saved_s / self.steps
        error = math.sqrt(max(0.0, self._squares / self.steps - mean * mean) / self.steps)
        return mean + LEDGER_SIGMAS * error < -LEDGER_MIN_LOSS * self._seconds / self.steps
