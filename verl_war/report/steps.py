"""Rollouts of the training steps: how long they took, which trajectories were last, and why."""

from __future__ import annotations

import heapq
import itertools
from array import array
from dataclasses import dataclass, field
from statistics import median

from verl_war.core.step_stats import percentile
from verl_war.report.life import STATES, Life, State

LAST = 8
"""Trajectories per step whose whole life is kept: they are its critical path."""

MUCH = 1.25
"""A trajectory has much more of something than others from this ratio on."""

WORTH_NAMING = 0.15
"""Share of a delay from which a cause of it is named."""

CLOSE = 0.05
"""A trajectory is called late if it ended after the median one by more than this share of the makespan."""


@dataclass(slots=True)
class Step:
    """One rollout: of a training step, or of a validation pass.

    Attributes:
        number: verl's global step; -1 when unknown.
        begin_s: When it was announced, or its first turn asked for.
        announced: Trajectories that were announced; 0 when they were not.
        begun, failed: Trajectories so far.
        rule: What decided where and when turns ran, by the guard's choice; empty when unknown.
        ends_s: End of each trajectory that has ended, and so on: one value for each, in the order of ending.
        generating_s: Seconds of all turns, by replica; `tokens` are those generated in them.
    """

    number: int
    validate: bool
    begin_s: float
    announced: int = 0
    begun: int = 0
    failed: int = 0
    rule: str = ""
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    turns: array[float] = field(default_factory=lambda: array("d"))
    completions: array[float] = field(default_factory=lambda: array("d"))
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    state_s: dict[State, array[float]] = field(default_factory=lambda: {state: array("d") for state in STATES})
    generating_s: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    _last: list[tuple[float, int, Life]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        """What it is called in text."""
        number = f"step {self.number}" if self.number >= 0 else "rollout"
        return f"{number} (validation)" if self.validate else number

    @property
    def ended(self) -> int:
        """Trajectories that have ended."""
        return len(self.ends_s)

    @property
    def makespan_s(self) -> float:
        """From its begin to the end of the last trajectory; 0 when none has ended."""
        return self.span_s(1.0)

    def span_s(self, share: float) -> float:
        """From its begin until this share of the trajectories had ended."""
        return max(0.0, percentile(sorted(self.ends_s), share) - self.begin_s) if self.ends_s else 0.0

    def last(self) -> list[Life]:
        """The trajectories that ended last, the very last one first."""
        return [life for _, _, life in sorted(self._last, key=lambda entry: entry[:2], reverse=True)]

    def add(self, life: Life) -> None:
        """Take in a trajectory that has ended."""
        self.failed += life.failed
        self.ends_s.append(life.end_s)
        self.starts_s.append(life.begin_s - self.begin_s)
        self.turns.append(life.turns)
        self.completions.append(life.completion_tokens)
        for state in STATES:
            self.state_s[state].append(life.seconds[state])
        for replica_id, (seconds, tokens) in life.on_replicas.items():
            self.generating_s[replica_id] = self.generating_s.get(replica_id, 0.0) + seconds
            self.tokens[replica_id] = self.tokens.get(replica_id, 0) + tokens
        heapq.heappush(self._last, (life.end_s, next(self._count), life))
        if len(self._last) > LAST:
            heapq.heappop(self._last)

    def token_s(self, replica_id: str | None = None) -> float:
        """Seconds of a turn per token generated, of one replica or of all; 0 when unknown."""
        if replica_id is not None:
            return _ratio(self.generating_s.get(replica_id, 0.0), self.tokens.get(replica_id, 0))
        return _ratio(sum(self.generating_s.values()), sum(self.tokens.values()))


def why(life: Life, step: Step) -> str:
    """A sentence on why a trajectory of a step ended when it did, against the median of all that ended."""
    late_s = life.end_s - step.begin_s - step.span_s(0.5)
    if step.ended < 2:
        return "the only trajectory"
    if late_s <= CLOSE * step.makespan_s:
        return "no later than most: the trajectories of this step end close together"
    excess = {state: life.seconds[state] - median(step.state_s[state]) for state in STATES}
    causes = [(seconds, _cause(state, seconds, life, step)) for state, seconds in excess.items()]
    begin_s = life.begin_s - step.begin_s - median(step.starts_s)
    causes.append((begin_s, f"{begin_s:.1f} s later to ask for its first turn"))
    causes.sort(key=lambda cause: -cause[0])
    named = [text for seconds, text in causes if seconds >= WORTH_NAMING * late_s]
    turns = median(step.turns)
    more = f", with {life.turns} turns against {turns:.0f}" if life.turns > MUCH * turns else ""
    return f"{late_s:.1f} s after the median trajectory{more}: {'; '.join(named) or 'a little more of everything'}"


def _cause(state: State, seconds: float, life: Life, step: Step) -> str:
    if state == "generating":
        return f"{seconds:.1f} s more in generation ({', '.join(_generation(life, step))})"
    longest = f"longest {life.longest_s[state]:.1f} s"
    if state == "held":
        return f"{seconds:.1f} s more held by admission ({_count(life.holds, 'hold')}, {longest})"
    return f"{seconds:.1f} s more between turns, in tools ({longest})"


def _generation(life: Life, step: Step) -> list[str]:
    """What made generation long."""
    reasons = []
    tokens = median(step.completions)
    if life.completion_tokens > MUCH * tokens:
        reasons.append(f"{life.completion_tokens:,} tokens against {tokens:,.0f}")
    own_s, all_s = _ratio(life.seconds["generating"], life.completion_tokens), step.token_s()
    if own_s > MUCH * all_s > 0:
        reasons.append(f"{1000 * own_s:.0f} ms a token against {1000 * all_s:.0f}")
        mostly = max(life.on_replicas, key=lambda name: life.on_replicas[name])
        slow = step.token_s(mostly) / all_s
        if slow > MUCH:
            reasons.append(f"its replica {mostly} took {slow:.1f} times as long for a token as all")
        if life.moves:
            reasons.append(f"{_count(life.moves, 'move')}, {life.computed_prompt_tokens:,} prompt tokens computed")
    return reasons or [f"{life.completion_tokens:,} tokens in {_count(life.turns, 'turn')}"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
