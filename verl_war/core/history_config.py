"""Settings of the history: `...war.speculation.history`, rejected with the key's full name when they make no sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_war.core.config_parsing import ROOT_KEY, require_range

SOURCES: tuple[str, ...] = ("own", "siblings", "earlier_steps", "global")
"""Where a draft may come from: this trajectory; same group and step; same group, other step; any other text."""

SHARE_BYTES_PER_S = 4e6
"""Text that a replica sends to others: 2 million tokens a second, more than it generates."""

OnDamage = Literal["error", "discard"]
"""What to do with a damaged file of history."""

HISTORY_KEY = f"{ROOT_KEY}.speculation.history"

RANGES: dict[str, tuple[float, float]] = {
    "max_bytes": (1 << 20, 1 << 40),
    "window_steps": (0, 1_000_000),
    "min_match_own": (1, 8),
    "min_match_group": (1, 8),
    "min_match_global": (1, 8),
    "max_match_tokens": (1, 256),
    "max_candidates": (1, 256),
    "age_decay": (0.01, 1.0),
    "vote_prior": (0.01, 1000.0),
    "keep_per_group": (1, 1_000_000),
    "min_kept_tokens": (1, 1_000_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """What is kept, and how it is matched.

    Attributes:
        max_bytes: Memory of one replica's index, text and tables. 512 MiB hold about 20 million tokens.
        window_steps: Finished text of policy steps older than this is forgotten: the policy has moved on.
        keep_per_group: Finished trajectories kept of one group; the oldest go first, then those of lowest reward.
            Their number bounds what one prompt, repeated every epoch, takes from the others.
        min_kept_tokens: Finished trajectories that generated less are forgotten; they match nothing of use.
        sources: Which sources may draft; others are not looked up and their tables not built.
        min_match_own: Tokens of context that must match in the own text. Two find what one-token chance does not.
        min_match_group: The same in texts of the group.
        min_match_global: The same in other texts; more, since short matches are chance more often there.
        max_match_tokens: Longest context compared. A longer one does not predict better.
        max_candidates: Most recent matching places looked at per scope. Bounds the time of a draft.
        age_decay: Factor on a vote per policy step of age.
        vote_prior: Votes' worth of measured acceptance against places that disagree.
    """

    max_bytes: int = 512 << 20
    window_steps: int = 8
    keep_per_group: int = 64
    min_kept_tokens: int = 8
    sources: tuple[str, ...] = SOURCES
    min_match_own: int = 2
    min_match_group: int = 2
    min_match_global: int = 3
    max_match_tokens: int = 64
    max_candidates: int = 32
    age_decay: float = 0.8
    vote_prior: float = 4.0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            whole = isinstance(low, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(
                    f"{HISTORY_KEY}.{name}={value!r} is {type(value).__name__}; expected {'int' if whole else 'float'}"
                )
            require_range(self, HISTORY_KEY, name, low, high)
        self._check_sources()
        longest = max(self.min_match_own, self.min_match_group, self.min_match_global)
        if self.max_match_tokens < longest:
            raise ValueError(
                f"{HISTORY_KEY}.max_match_tokens={self.max_match_tokens!r} must be at least the largest min_match_*, "
                f"{longest}"
            )

    def _check_sources(self) -> None:
        if isinstance(self.sources, str) or not all(isinstance(name, str) for name in self.sources):
            raise ValueError(f"{HISTORY_KEY}.sources={self.sources!r} must be a list of names: {', '.join(SOURCES)}")
        unknown = [name for name in self.sources if name not in SOURCES]
        if unknown:
            raise ValueError(
                f"{HISTORY_KEY}.sources={list(self.sources)!r} has the unknown name {unknown[0]!r}; allowed: "
                f"{', '.join(SOURCES)}"
            )
        object.__setattr__(self, "sources", tuple(dict.fromkeys(self.sources)))
