"""How many draft tokens are accepted, by source, match length and the index's own estimate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROB_LEVELS = (0.0, 0.35, 0.75)
"""Lower bounds of the levels of the estimated probability of a draft's first token."""

FIRST_MEMORY_DRAFTS = 60.0
LATER_MEMORY_TOKENS = 200.0
"""Drafts, and verified positions behind the first, that a class remembers: a collapse is noticed within 200 drafts, and
a probability near 0.5 is known to 6% and 4%."""

_KEEP_FIRST = 1.0 - 1.0 / FIRST_MEMORY_DRAFTS

PRIOR_TOKENS = 6.0
"""Weight of the prior, in verified positions; it is forgotten like measurements are."""

MIX_MEMORY_ROWS = 256.0
"""Look-ups that the mix of classes remembers."""

MAX_LATER = 0.995
"""Highest rate that is believed; 1 would promise an endless draft."""

_PRIOR_FIRST = (0.2, 0.5, 0.8)
_PRIOR_LATER = (0.5, 0.7, 0.85)
"""Acceptance of the first and of the later draft tokens by level, before anything was measured. Later ones are more
likely: whoever quotes one token goes on quoting."""


@dataclass(slots=True)
class _Class:
    first_trials: float
    first_hits: float
    later_trials: float
    later_hits: float

    @classmethod
    def prior(cls, level: int) -> _Class:
        first, later = PRIOR_TOKENS * _PRIOR_FIRST[level], PRIOR_TOKENS * _PRIOR_LATER[level]
        return cls(PRIOR_TOKENS, first, PRIOR_TOKENS, later)

    def scale(self, keep_first: float, keep_later: float) -> None:
        self.first_trials *= keep_first
        self.first_hits *= keep_first
        self.later_trials *= keep_later
        self.later_hits *= keep_later


class AcceptanceTable:
    """Windowed acceptance of every class of drafts, and how often a look-up ends in each class.

    A class is ``(source * len(match_buckets) + match bucket) * len(PROB_LEVELS) + level``; -1 stands for a look-up
    that found nothing.
    """

    def __init__(self, sources: Sequence[str], match_buckets: Sequence[int]) -> None:
        """Make an empty table.

        Args:
            sources: Names of the sources.
            match_buckets: Smallest match length (tokens) of each bucket, ascending from 1 or 0.
        """
        if not sources or not match_buckets:
            raise ValueError(f"sources={sources!r} and match_buckets={match_buckets!r} must not be empty")
        self.sources = tuple(sources)
        self.match_buckets = tuple(match_buckets)
        levels = len(PROB_LEVELS)
        self._classes = [_Class.prior(kind % levels) for kind in range(len(sources) * len(match_buckets) * levels)]
        self._mix = [0.0] * len(self._classes)
        self._mix_rows = 0.0

    def class_of(self, source: int, match_tokens: int, prob: float) -> int:
        """The class of a draft from source number ``source`` that continues a match of ``match_tokens``.

        ``prob`` is the index's estimate for the first token.
        """
        bucket = max(0, bisect_right(self.match_buckets, match_tokens) - 1)
        level = bisect_right(PROB_LEVELS, prob) - 1
        return (source * len(self.match_buckets) + bucket) * len(PROB_LEVELS) + level

    def source_of(self, kind: int) -> int:
        """Number of the source of a class."""
        return kind // (len(self.match_buckets) * len(PROB_LEVELS))

    def observe(self, kind: int, drafted: int, accepted: int) -> None:
        """Count one verified draft: ``accepted`` of its ``drafted`` tokens, the first wrong one ends it."""
        if drafted < 1:
            return
        # Called for every row of every step, so nothing is called here.
        row = self._classes[kind]
        row.first_trials = row.first_trials * _KEEP_FIRST + 1.0
        row.first_hits = row.first_hits * _KEEP_FIRST + (accepted > 0)
        later_trials = accepted if accepted < drafted else drafted - 1
        if later_trials:
            keep = 1.0 - later_trials / LATER_MEMORY_TOKENS
            row.later_trials = row.later_trials * keep + later_trials
            row.later_hits = row.later_hits * keep + accepted - 1

    def observe_mix(self, counts: Mapping[int, int], total: int) -> None:
        """Count the look-ups of one step by class; ``total`` includes those that found nothing."""
        if total == 0:
            return
        self._mix_rows = min(self._mix_rows + total, MIX_MEMORY_ROWS)
        rate = min(1.0, total / self._mix_rows)
        mix = self._mix = [share * (1.0 - rate) for share in self._mix]
        for kind, count in counts.items():
            if kind >= 0:
                mix[kind] += rate * count / total

    def rates(self, kind: int) -> tuple[float, float]:
        """Acceptance of the first draft token, and of a later one when all before it were accepted."""
        row = self._classes[kind]
        return row.first_hits / row.first_trials, min(row.later_hits / row.later_trials, MAX_LATER)

    def mix(self) -> list[tuple[int, float]]:
        """Classes with the share of look-ups that ended there.

        Before any look-up every class is taken to be alike, so that a first one is made.
        """
        if self._mix_rows == 0.0:
            return [(kind, 0.5 / len(self._mix)) for kind in range(len(self._mix))]
        return [(kind, share) for kind, share in enumerate(self._mix) if share > 1e-3]

    def by_match(self) -> list[list[float]]:
        """Acceptance of the first token by source (rows) and match bucket (columns), levels taken together."""
        levels, buckets = len(PROB_LEVELS), len(self.match_buckets)
        table = []
        for source in range(len(self.sources)):
            row = []
            for bucket in range(buckets):
                kinds = range((source * buckets + bucket) * levels, (source * buckets + bucket + 1) * levels)
                trials = sum(self._classes[kind].first_trials for kind in kinds)
                hits = sum(self._classes[kind].first_hits for kind in kinds)
                row.append(hits / trials)
            table.append(row)
        return table

    def age(self, keep: float) -> None:
        """Make what was measured weigh less, as after a weight update: ``keep`` of the counts remain.

        Not less than the prior weighed: a class that is rarely seen would else weigh nothing after some updates, so
        that its next draft alone decided, and after a thousand its counts would be 0.
        """
        for row in self._classes:
            row.scale(
                max(keep, min(1.0, PRIOR_TOKENS / row.first_trials)),
                max(keep, min(1.0, PRIOR_TOKENS / row.later_trials)),
            )
        self._mix_rows *= keep
