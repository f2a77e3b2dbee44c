"""Events of a workload manager as plain data and back, so that what it decided can be decided again.

A journal is a header and then, for every event in order, an entry: its arguments, and the placements or the error
that came of it. Reading and writing files is done elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from verl_war.core.config import WarConfig, parse_war_config
from verl_war.core.fleet import Fleet
from verl_war.core.guard import ControlGuard
from verl_war.core.machine_profile import MachineProfile
from verl_war.core.manager import WorkloadManager
from verl_war.core.step_stats import StepStats
from verl_war.core.types import Placement, ReplicaSnapshot, SpeculationReading, Turn, TurnResult

FORMAT = 1
"""Raised when an entry of an earlier version cannot be read any more."""

Record = Mapping[str, Any]
"""One line of a journal: what JSON can hold."""


@dataclass(frozen=True, slots=True)
class _Event:
    method: str
    arguments: Mapping[str, type]
    has_time: bool = True


EVENTS: dict[str, _Event] = {
    "step_begin": _Event("on_step_begin", {"policy_step": int, "num_trajectories": int, "group_size": int}),
    "replica_up": _Event("on_replica_up", {"replica_id": str}),
    "replica_down": _Event("on_replica_down", {"replica_id": str, "is_lost": bool}),
    "turn": _Event("on_turn", {"turn": Turn}),
    "turn_end": _Event(
        "on_turn_end", {"trajectory_id": str, "session_id": str, "replica_id": str, "result": TurnResult}
    ),
    "turn_abandoned": _Event("on_turn_abandoned", {"session_id": str}),
    "trajectory_end": _Event("on_trajectory_end", {"trajectory_id": str, "failed": bool}),
    "snapshot": _Event("on_snapshot", {"replica_id": str, "snapshot": ReplicaSnapshot}),
    "snapshot_missing": _Event("on_snapshot_missing", {"replica_id": str, "is_rejected": bool}),
    "speculation": _Event("on_speculation", {"replica_id": str, "reading": SpeculationReading}),
    "tick": _Event("on_tick", {}),
    "weights_updated": _Event("on_weights_updated", {}),
    "sessions_forgotten": _Event("forget_sessions", {}, has_time=False),
    "report": _Event("report", {}, has_time=False),
}
"""Name in the journal -> method of `WorkloadManager` and its arguments, the time apart."""


class JournalError(ValueError):
    """A record cannot be understood; the message says why."""


class UnreadableError(JournalError):
    """The file cannot be read at all: it is missing, a directory, or of somebody else."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event that happened.

    Attributes:
        event: Key of `EVENTS`.
        now_s: Its time; None for those that have none.
        arguments: By name.
        placements: Turns that started because of it.
        error: What `on_turn` raised; empty otherwise.
    """

    event: str
    now_s: float | None
    arguments: Mapping[str, Any]
    placements: Sequence[Placement] = ()
    error: str = ""


class RecordingManager(WorkloadManager):
    """A manager that hands every event and what came of it to `record`."""

    def __init__(
        self,
        config: WarConfig,
        full_determinism: bool,
        record: Callable[[Entry], None],
        profile: MachineProfile | None = None,
    ) -> None:
        super().__init__(config, full_determinism, profile)
        self._record = record

    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> list[Placement]:
        placements = super().on_step_begin(policy_step, num_trajectories, now_s, group_size)
        arguments = {"policy_step": policy_step, "num_trajectories": num_trajectories, "group_size": group_size}
        return self._note("step_begin", now_s, arguments, placements)

    def on_replica_up(self, replica_id: str, now_s: float) -> list[Placement]:
        placements = super().on_replica_up(replica_id, now_s)
        return self._note("replica_up", now_s, {"replica_id": replica_id}, placements)

    def on_replica_down(self, replica_id: str, now_s: float, is_lost: bool = False) -> list[Placement]:
        placements = super().on_replica_down(replica_id, now_s, is_lost)
        return self._note("replica_down", now_s, {"replica_id": replica_id, "is_lost": is_lost}, placements)

    def on_turn(self, turn: Turn, now_s: float) -> list[Placement]:
        try:
            placements = super().on_turn(turn, now_s)
        except (RuntimeError, ValueError) as error:
            self._record(Entry("turn", now_s, {"turn": turn}, (), _error(error)))
            raise
        return self._note("turn", now_s, {"turn": turn}, placements)

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> list[Placement]:
        placements = super().on_turn_end(trajectory_id, session_id, replica_id, result, now_s)
        arguments = {
            **{"trajectory_id": trajectory_id, "session_id": session_id},
            **{"replica_id": replica_id, "result": result},
        }
        return self._note("turn_end", now_s, arguments, placements)

    def on_turn_abandoned(self, session_id: str, now_s: float) -> list[Placement]:
        placements = super().on_turn_abandoned(session_id, now_s)
        return self._note("turn_abandoned", now_s, {"session_id": session_id}, placements)

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> list[Placement]:
        placements = super().on_trajectory_end(trajectory_id, failed, now_s)
        return self._note("trajectory_end", now_s, {"trajectory_id": trajectory_id, "failed": failed}, placements)

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> list[Placement]:
        placements = super().on_snapshot(replica_id, snapshot, now_s)
        return self._note("snapshot", now_s, {"replica_id": replica_id, "snapshot": snapshot}, placements)

    def on_snapshot_missing(self, replica_id: str, now_s: float, is_rejected: bool = False) -> list[Placement]:
        placements = super().on_snapshot_missing(replica_id, now_s, is_rejected)
        return self._note("snapshot_missing", now_s, {"replica_id": replica_id, "is_rejected": is_rejected}, placements)

    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> list[Placement]:
        placements = super().on_speculation(replica_id, reading, now_s)
        return self._note("speculation", now_s, {"replica_id": replica_id, "reading": reading}, placements)

    def on_tick(self, now_s: float) -> list[Placement]:
        return self._note("tick", now_s, {}, super().on_tick(now_s))

    def on_weights_updated(self, now_s: float) -> None:
        super().on_weights_updated(now_s)
        self._note("weights_updated", now_s, {}, [])

    def forget_sessions(self) -> int:
        self._note("sessions_forgotten", None, {}, [])
        return super().forget_sessions()

    def report(self) -> dict[str, float]:
        self._note("report", None, {}, [])
        return super().report()

    def _note(
        self, event: str, now_s: float | None, arguments: dict[str, Any], placements: list[Placement]
    ) -> list[Placement]:
        # Copied: the caller takes its list apart while it delivers.
        self._record(Entry(event, now_s, arguments, tuple(placements)))
        return placements


def header(config: WarConfig, full_determinism: bool, profile: MachineProfile | None = None) -> dict[str, Any]:
    """First record of a journal. The seed must be set, or the decisions could not be made again."""
    assert config.seed is not None
    return {
        "war_journal": FORMAT,
        "config": _plain(config),
        "full_determinism": full_determinism,
        "profile": None if profile is None else profile.as_dict(),
        "hash_check": hash(HASHED) if full_determinism else None,
    }


HASHED = "verl_war"
"""With `full_determinism` verl places by Python's hash of a string, which differs between processes."""


