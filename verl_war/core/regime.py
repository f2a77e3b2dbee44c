"""Whether the fleet is loaded: the one place where scheduling and admission begin and cease to be in force."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_war.core.config import RegimeConfig
from verl_war.core.fleet import Fleet
from verl_war.core.types import Regime

CHECK_EVERY_TURNS = 16
REPLICAS_PER_TURN = 5
"""Turns between two looks at a fleet, and replicas for each of which that must be one more: a look adds up all of them,
0.5 ms for a thousand, and one turn in a hundred may wait for that. Ticks look, too, twice a second."""

MEMORY_TURNS = 1_000.0
"""Turns that the mean context remembers: about a step of a small run."""

UNEVEN_ENTER, UNEVEN_LEAVE = 1.6, 1.4
"""Slowness of the slowest replica over the median's from which on, and to which, a fleet with room counts as loaded:
stock verl's rule sends a slow replica as much as the others, and the step waits for it. Equal engines differ by up to
1.3, the slowest of a thousand too if they scatter by a tenth."""

MAX_DWELL_FACTOR = 16.0
"""The dwell is doubled up to this when the fleet is loaded again within a dwell of having left that: a load that
alternates faster than the dwell is a loaded one."""


@dataclass(frozen=True, slots=True)
class RegimeChange:
    """A change of the fleet's regime and the load that caused it, for the log."""

    old: Regime
    new: Regime
    cause: str


class FleetLoad:
    """Measures how much of the KV the contexts need, and turns it into a regime with hysteresis and a minimum dwell.

    `low`: turns go where stock verl sends them, and nothing is held. `high`: contexts may not fit. The load is the
    largest of three shares of the trusted KV, or of what engines say they have if that is less:

    * what the contexts of all admitted conversations need;
    * what those of the fullest replica need there: without balance one replica thrashes while others idle;
    * what all conversations need that live or are announced, taken for as long as the mean context of a turn. It says
      before a step's first turn what its middle will be like, when some have ended and others are half grown.

    A fleet whose replicas differ in speed counts as loaded too.
    """

    def __init__(self, config: RegimeConfig, fleet: Fleet) -> None:
        self.regime: Regime = "low" if config.enter_kv_share > 0 else "high"
        self.changes = 0
        self.load_peak = 0.0
        self.was_high = self.regime == "high"
        """Whether it was loaded at any time of the step."""
        self._config = config
        self._fleet = fleet
        self._changed_s = -math.inf
        self._dwell_s = config.dwell_s
        self._turns_unseen = 0
        self._turns = 0.0
        self._mean_context_tokens = 0.0
        self._unbegun = 0
        self._unevenness = 1.0

    def on_step_begin(self, num_trajectories: int) -> None:
        """So many trajectories are about to start."""
        self._unbegun = num_trajectories

    def on_step_end(self) -> None:
        """Nothing more is announced."""
        self._unbegun = 0
        self.was_high = self.regime == "high"

    def on_turn(self, prompt_tokens: int, is_first: bool) -> None:
        """A conversation asks for a turn with a context of this length; its first one if `is_first`."""
        self._unbegun -= is_first and self._unbegun > 0
        self._turns_unseen += 1
        self._turns = min(self._turns + 1, MEMORY_TURNS)
        self._mean_context_tokens += (prompt_tokens - self._mean_context_tokens) / self._turns

    def is_due(self) -> bool:
        """Whether a turn that is about to be placed should look at the load first."""
        size = self._fleet.pool_size
        return self._turns_unseen >= max(min(CHECK_EVERY_TURNS, size), size // REPLICAS_PER_TURN)

    def update(self, is_holding: bool, now_s: float) -> RegimeChange | None:
        """Look at the load; returns the change of the regime, if there is one.

        Args:
            is_holding: Whether conversations wait for admission; a fleet that holds some is loaded.
            now_s: Time of the caller. If it goes back, the next change may be late.
        """
        self._turns_unseen = 0
        shares = self._shares()
        load = max(shares)
        self.load_peak = max(self.load_peak, load)
        config = self._config
        unevenness = self._unevenness
        if self.regime == "low":
            # Whatever the dwell: to leave a loaded fleet to itself costs more than to change back soon.
            if load < config.enter_kv_share and unevenness < UNEVEN_ENTER:
                return None
            is_again = now_s - self._changed_s < self._dwell_s
            longest_s = MAX_DWELL_FACTOR * config.dwell_s
            self._dwell_s = min(2 * self._dwell_s, longest_s) if is_again else config.dwell_s
            return self._enter("high", shares, unevenness, now_s)
        if is_holding or load >= config.leave_kv_share or unevenness > UNEVEN_LEAVE:
            return None
        return self._enter("low", shares, unevenness, now_s) if now_s - self._changed_s >= self._dwell_s else None

    def take_counts(self) -> tuple[int, float]:
        """Changes of the regime and the highest load since the last call."""
        counts = self.changes, self.load_peak
        self.changes, self.load_peak = 0, 0.0
        return counts

    def _enter(self, new: Regime, shares: tuple[float, float, float], unevenness: float, now_s: float) -> RegimeChange:
        old, self.regime = self.regime, new
        self.changes += 1
        self._changed_s = now_s
        self.was_high |= new == "high"
        needs = "contexts need {:.2f} of the KV, {:.2f} on the fullest replica, {:.2f} expected".format(*shares)
        return RegimeChange(old, new, f"{needs}; slowest replica {unevenness:.1f} times the median's time")

    def look_at_speed(self) -> None:
        """See how much slower than the others the slowest replica is; not at every turn, for it sorts them."""
        paces = sorted(replica.pace.slowness for replica in self._fleet.pool())
        self._unevenness = paces[-1] / max(paces[(len(paces) - 1) // 2], 1e-9) if paces else 1.0

    def _shares(self) -> tuple[float, float, float]:
        """Needs of all admitted conversations, of the fullest replica's, and of all that are expected."""
        needed = trusted = fullest = 0.0
        least_tokens = self._fleet.least_capacity_tokens  # infinite before any engine has reported
        for replica in self._fleet.replicas.values():
            if not replica.in_pool:
                continue
            tokens = min(replica.trusted_tokens, replica.capacity_tokens or least_tokens)
            needed += replica.working_set_tokens
            trusted += tokens
            fullest = max(fullest, replica.working_set_tokens / tokens)
        if not trusted or trusted == math.inf:
            return 0.0, 0.0, 0.0
        expected = (len(self._fleet.conversations) + self._unbegun) * self._mean_context_tokens
        return needed / trusted, fullest, expected / trusted
