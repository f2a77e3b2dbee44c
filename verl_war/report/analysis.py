"""One pass over a journal: everything that a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_war.core.journal import JournalError, time_of
from verl_war.replay.reader import CutOffError, records
from verl_war.report.brain import Brain
from verl_war.report.fit import FitQuality
from verl_war.report.rollout import Rollout
from verl_war.report.timeline import Sample, Timeline

_RULES = {
    (True, False): "WAR",
    (False, False): "stock (trial)",
    (False, True): "stock (guard)",
    (True, True): "WAR (trial)",
}
"""Whether WAR's scheduling is in force, and whether it has lost in trials -> which rule decides."""


@dataclass(slots=True)
class Analysis:
    """What a journal tells.

    Attributes:
        config: `custom.war` of the run.
        series: Over time, by replica: gauges `live`, `inflight`, `running`, `waiting`, `kv_usage`, `working_set` and
            `trusted` (over the KV capacity), `slowness`, `low` (1 in the regime that drafts), `budget`, `gain`; of the
            fleet `held`, `generating` and `tools` (trajectories); counters as `Rollout` counts them, and
            `believed_tokens` of `believed_of_tokens`.
        guard_trials: Steps decided by the other rule that the guard could compare with their neighbours.
        guard_speedup: Stock verl's seconds per token over WAR's in these.
        notes: What the reader should know about the journal.
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rollout: Rollout = field(init=False)
    series: Timeline = field(init=False)
    fits: FitQuality = field(default_factory=FitQuality)
    guard_trials: int = 0
    guard_speedup: float = 1.0
    brain: Brain | None = None

    def __post_init__(self) -> None:
        self.series = Timeline(self._gauges)
        self.rollout = Rollout(self.series.add, self.fits.add)

    def begin(self, header: Any) -> None:
        """Take in the header.

        Raises:
            JournalError: It is none.
        """
        self.brain = Brain(header)
        self.config = header.get("config") or {}

    def apply(self, record: Any) -> None:
        """Take in an event.

        Raises:
            JournalError: It is damaged.
        """
        if not isinstance(record, Mapping):
            raise JournalError(f"{record!r:.80} is no event")
        at_s = time_of(record)
        if at_s is not None:
            self.series.advance(at_s)
        assert self.brain is not None
        prompt_tokens, believed_tokens = self.brain.apply(record)
        self.rollout.apply(record)
        guard = self.brain.guard
        if guard is not None and record.get("event") == "step_begin":
            self.guard_speedup, self.guard_trials = guard.speedup, guard.trials
            self.rollout.on_rule(_RULES[guard.in_force, guard.is_losing])
        if prompt_tokens:
            self.series.add("believed_of_tokens", record["replica_id"], prompt_tokens)
            self.series.add("believed_tokens", record["replica_id"], believed_tokens)

    def _gauges(self) -> Iterator[Sample]:
        rollout = self.rollout
        inflight = 0
        for name, seen in rollout.replicas.items():
            inflight += seen.inflight
            if not seen.in_pool:
                continue
            yield "live", name, seen.live
            yield "inflight", name, seen.inflight
            if seen.snapshot is not None:
                yield "running", name, seen.snapshot.running_requests
                yield "waiting", name, seen.snapshot.waiting_requests
                yield "kv_usage", name, seen.snapshot.kv_usage
            if seen.speculation is not None:
                yield "low", name, seen.speculation.regime == "low"
                yield "budget", name, seen.speculation.budget_tokens
                yield "gain", name, seen.speculation.expected_gain
        for replica in self.brain.replicas() if self.brain is not None else ():
            yield "slowness", replica.replica_id, replica.pace.slowness
            if replica.capacity_tokens:
                yield "working_set", replica.replica_id, replica.working_set_tokens / replica.capacity_tokens
                yield "trusted", replica.replica_id, replica.trusted_share
        held = len(rollout.held)
        yield "held", "", held
        yield "generating", "", inflight
        yield "tools", "", max(0, len(rollout.lives) - held - inflight)


def analyse(path: Path) -> Analysis:
    """Read a journal to its end, or to where its writer was killed.

    Raises:
        JournalError: It cannot be read or is damaged; the message names the line.
    """
    analysis = Analysis(path)
    lines = records(path)
    try:
        _take_all(analysis, lines)
    except CutOffError:
        if analysis.brain is None:
            raise
        analysis.notes.append("the last line is cut off, as when the router is killed; what precedes it is shown")
    if analysis.brain is not None and analysis.brain.note:
        analysis.notes.append(analysis.brain.note)
    return analysis


def _take_all(analysis: Analysis, lines: Iterable[tuple[int, Any]]) -> None:
    number = 0
    try:
        for number, record in lines:
            if number == 1:
                analysis.begin(record)
            else:
                analysis.apply(record)
    except JournalError as error:
        if str(error).startswith(f"{analysis.path}:") or number == 0:
            raise
        raise JournalError(f"{analysis.path}:{number}: {error}") from error