class ReplayedManager(WorkloadManager):
    """A manager to which a recorded run happens again; its accounts can be looked at in between."""

    @property
    def fleet(self) -> Fleet:
        """Replicas and conversations."""
        return self._fleet

    @property
    def stats(self) -> StepStats:
        """Sums since the last `report`."""
        return self._stats

    @property
    def guard(self) -> ControlGuard | None:
        """What compares the controls with stock verl's rule; None without scheduling and admission."""
        return None if self._scheduler is None else self._scheduler.guard


def manager_of(record: Any) -> ReplayedManager:
    """A manager in the state in which the journal with this header began.

    Raises:
        JournalError: The record is no header, or of another format, or this process hashes strings differently.
    """
    if not isinstance(record, Mapping) or "war_journal" not in record:
        raise JournalError("no header of a WAR journal")
    if record["war_journal"] != FORMAT:
        raise JournalError(f"war_journal={record['war_journal']!r}; this version of verl_war reads {FORMAT}")
    full_determinism = bool(record.get("full_determinism"))
    if full_determinism and record.get("hash_check") != hash(HASHED):
        raise JournalError(
            "recorded with rollout.full_determinism, where verl places by Python's hash of the session, and this "
            "process hashes differently; start it with the PYTHONHASHSEED of the run"
        )
    try:
        config = parse_war_config(record.get("config"))
        raw = record.get("profile")
        profile = None if raw is None else MachineProfile.from_dict(raw, "profile")
    except ValueError as error:
        raise JournalError(str(error)) from error
    if config.seed is None:
        raise JournalError("config.seed is missing, with which ties were broken; every journal is written with one")
    return ReplayedManager(config, full_determinism, profile)


