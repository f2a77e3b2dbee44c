"""What drafts would find in the text of simulated trajectories: runs that repeat known text, and new text between.

Whether a run can be drafted depends on who has written it before: the trajectory itself, an earlier step, or a sibling
that is ahead. The text is a function of workload and seed alone, so that all policies meet the same.
"""

from __future__ import annotations

import difflib
import math
import random
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from verl_war.core.acceptance import PROB_LEVELS
from verl_war.core.history_config import SOURCES, HistoryConfig
from verl_war.sim.trace import TrajectorySpec

CLASS_MATCHES = (1, 3, 5, 9, 17, 33)
"""Smallest match of each class of drafts, as the vLLM workers tell them apart (`integration.vllm.speculation`)."""

MIN_MATCH_TOKENS = HistoryConfig().min_match_group
"""What has matched when a draft is found at the beginning of a run."""

SURE_LEVEL = len(PROB_LEVELS) - 1
"""Level of a right draft's first token: texts of several siblings agree on it."""

ENDED = 1 << 30
"""Turns that a trajectory counts to have finished when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWorld:
    """How predictable the text is. All lengths are means of geometric distributions.

    Attributes:
        fresh_tokens: New text between two runs; its first token is sampled in the step that a draft ends in.
        run_tokens: Text that repeats known text.
        false_share: Share of the positions in new text where a draft is found all the same; it is wrong.
        overrun_tokens: What a draft is longer than the rest of its run; these tokens are wrong.
        own_share: Share of the runs that the trajectory repeats from its own text.
        earlier_share: Share of the runs that an earlier step holds. The others come from siblings.
        sibling_share: Probability that a given sibling that is ahead has a given one of those.
    """

    fresh_tokens: float
    run_tokens: float
    false_share: float
    overrun_tokens: float
    own_share: float = 0.1
    earlier_share: float = 0.3
    sibling_share: float = 0.5


ACCEPTANCE: dict[str, DraftWorld] = {
    # results/speculation/demo (entropy 0.08 nats), siblings' text known: 7.0 tokens per request and step at batch 1,
    # drafts in 58% of the steps, 0.65 of their tokens accepted; vLLM's suffix decoding, warm: 4.0.
    "peaked": DraftWorld(fresh_tokens=2.0, run_tokens=15.0, false_share=0.15, overrun_tokens=9.0),
    # Between the two: 2.8 tokens per step and request with suffix decoding, what the authors of WAR report for
    # software engineering at low load (arXiv 2607.17299).
    "mixed": DraftWorld(fresh_tokens=4.0, run_tokens=12.0, false_share=0.2, overrun_tokens=5.0),
    # results/speculation/demo_hot (entropy 6.7 nats): vLLM's suffix decoding, warm, 1.12 to 1.14 tokens per request
    # and step; WAR accepts 0.24 to 0.35 of what it drafts, in 5% to 15% of the steps.
    "hot": DraftWorld(fresh_tokens=24.0, run_tokens=4.5, false_share=0.08, overrun_tokens=4.0),
}
"""Worlds by name, fitted by hand to tokens per step that were measured on real engines. The shares of the sources are
assumed: no measurement takes one away at a time."""


def find_world(name: str) -> DraftWorld:
    """The world of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in ACCEPTANCE:
        close = difflib.get_close_matches(name, ACCEPTANCE, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"--acceptance {name!r} is unknown{hint}; expected one of {', '.join(ACCEPTANCE)}")
    return ACCEPTANCE[name]


