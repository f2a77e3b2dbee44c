"""How many draft tokens are accepted, by source and by length of the match that they continue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MATCH_BUCKETS = 6
"""Match lengths 1, 2-3, 4-7, 8-15, 16-31 and longer: acceptance rises with the logarithm of the match."""

MEMORY_TOKENS = 400.0
"""Verified draft positions that a class remembers: a policy's text changes within a training step or two, and the
estimate of a probability near 0.5 is then good to 2.5%."""

PRIOR_TOKENS = 6.0
"""Weight of the prior, in verified positions."""

MIX_MEMORY_ROWS = 256.0
"""Look-ups that the mix of classes remembers."""

_PRIOR_FIRST = (0.15, 0.3, 0.45, 0.6, 0.7, 0.75)
_PRIOR_LATER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""Acceptance of the first and of the later draft tokens by match length, before anything was measured: between a
policy of high entropy (mean accepted length 1.1 to 1.4) and a peaked one (up to 7)."""


def match_bucket(match_tokens: int) -> int:
    """Index of the bucket of a match of ``match_tokens`` (at least 1) tokens."""
    return min(MATCH_BUCKETS - 1, max(0, match_tokens.bit_length() - 1))


@dataclass(slots=True)
class _Class:
    first_trials: float = 0.0
    first_hits: float = 0.0
    later_trials: float = 0.0
    later_hits: float = 0.0

    def scale(self, keep: float) -> None:
        self.first_trials *= keep
        self.first_hits *= keep
        self.later_trials *= keep
        self.later_hits *= keep


class AcceptanceTable:
    """Windowed acceptance of every class, and how often a look-up ends in each class.

    A class is ``source * MATCH_BUCKETS + match_bucket``; class -1 stands for a look-up that found nothing.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        if not sources:
            raise ValueError("AcceptanceTable.sources is empty; expected at least one source name")
        self.sources = tuple(sources)
        self._classes = [_Class() for _ in range(len(self.sources) * MATCH_BUCKETS)]
        self._mix = [0.0] * len(self._classes)
        self._mix_rows = 0.0

    def class_of(self, source: int, match_tokens: int) -> int:
        """The class of a draft from source number ``source`` that continues a match of ``match_tokens``."""
        return source * MATCH_BUCKETS + match_bucket(match_tokens)

    def observe(self, kind: int, drafted: int, accepted: int) -> None:
        """Count one verified draft: ``accepted`` of its ``drafted`` tokens, the first wrong one ends it."""
        if drafted < 1:
            return
        row = self._classes[kind]
        row.scale(1.0 - min(drafted, accepted + 1) / MEMORY_TOKENS)
        row.first_trials += 1.0
        if accepted > 0:
            row.first_hits += 1.0
            row.later_trials += min(accepted, drafted - 1)
            row.later_hits += accepted - 1

    def observe_mix(self, kinds: Iterable[int]) -> None:
        """Count the classes in which the look-ups of one step ended."""
        counts: dict[int, int] = {}
        total = 0
        for kind in kinds:
            counts[kind] = counts.get(kind, 0) + 1
            total += 1
        self.observe_mix_counts(counts, total)

    def observe_mix_counts(self, counts: dict[int, int], total: int) -> None:
        """The same from counts by class; ``total`` includes the look-ups that found nothing."""
        if total == 0:
            return
        self._mix_rows = min(self._mix_rows + total, MIX_MEMORY_ROWS)
        rate = min(1.0, total / self._mix_rows)
        keep = 1.0 - rate
        mix = self._mix = [share * keep for share in self._mix]
        for kind, count in counts.items():
            if kind >= 0:
                mix[kind] += rate * count / total

    def rates(self, kind: int) -> tuple[float, float]:
        """Acceptance of the first draft token, and of a later one when all before it were accepted."""
        row, bucket = self._classes[kind], kind % MATCH_BUCKETS
        first = (row.first_hits + PRIOR_TOKENS * _PRIOR_FIRST[bucket]) / (row.first_trials + PRIOR_TOKENS)
        later = (row.later_hits + PRIOR_TOKENS * _PRIOR_LATER[bucket]) / (row.later_trials + PRIOR_TOKENS)
        return first, min(later, 0.995)  # 1.0 would promise an endless draft

    def mix(self) -> list[tuple[int, float]]:
        """Classes with the share of look-ups that ended there. Before any look-up: an even guess, so that one is
        made."""
        if self._mix_rows == 0.0:
            return [(kind, 0.5 / len(self._mix)) for kind in range(len(self._mix))]
        return [(kind, share) for kind, share in enumerate(self._mix) if share > 1e-4]

    def age(self, keep: float) -> None:
        """Forget a part of everything, as after a weight update: ``keep`` of the counts remain."""
        for row in self._classes:
            row.scale(keep)
        self._mix_rows *= keep