def as_record(entry: Entry) -> dict[str, Any]:
    """An entry as plain data."""
    record: dict[str, Any] = {"event": entry.event}
    if entry.now_s is not None:
        record["at_s"] = entry.now_s
    for name, value in entry.arguments.items():
        record[name] = _plain(value)
    if entry.placements:
        record["starts"] = as_starts(entry.placements)
    if entry.error:
        record["error"] = entry.error
    return record


def as_starts(placements: Iterable[Placement]) -> list[dict[str, Any]]:
    """Placements as plain data, the way `starts` of a record holds them."""
    return [_plain(placement) for placement in placements]


def replay(manager: WorkloadManager, record: Any) -> tuple[list[dict[str, Any]], str]:
    """Let a recorded event happen to `manager`.

    Returns:
        The placements that come of it, as plain data, and the error that `on_turn` raised.

    Raises:
        JournalError: The record is damaged.
    """
    if not isinstance(record, Mapping):
        raise JournalError(f"{record!r:.80} is no event")
    name = record.get("event")
    event = EVENTS.get(name) if isinstance(name, str) else None
    if event is None:
        raise JournalError(f"event {name!r:.80} is unknown; expected one of {', '.join(EVENTS)}")
    method = getattr(manager, event.method)
    try:
        arguments = [_argument(record, name, kind) for name, kind in event.arguments.items()]
        keywords = {"now_s": _time(record)} if event.has_time else {}
        outcome = method(**dict(zip(event.arguments, arguments, strict=True)), **keywords)
    except JournalError:
        raise
    except (RuntimeError, ValueError) as error:
        if event.method != "on_turn":
            raise JournalError(f"event {record['event']!r} cannot have happened: {_error(error)}") from error
        return [], _error(error)
    except KeyError as error:
        raise JournalError(f"event {record['event']!r} speaks of {error}, which no event before it named") from error
    except (TypeError, OverflowError) as error:  # fields of a turn or a result are not checked one by one
        raise JournalError(f"event {record['event']!r} has a value of the wrong kind ({error})") from error
    return (as_starts(outcome) if isinstance(outcome, list) else []), ""


def time_of(record: Record) -> float | None:
    """When an event happened; None for one that has no time.

    Raises:
        JournalError: That is no time.
    """
    return _time(record) if "at_s" in record else None


def _time(record: Record) -> float:
    value = record.get("at_s")
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e15:
        raise JournalError(f"at_s={value!r:.80} of event {record['event']!r} is no time in seconds")
    return float(value)


def _error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _argument(record: Record, name: str, kind: type) -> Any:
    if name not in record:
        raise JournalError(f"event {record['event']!r} has no {name!r}")
    value = record[name]
    if dataclasses.is_dataclass(kind):
        return _dataclass(record, name, kind)
    if type(value) is not kind:
        raise JournalError(f"{name}={value!r:.80} of event {record['event']!r} is not {kind.__name__}")
    return value


def _dataclass(record: Record, name: str, kind: Any) -> Any:
    value = record[name]
    if not isinstance(value, Mapping):
        raise JournalError(f"{name}={value!r:.80} of event {record['event']!r} is no {kind.__name__}")
    try:
        return kind(**{key: tuple(item) if isinstance(item, list) else item for key, item in value.items()})
    except (TypeError, ValueError) as error:
        raise JournalError(f"{name} of event {record['event']!r} is no {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    return value
