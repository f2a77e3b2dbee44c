"""Records of runs: one JSON file each, written when the run is over, however it ended."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from verl_war.compare.fixed_work.plan import Case, FixedWorkPlan, Run
from verl_war.compare.fixed_work.results import Replayed, TurnRecord
from verl_war.compare.workspace import write_atomically
from verl_war.sim.trace import TrajectorySpec

FORMAT = 1

Status = Literal["complete", "failed", "refused"]

NAME = re.compile(r"load(?P<load>[^_]+)_repeat(?P<repeat>[1-9][0-9]*)_(?P<arm>\w+)(\.failed[1-9][0-9]*)?\.json")
"""Of a record's file; see `path_of`."""

JSON_NAMES = {dict: "an object", list: "a list", str: "a text", int: "an integer"}

WORK_TOLERANCE = 0.005
"""Share by which arms' decode tokens may differ: a tenth of the smallest difference in time worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run.

    Attributes:
        status: `refused` when it did other work than the others of its case.
        cause: Why it failed or was refused.
        expected_tokens: Tokens to generate, by the trajectories.
        totals: Numbers by name; see `measures.MEASURES`.
        turns: In the order in which they ended.
        end_s: Trajectory -> when it ended.
        war: What WAR's router reports.
        begun_at: Time of day.
        version: Of verl_war.
        attempt: 1 unless earlier ones failed.
    """

    case: Case
    arm: str
    status: Status
    cause: str = ""
    expected_tokens: int
    totals: dict[str, float]
    turns: tuple[TurnRecord, ...] = ()
    end_s: dict[str, float] = field(default_factory=dict)
    war: dict[str, float] = field(default_factory=dict)
    begun_at: str = ""
    version: str = ""
    attempt: int = 1

    @property
    def name(self) -> str:
        """Of the run."""
        return Run(case=self.case, arm=self.arm).name


def record_of(
    run: Run, specs: Sequence[TrajectorySpec], done: Replayed, kv_tokens: int, cause: str = "", **facts: Any
) -> Record:
    """The record of a run that ended, with `cause` of one that failed."""
    expected = sum(spec.output_tokens for spec in specs)
    totals = totals_of(done, kv_tokens)
    status: Status = "failed" if cause else "complete"
    if not cause and differ(totals["output_tokens"], expected):
        status = "refused"
        cause = f"{totals['output_tokens']:.0f} tokens were generated, and the trajectories have {expected}"
    return Record(
        case=run.case, arm=run.arm, status=status, cause=cause, expected_tokens=expected, totals=totals,
        turns=tuple(done.turns), end_s=dict(done.end_s), war=dict(done.war), **facts,
    )  # fmt: skip


