"""The run's own manager, to which everything happens again: what it believed of caches and working sets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verl_war.core.fleet import Replica
from verl_war.core.guard import ControlGuard
from verl_war.core.journal import FORMAT, JournalError, ReplayedManager, manager_of, replay


class Brain:
    """A manager made from a journal's header. Beliefs are those of the run for as long as the decisions are.

    Attributes:
        note: Why beliefs are missing from some point on; empty while they are there.
    """

    def __init__(self, header: Any) -> None:
        """Make the manager.

        Raises:
            JournalError: The record is no header of a journal of this version.
        """
        self.note = ""
        self._manager: ReplayedManager | None = None
        try:
            self._manager = manager_of(header)
        except JournalError as error:
            if not isinstance(header, Mapping) or header.get("war_journal") != FORMAT:
                raise
            # Of a run with full_determinism, or of settings that this version does not know: the events still count.
            self.note = f"working sets and the believed hit rate are left out: {error}"

    @property
    def is_following(self) -> bool:
        """Whether the run's decisions come out again."""
        return self._manager is not None

    def apply(self, record: Mapping[str, Any]) -> tuple[int, int]:
        """Let an event happen.

        Returns:
            Prompt tokens of the training turn that ended with it, as far as the engine told its cache hits, and how
            many of them were believed to be cached. Zeros for other events.

        Raises:
            JournalError: The event is damaged.
        """
        if self._manager is None:
            return 0, 0
        is_turn_end = record.get("event") == "turn_end"
        stats = self._manager.stats
        before = stats.prompt_tokens, stats.prompt_tokens_believed
        starts, error = replay(self._manager, record)
        if starts != record.get("starts", []) or error != record.get("error", ""):
            at_s = record.get("at_s", 0.0)
            self.note = (
                f"working sets and the believed hit rate end at at_s={at_s:.1f}: there this version of verl_war "
                "decides otherwise than the one that ran"
            )
            self._manager = None
        return (stats.prompt_tokens - before[0], stats.prompt_tokens_believed - before[1]) if is_turn_end else (0, 0)

    @property
    def guard(self) -> ControlGuard | None:
        """Its guard; None without scheduling and admission, and after the decisions came out differently."""
        return None if self._manager is None else self._manager.guard

    def replicas(self) -> Iterable[Replica]:
        """Its accounts of the replicas in the pool; none after the decisions came out differently."""
        return self._manager.fleet.pool() if self._manager is not None else ()


@contextmanager
def hushed() -> Iterator[None]:
    """Keep what a manager logs to itself meanwhile: it happened in the run and was logged there."""
    core = logging.getLogger("verl_war.core")
    level = core.level
    core.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        core.setLevel(level)