class TurnText:
    """Drafts of one turn by position: what a look-up finds after so many tokens of the turn.

    Attributes:
        right: Tokens of a right draft that would be accepted; 0 in new text.
        needs: Siblings that must be ahead for it to be found.
        length, kind, match: Tokens of that draft, its class, and context tokens that match.
        false_length, false_kind: Of the wrong draft that is found otherwise; length 0 for none.
    """

    __slots__ = ("right", "needs", "length", "kind", "match", "false_length", "false_kind")

    def __init__(self, world: DraftWorld, rng: random.Random, tokens: int) -> None:
        zeros = bytes(4 * tokens)
        self.right, self.needs, self.length = array("i", zeros), array("i", zeros), array("i", zeros)
        self.kind, self.match = array("i", zeros), array("i", zeros)
        self.false_length, self.false_kind = array("i", zeros), array("i", zeros)
        position = 0
        while position < tokens:
            position += _geometric(rng, world.fresh_tokens)
            position = self._add_run(world, rng, position, min(tokens, position + _geometric(rng, world.run_tokens)))
        for position in range(tokens):
            if rng.random() < world.false_share:
                level = bisect_right(PROB_LEVELS, rng.random()) - 1
                self.false_kind[position] = _class_of(_source(world, rng), MIN_MATCH_TOKENS, level)
                self.false_length[position] = _geometric(rng, world.overrun_tokens)

    def _add_run(self, world: DraftWorld, rng: random.Random, begin: int, end: int) -> int:
        source = _source(world, rng)
        needs = _geometric(rng, 1.0 / world.sibling_share) if SOURCES[source] == "siblings" else 0
        overrun = _geometric(rng, world.overrun_tokens + 1.0) - 1
        for position in range(begin, end):
            self.right[position] = end - position
            self.needs[position] = needs
            self.length[position] = end - position + overrun
            self.match[position] = MIN_MATCH_TOKENS + position - begin
            self.kind[position] = _class_of(source, self.match[position], SURE_LEVEL)
        return end

    def least_iterations(self) -> int:
        """Decode iterations when every right draft is found in time and nothing else is drafted."""
        count, position, tokens = 0, 1, len(self.right)  # the first token comes with the prompt
        while position < tokens:
            position += 1 + self.right[position]
            count += 1
        return count


class TurnDrafts:
    """The text of a turn as one request sees it: with so many siblings ahead of it."""

    __slots__ = ("text", "siblings_ahead")

    def __init__(self, text: TurnText, siblings_ahead: int) -> None:
        self.text = text
        self.siblings_ahead = siblings_ahead

    def look_up(self, position: int, limit: int, per_match: float | None = None) -> tuple[int, int, int]:
        """Class (-1: none was found), length and accepted tokens of the draft of at most `limit` tokens.

        With `per_match`, drafts are at most so many times as long as what matched.
        """
        text = self.text
        right = text.right[position]
        if right and text.needs[position] <= self.siblings_ahead:
            if per_match is not None:
                limit = min(limit, int(per_match * text.match[position]))
            length = text.length[position]
            return text.kind[position], min(length, limit), min(right, limit)
        length = text.false_length[position]
        if not length:
            return -1, 0, 0
        if per_match is not None:
            limit = min(limit, int(per_match * MIN_MATCH_TOKENS))
        return text.false_kind[position], min(length, limit), 0


class DraftTexts:
    """Text of all turns of a workload, drawn when first asked for.

    Args:
        world: How predictable it is.
        trajectories: The workload; a trajectory's key is its place in it.
        seed: Seed of the text.
    """

    def __init__(self, world: DraftWorld, trajectories: Sequence[TrajectorySpec], seed: int) -> None:
        self.world = world
        self._specs = trajectories
        self._seed = seed
        self._texts: dict[tuple[int, int], TurnText] = {}

    def of(self, key: int, turn: int) -> TurnText:
        """The text of a trajectory's turn."""
        text = self._texts.get((key, turn))
        if text is None:
            rng = random.Random(f"{self._seed}/{key}/{turn}")
            tokens = self._specs[key].turns[turn].output_tokens
            text = self._texts[key, turn] = TurnText(self.world, rng, tokens)
        return text


class Siblings:
    """How far the trajectories of each group are."""

    def __init__(self, trajectories: Sequence[TrajectorySpec]) -> None:
        self._groups = [spec.group_id for spec in trajectories]
        self._turns = [len(spec.turns) for spec in trajectories]
        self._finished: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def on_turn_end(self, key: int, turn: int) -> None:
        """Trajectory `key` has finished its turn number `turn`, counted from 0."""
        is_last = turn + 1 == self._turns[key]
        self._finished[self._groups[key]][key] = ENDED if is_last else turn + 1

    def ahead(self, key: int, turn: int) -> int:
        """Siblings that have finished this turn, or all of theirs."""
        finished = self._finished[self._groups[key]]
        return sum(count > turn for sibling, count in finished.items() if sibling != key)


def _source(world: DraftWorld, rng: random.Random) -> int:
    drawn = rng.random()
    if drawn < world.own_share:
        return SOURCES.index("own")
    return SOURCES.index("earlier_steps" if drawn < world.own_share + world.earlier_share else "siblings")


def _class_of(source: int, match_tokens: int, level: int) -> int:
    """As `core.acceptance.AcceptanceTable.class_of` for a level."""
    bucket = bisect_right(CLASS_MATCHES, match_tokens) - 1
    return (source * len(CLASS_MATCHES) + bucket) * len(PROB_LEVELS) + level


def _geometric(rng: random.Random, mean: float) -> int:
    """A geometric number of this mean, at least 1."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))