def totals_of(done: Replayed, kv_tokens: int) -> dict[str, float]:
    """Numbers of a run."""
    output, prompt, cached = (done.total(f"{kind}_tokens") for kind in ("output", "prompt", "cached"))
    held_s = [turn.started_s - turn.asked_s for turn in done.turns]
    speculation = done.speculation
    return {
        "makespan_s": done.makespan_s,
        **{f"t{percent}_s": percentile(list(done.end_s.values()), percent) for percent in (50, 90, 99)},
        "turns": len(done.turns),
        "output_tokens": output,
        "output_tokens_per_s": output / done.makespan_s if done.makespan_s else 0.0,
        "prompt_tokens": prompt,
        "prompt_tokens_cached": cached,
        # What a preemption makes an engine compute again is in it.
        "prompt_tokens_computed": max(0, done.computed_tokens - output),
        "preemptions": done.preemptions,
        "drafted_tokens": done.drafted_tokens,
        "accepted_tokens": done.accepted_tokens,
        "drafting_steps_share": _ratio(speculation.get("drafting_steps", 0.0), speculation.get("steps", 0.0)),
        "draft_time_share": _ratio(speculation.get("draft_s", 0.0), speculation.get("step_s", 0.0)),
        "engine_steps": done.engine_steps,
        "held_s": sum(held_s),
        "held_max_s": max(held_s, default=0.0),
        "moves": moves(done.turns),
        "kv_demand_peak": done.kv_demand_peak_tokens / (kv_tokens * max(1, len(done.busy_s))),
        "busy_s": sum(done.busy_s.values()),
        "router_cpu_s": done.router_cpu_s,
        "client_cpu_s": done.client_cpu_s,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def moves(turns: Sequence[TurnRecord]) -> int:
    """Turns on another replica than their trajectory's last."""
    last: dict[str, str] = {}
    count = 0
    for turn in sorted(turns, key=lambda turn: turn.number):
        count += last.get(turn.trajectory_id, turn.replica_id) != turn.replica_id
        last[turn.trajectory_id] = turn.replica_id
    return count


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many per cent of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else math.nan


def differ(tokens: float, expected: float) -> bool:
    """Whether this is other work."""
    return abs(tokens - expected) > WORK_TOLERANCE * expected


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


TOTALS = frozenset(totals_of(Replayed(), kv_tokens=1))
"""Names of all totals."""


def path_of(directory: Path, run: Run, failed_attempt: int = 0) -> Path:
    """File of a run's record; of an attempt that failed and was made again."""
    return directory / (f"{run.name}.failed{failed_attempt}.json" if failed_attempt else f"{run.name}.json")


def save(directory: Path, record: Record) -> None:
    """Write a record. An earlier attempt's stays beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(case=record.case, arm=record.arm)
    path = path_of(directory, run)
    if path.exists():
        path.rename(path_of(directory, run, load(path, run).attempt))
    raw = asdict(record) | {"format": FORMAT, "turns": [astuple(turn) for turn in record.turns]}
    # NaN is no JSON: a run that failed before a trajectory ended has no percentiles.
    raw["totals"] = {name: None if value != value else value for name, value in record.totals.items()}
    write_atomically(path, json.dumps(raw) + "\n")


def load(path: Path, run: Run) -> Record:
    """Read the record of a run.

    Raises:
        ValueError: It is damaged, of another version or of another run.
    """
    try:
        record = _parsed(json.loads(path.read_text()))
        if (record.case, record.arm) != (run.case, run.arm):
            raise ValueError(f"it is of {record.case}, arm={record.arm!r}; expected {run.case}, arm={run.arm!r}")
        return record
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"record {path} cannot be read ({error!r}); delete it to repeat the run") from error


def _parsed(raw: Any) -> Record:
    raw = _typed("it", raw, dict)
    if raw.pop("format") != FORMAT:
        raise ValueError(f"it is of another format than {FORMAT}")
    unknown = set(raw) - {field.name for field in fields(Record)}
    if unknown:
        raise ValueError(f"it has unknown keys {sorted(unknown)}")
    raw["case"] = Case(**_typed("case", raw["case"], dict))
    raw["turns"] = tuple(TurnRecord(*_typed("a turn", turn, list)) for turn in _typed("turns", raw["turns"], list))
    totals = _typed("totals", raw["totals"], dict)
    raw["totals"] = {name: math.nan if value is None else value for name, value in totals.items()}
    record = Record(**raw)
    _check(record)
    return record


def _check(record: Record) -> None:
    """Every value is of its kind, and a run that counts has all numbers."""
    if record.status not in get_args(Status):
        raise ValueError(f"status={record.status!r:.40}, expected one of {', '.join(get_args(Status))}")
    for name in ("arm", "cause", "begun_at", "version"):
        _typed(name, getattr(record, name), str)
    for name in ("repeat", "seed"):
        _typed(f"case.{name}", getattr(record.case, name), int)
    _typed("attempt", record.attempt, int)
    _typed("war", record.war, dict)
    _require_number("case.load", record.case.load)
    _require_number("expected_tokens", record.expected_tokens)
    _check_totals(record)
    for name, value in _typed("end_s", record.end_s, dict).items():
        _require_number(f"end_s of {name}", value)
    for turn in record.turns:
        for field_name, value in zip(TurnRecord.__slots__, astuple(turn), strict=True):
            if field_name in ("trajectory_id", "replica_id"):
                _typed(f"{field_name} of a turn", value, str)
            else:
                _require_number(f"{field_name} of a turn", value)


def _check_totals(record: Record) -> None:
    missing = TOTALS - set(record.totals)
    if missing:
        raise ValueError(f"totals lack {sorted(missing)}")
    for name, value in record.totals.items():
        if value == value or record.status == "complete":  # only a run that failed lacks some
            _require_number(f"totals.{name}", value)
    if record.status == "complete" and record.totals["makespan_s"] <= 0:
        raise ValueError(f"totals.makespan_s={record.totals['makespan_s']}, expected more than 0 of a complete run")


def _typed(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name}={value!r:.40}, expected {JSON_NAMES[kind]}")
    return value


def _require_number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name}={value!r:.40}, expected a finite number")


def load_all(plan: FixedWorkPlan) -> list[Record]:
    """Records of a plan's arms and loads, attempts that failed and were made again included, by name.

    Other files are left alone: they are of arms and loads that are not asked for now, or of somebody else.
    """
    found = ((path, _run_of(path, plan)) for path in sorted(plan.runs_directory.glob("*.json")))
    return [load(path, run) for path, run in found if run is not None]


def _run_of(path: Path, plan: FixedWorkPlan) -> Run | None:
    """The run that a record is of by the name of its file; None for one that is not of the plan's arms and loads."""
    name = NAME.fullmatch(path.name)
    loads = {f"{load:g}": load for load in plan.loads}
    if name is None or name["load"] not in loads or name["arm"] not in plan.arms:
        return None
    return Run(case=plan.case(loads[name["load"]], int(name["repeat"])), arm=name["arm"])


def is_done(directory: Path, run: Run) -> bool:
    """Whether a run need not be made any more."""
    path = path_of(directory, run)
    return path.exists() and load(path, run).status != "failed"


def attempts(directory: Path, run: Run) -> int:
    """Attempts of a run so far."""
    path = path_of(directory, run)
    return load(path, run).attempt if path.exists() else 0
