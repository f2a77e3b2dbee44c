"""How much of a trajectory is still to come, from its siblings and from trajectories that ended before."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from dataclasses import dataclass, field

FINISHED_KEPT = 512
"""Trajectories whose number of turns is remembered: several steps of a small run, one of a large one."""

GROUPS_KEPT = 100_000
"""Groups remembered; the least recently seen is forgotten first."""

PRIOR_TURNS = 8.0
"""Turns of a trajectory before any has ended."""

PRIOR_GROWTH_TOKENS = 512.0
"""Tokens by which a turn lengthens the context before any turn was seen: an answer and a tool's output."""

PRIOR_OUTPUT_TOKENS = 256.0
"""Generated tokens of a turn before any was seen."""

SMOOTHING = 0.02
"""Share of the newest turn in the mean growth and output of a turn: about the last hundred turns count."""

SIBLING_WEIGHT = 2.0
"""Finished siblings that weigh as much as everything known of other prompts.

Siblings of one prompt need similar numbers of turns (Seer, arXiv 2511.14617, section 4), so two of them say
more than the rest of the fleet.
"""


@dataclass(slots=True)
class _Group:
    finished: int = 0
    finished_turns: int = 0


@dataclass(slots=True)
class Progress:
    """Running estimates. All methods take O(log n) of what is remembered."""

    growth_tokens: float = PRIOR_GROWTH_TOKENS
    output_tokens: float = PRIOR_OUTPUT_TOKENS
    _recent: deque[int] = field(default_factory=deque)
    _sorted: list[int] = field(default_factory=list)
    _tail_sums: list[int] | None = None
    _groups: OrderedDict[str, _Group] = field(default_factory=OrderedDict)

    def on_turn_growth(self, grown_tokens: int) -> None:
        """A turn's context is this much longer than the one before. A context that shrank was rewritten: ignored."""
        if grown_tokens > 0:
            self.growth_tokens += SMOOTHING * (grown_tokens - self.growth_tokens)

    def on_turn_output(self, completion_tokens: int) -> None:
        """A turn generated this many tokens."""
        self.output_tokens += SMOOTHING * (completion_tokens - self.output_tokens)

    def on_trajectory_end(self, group_id: str, turns: int) -> None:
        """A trajectory of this group ended well after so many turns."""
        self._recent.append(turns)
        bisect.insort(self._sorted, turns)
        if len(self._recent) > FINISHED_KEPT:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._recent.popleft()))
        self._tail_sums = None
        if group_id:
            group = self._groups.setdefault(group_id, _Group())
            self._groups.move_to_end(group_id)
            group.finished += 1
            group.finished_turns += turns
            if len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)

    def remaining_turns(self, group_id: str, turns_done: int) -> float:
        """Expected further turns of a trajectory that has done `turns_done`; at least 1, the one it asks for."""
        fleet = self._mean_excess(turns_done)
        group = self._groups.get(group_id)
        if group is None or not group.finished:
            return max(1.0, fleet)
        siblings = group.finished_turns / group.finished - turns_done
        # A trajectory that outlived its finished siblings is in the tail: only the fleet knows about that.
        expected = siblings if siblings > 0 else fleet
        weight = group.finished / (group.finished + SIBLING_WEIGHT)
        return max(1.0, weight * expected + (1 - weight) * fleet)

    def _mean_excess(self, turns_done: int) -> float:
        """Mean of (turns - turns_done) over remembered trajectories that had more turns."""
        longer_from = bisect.bisect_right(self._sorted, turns_done)
        count = len(self._sorted) - longer_from
        if count == 0:
            # Nothing lived that long, or nothing is known: as many again as it has done, the heavy tail's answer.
            return max(PRIOR_TURNS - turns_done, float(turns_done), 1.0) if not self._sorted else max(1.0, turns_done)
        if self._tail_sums is None:
            self._tail_sums = [0]
            for turns in reversed(self._sorted):
                self._tail_sums.append(self._tail_sums[-1] + turns)
        return self._tail_sums[count] / count - turns_done
