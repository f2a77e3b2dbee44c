"""How much of a trajectory is still to come, from its siblings and from trajectories that ended before."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

GROUPS_KEPT = 100_000
"""Groups remembered; the least recently seen is forgotten first."""

PRIOR_TURNS = 8.0
"""Typical turns of a trajectory before any has ended."""

PRIOR_GROUP_SIGMA = 0.5
PRIOR_SIBLING_SIGMA = 0.5
"""Spread of log(turns) between prompts and within one, before it was measured: agentic rollouts are about as
heavy-tailed as a lognormal of sigma 0.7, half of whose variance is the prompt's (Seer, arXiv 2511.14617, section 4,
reports similar lengths within a group)."""

PRIOR_WEIGHT = 8.0
"""Trajectories that the priors count for."""

HALF_LIFE_TRAJECTORIES = 2_000.0
"""Trajectories after which an observation counts half: the policy changes from step to step."""

PRIOR_GROWTH_TOKENS = 512.0
"""Tokens by which a turn lengthens the context before any turn was seen: an answer and a tool's output."""

PRIOR_OUTPUT_TOKENS = 256.0
"""Generated tokens of a turn before any was seen."""

SMOOTHING = 0.02
"""Share of the newest turn in the mean growth and output of a turn: about the last hundred turns count."""

PRIOR_MEAN_TURNS = 2.0
"""Turns that the prior growth and output count for: contexts of other runs may be ten times as long."""


@dataclass(slots=True)
class _RunningMean:
    """Mean of what was observed with a prior, from `SMOOTHING` on a moving one."""

    value: float
    count: float = PRIOR_MEAN_TURNS

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(SMOOTHING, 1 / self.count) * (value - self.value)


MIN_SIGMA = 0.05
"""Keeps the formulas finite where all trajectories have the same length."""


@dataclass(slots=True)
class _Group:
    finished: int = 0
    log_sum: float = 0.0
    longest_live: int = 0


@dataclass(slots=True)
class _Spread:
    """Mean and variances of log(turns), with forgetting."""

    weight: float = PRIOR_WEIGHT
    mean: float = math.log(PRIOR_TURNS)
    variance: float = PRIOR_GROUP_SIGMA**2 + PRIOR_SIBLING_SIGMA**2
    within_weight: float = PRIOR_WEIGHT
    within_variance: float = PRIOR_SIBLING_SIGMA**2

    def observe(self, log_turns: float, sibling_mean: float | None, siblings: int) -> None:
        keep = 0.5 ** (1 / HALF_LIFE_TRAJECTORIES)
        self.weight = self.weight * keep + 1
        delta = log_turns - self.mean
        self.mean += delta / self.weight
        self.variance += (delta * (log_turns - self.mean) - self.variance) / self.weight
        if sibling_mean is not None:
            # The variance of x - mean of n others is (1 + 1/n) times that of x.
            square = (log_turns - sibling_mean) ** 2 * siblings / (siblings + 1)
            self.within_weight = self.within_weight * keep + 1
            self.within_variance += (square - self.within_variance) / self.within_weight

    def parts(self) -> tuple[float, float]:
        """Variances of a prompt's mean and of a sibling around it."""
        within = min(max(self.within_variance, MIN_SIGMA**2), max(self.variance, MIN_SIGMA**2))
        return max(self.variance - within, MIN_SIGMA**2), within


@dataclass(slots=True)
class Progress:
    """Running estimates; every method takes O(1).

    Turns of a trajectory are taken for lognormal around a mean that siblings share, which itself is spread around
    the fleet's. Finished siblings move the estimate of their prompt's mean by the usual shrinkage of a hierarchical
    normal model; a sibling that is still running is a lower bound of its own length, and counts once it exceeds what
    was expected. The remaining turns are the mean of that lognormal beyond the turns done.
    """

    is_estimating: bool = True
    """False: every trajectory is expected to go on for `PRIOR_TURNS`, whatever was seen."""
    _growth_tokens: _RunningMean = field(default_factory=lambda: _RunningMean(PRIOR_GROWTH_TOKENS))
    _output_tokens: _RunningMean = field(default_factory=lambda: _RunningMean(PRIOR_OUTPUT_TOKENS))
    _spread: _Spread = field(default_factory=_Spread)
    _groups: OrderedDict[str, _Group] = field(default_factory=OrderedDict)

    @property
    def growth_tokens(self) -> float:
        """Mean tokens by which a turn lengthens the context."""
        return self._growth_tokens.value

    @property
    def output_tokens(self) -> float:
        """Mean tokens that a turn generates."""
        return self._output_tokens.value

    def on_turn_growth(self, grown_tokens: int) -> None:
        """A turn's context is this much longer than the one before. A context that shrank was rewritten: ignored."""
        if grown_tokens > 0:
            self._growth_tokens.observe(grown_tokens)

    def on_turn_output(self, completion_tokens: int) -> None:
        """A turn generated this many tokens."""
        self._output_tokens.observe(completion_tokens)

    def on_turn(self, group_id: str, turns_begun: int) -> None:
        """A trajectory of the group asks for its turn number `turns_begun`."""
        if group_id:
            group = self._group(group_id)
            group.longest_live = max(group.longest_live, turns_begun)

    def on_trajectory_end(self, group_id: str, turns: int) -> None:
        """A trajectory of this group ended well after so many turns."""
        log_turns = math.log(max(1, turns))
        group = self._group(group_id) if group_id else _Group()
        sibling_mean = group.log_sum / group.finished if group.finished else None
        self._spread.observe(log_turns, sibling_mean, group.finished)
        group.finished += 1
        group.log_sum += log_turns

    def remaining_turns(self, group_id: str, turns_done: int) -> float:
        """Expected further turns of a trajectory that has done `turns_done`; at least 1, the one it asks for."""
        if not self.is_estimating:
            return PRIOR_TURNS
        between, within = self._spread.parts()
        mean, variance = self._spread.mean, between + within
        group = self._groups.get(group_id)
        if group is not None:
            total, count = group.log_sum, float(group.finished)
            if group.longest_live > math.exp(mean):
                total, count = total + math.log(group.longest_live), count + 1
            shrinkage = count * between / (count * between + within)
            if count:
                mean += shrinkage * (total / count - mean)
            variance = within + between * (1 - shrinkage)
        return max(1.0, _lognormal_mean_above(mean, math.sqrt(variance), turns_done) - turns_done)

    def _group(self, group_id: str) -> _Group:
        group = self._groups.setdefault(group_id, _Group())
        self._groups.move_to_end(group_id)
        if len(self._groups) > GROUPS_KEPT:
            self._groups.popitem(last=False)
        return group


def _lognormal_mean_above(mean: float, sigma: float, bound: float) -> float:
    """Mean of a lognormal variable given that it exceeds `bound`.

    Source: E[X | X > k] = exp(m + s^2/2) Q((ln k - m - s^2)/s) / Q((ln k - m)/s), with Q the normal tail; far out,
    where both tails vanish, Mills' ratio gives k (1 + s^2 / (ln k - m)).
    """
    plain = math.exp(mean + sigma * sigma / 2)
    if bound <= 0:
        return plain
    z = (math.log(bound) - mean) / sigma
    if z > 5:
        return bound * (1 + sigma / z)
    return plain * math.erfc((z - sigma) / math.sqrt(2)) / math.erfc(z / math.sqrt(2))
