"""The history of one replica: which texts are kept, for how long, and as whose siblings.

Nothing here depends on model weights: the history survives weight updates, `sleep` and `wake_up` untouched, and
`on_step` only ages it. To carry it over a restart see `persistence.py`, to other replicas `sharing.py`.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass

import numpy.typing as npt

from verl_war.core.history_config import HistoryConfig
from verl_war.history.index import HistoryIndex

logger = logging.getLogger(__name__)

NO_REWARD = float("nan")


@dataclass(slots=True)
class _Kept:
    """What the index does not know of a trajectory of this replica."""

    group: int
    step: int
    prompt_tokens: int
    reward: float = NO_REWARD
    finished: bool = False


class HistoryStore:
    """A `HistoryIndex` and the policy of what it keeps.

    Safe to call from several threads. The decode path may use `index` directly for `extend_batch` and `draft_batch`.
    """

    def __init__(self, config: HistoryConfig, *, vocab_size: int, fingerprint: str) -> None:
        """Start empty.

        Args:
            config: What to keep.
            vocab_size: Token ids are in [0, vocab_size).
            fingerprint: Identity of the tokenizer and model; text of another one is refused, its token ids would be
                garbage.
        """
        self.config = config
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.index = HistoryIndex(
            vocab_size=vocab_size,
            max_bytes=config.max_bytes,
            min_match_own=config.min_match_own,
            min_match_group=config.min_match_group,
            min_match_global=config.min_match_global,
            max_match_tokens=config.max_match_tokens,
            max_candidates=config.max_candidates,
            age_decay=config.age_decay,
            vote_prior=config.vote_prior,
            sources=config.sources,
        )
        self.policy_step = -1
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._counts: dict[str, int] = dict.fromkeys(("edited", "abandoned", "too_short", "over_group_limit"), 0)

    def begin(self, key: int, group: int, policy_step: int, prompt: npt.ArrayLike) -> None:
        """A trajectory starts with the context of its first turn.

        Raises:
            ValueError: The key is in use, or an argument is out of range.
        """
        self.index.begin(key, group, policy_step, prompt)
        with self._lock:
            self._kept[key] = _Kept(group, policy_step, self.index.info(key).length)

    def sync(self, key: int, group: int, policy_step: int, context: npt.ArrayLike) -> int:
        """A turn starts with this whole context; only what is new of it is appended.

        A trajectory that is not known, or was finished or evicted, begins. Where the agent loop edited what was said
        before (dropped the reasoning, cut the middle), the old text stays as text of the group and a new segment
        begins.

        Returns:
            Tokens of the context that were known.
        """
        if key in self.index:
            info = self.index.info(key)
            known = self.index.common_prefix(key, context) if info.live else 0
            if info.live and known == info.length:
                self.index.extend(key, context, start=0)
                return known
            if info.live:
                self._counts["edited"] += 1
            self.index.retire(key)
        self.begin(key, group, policy_step, context)
        return 0

    def append(self, key: int, tokens: npt.ArrayLike, start: int | None = None) -> int:
        """Add generated text; returns the trajectory's new length. See `HistoryIndex.extend`."""
        return self.index.extend(key, tokens, start)

    def finish(self, key: int) -> bool:
        """A trajectory ended. Returns whether its text is kept.

        Raises:
            KeyError: It is not known.
            ValueError: It ended before.
        """
        self.index.finish(key)
        length = self.index.info(key).length
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return True
            kept.finished = True
            if length - kept.prompt_tokens < self.config.min_kept_tokens:
                self._drop(key, "too_short")
                return False
        return True

    def set_reward(self, key: int, reward: float) -> None:
        """What a trajectory was worth, before or after its text is finished. Unknown keys are ignored: evicted."""
        with self._lock:
            if key in self._kept:
                self._kept[key].reward = float(reward)

    def on_step(self, policy_step: int, collect: bool = True) -> None:
        """The policy of this step generates from now on. Forgets what is too old and gives its memory back.

        Args:
            policy_step: verl's `global_steps`; a smaller one than before is a resumed run.
            collect: Wait until memory is given back: about 0.4 s per million forgotten tokens, without the GIL and
                behind the decode path. False: somebody calls `index.collect()` later.
        """
        self.policy_step = policy_step
        self.index.set_step(policy_step, self.config.window_steps)
        with self._lock:
            for key in [key for key in self._kept if key not in self.index]:
                del self._kept[key]
            self._finish_abandoned()
            self._limit_groups()
        if collect:
            self.index.collect()

    def _finish_abandoned(self) -> None:
        """End live trajectories older than the window: their client is gone, and live text is never evicted."""
        oldest = self.policy_step - max(1, self.config.window_steps)
        for key, kept in self._kept.items():
            if not kept.finished and 0 <= kept.step < oldest:
                self._counts["abandoned"] += 1
                kept.finished = True
                self.index.finish(key)

    def _limit_groups(self) -> None:
        groups: dict[int, list[int]] = defaultdict(list)
        for key, kept in self._kept.items():
            if kept.finished and kept.group >= 0:
                groups[kept.group].append(key)
        for keys in groups.values():
            excess = len(keys) - self.config.keep_per_group
            if excess > 0:
                for key in sorted(keys, key=self._worth)[:excess]:
                    self._drop(key, "over_group_limit")

    def _worth(self, key: int) -> tuple[int, float]:
        kept = self._kept[key]
        return kept.step, kept.reward if kept.reward == kept.reward else float("-inf")

    def _drop(self, key: int, reason: str) -> None:
        self._counts[reason] += 1
        del self._kept[key]
        if key in self.index:
            self.index.drop(key)

    def reward(self, key: int) -> float | None:
        """Reward of a trajectory of this replica; None when unknown."""
        kept = self._kept.get(key)
        return None if kept is None or kept.reward != kept.reward else kept.reward

    def stats(self) -> dict[str, int]:
        """`HistoryIndex.stats` and how many trajectories were `edited`, `abandoned`, `too_short` (forgotten at their
        end) and `over_group_limit` (forgotten for newer ones of the group)."""
        return {**self.index.stats(), **self._counts}
