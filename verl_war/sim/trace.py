"""Recorded or generated trajectories: the work that a simulation or a replay has to do, and its file format.

A trace is a JSONL file, one trajectory per line:

    {"trajectory": "g0-1", "group": "g0", "system_tokens": 1024, "prompt_tokens": 3500, "start_s": 0.4,
     "turns": [{"output_tokens": 210, "tool_s": 2.3, "tool_tokens": 350}, {"output_tokens": 80}]}

`prompt_tokens` is the whole context of the first turn; its first `system_tokens` are common to all trajectories, the
rest to those of the same group. Every turn samples `output_tokens`; then the tool takes `tool_s` seconds and appends
`tool_tokens` to the context. `group`, `prompt_tokens`, `turns` and `output_tokens` are required; the others are 0
when left out, and `trajectory` is the group and the line's number. Blank lines are skipped. Key `notes` may hold
anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One turn: tokens sampled, then the tool's seconds and the tokens it adds."""

    output_tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySpec:
    """One trajectory; see the module's text for the fields."""

    trajectory_id: str
    group_id: str
    system_tokens: int = 0
    prompt_tokens: int
    start_s: float = 0.0
    turns: tuple[TurnSpec, ...]

    @property
    def final_tokens(self) -> int:
        """Context after the last turn."""
        grown = sum(turn.output_tokens + turn.tool_tokens for turn in self.turns[:-1])
        return self.prompt_tokens + grown + self.turns[-1].output_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens sampled in all turns."""
        return sum(turn.output_tokens for turn in self.turns)


def write_trace(path: Path, trajectories: Iterable[TrajectorySpec]) -> None:
    """Write a trace file."""
    lines = []
    for spec in trajectories:
        turns = [
            {"output_tokens": turn.output_tokens, "tool_s": turn.tool_s, "tool_tokens": turn.tool_tokens}
            for turn in spec.turns
        ]
        record = {
            "trajectory": spec.trajectory_id,
            "group": spec.group_id,
            "system_tokens": spec.system_tokens,
            "prompt_tokens": spec.prompt_tokens,
            "start_s": spec.start_s,
            "turns": turns,
        }
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))


def read_trace(path: Path) -> tuple[TrajectorySpec, ...]:
    """Read a trace file.

    Raises:
        ValueError: It cannot be read, is empty, or a line is damaged; the message names line and field.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: cannot be read ({error}); expected a JSONL file of trajectories") from error
    specs: list[TrajectorySpec] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        spec = _parse_line(line, number, f"trace {path}, line {number}")
        if spec.trajectory_id in seen:
            raise ValueError(
                f"trace {path}, line {number}: trajectory={spec.trajectory_id!r} is already on line "
                f"{seen[spec.trajectory_id]}; give every trajectory a name of its own"
            )
        seen[spec.trajectory_id] = number
        specs.append(spec)
    if not specs:
        raise ValueError(f"trace {path}: holds no trajectory; expected one JSON object per line")
    return tuple(specs)


def _parse_line(line: str, number: int, where: str) -> TrajectorySpec:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}); was it cut off?") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply for a trajectory") from error
    allowed = ("trajectory", "group", "system_tokens", "prompt_tokens", "start_s", "turns", "notes")
    _check_object(raw, allowed, where)
    group = _text(raw, "group", where)
    turns = raw.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns={turns!r} must be a list of at least one turn")
    prompt_tokens = _integer(raw, "prompt_tokens", where, least=1)
    system_tokens = _integer(raw, "system_tokens", where, default=0)
    if system_tokens > prompt_tokens:
        raise ValueError(
            f"{where}: system_tokens={system_tokens} is more than prompt_tokens={prompt_tokens}; it is a part of it"
        )
    return TrajectorySpec(
        trajectory_id=_text(raw, "trajectory", where, default=f"{group}-line{number}"),
        group_id=group,
        system_tokens=system_tokens,
        prompt_tokens=prompt_tokens,
        start_s=_seconds(raw, "start_s", where),
        turns=tuple(_parse_turn(turn, f"{where}, turns[{index}]") for index, turn in enumerate(turns)),
    )


def _parse_turn(raw: Any, where: str) -> TurnSpec:
    _check_object(raw, ("output_tokens", "tool_s", "tool_tokens"), where)
    return TurnSpec(
        _integer(raw, "output_tokens", where, least=1),
        _seconds(raw, "tool_s", where),
        _integer(raw, "tool_tokens", where, default=0),
    )


def _check_object(raw: Any, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: is {type(raw).__name__}; expected an object with keys {', '.join(allowed)}")
    for key in raw:
        if key not in allowed:
            raise ValueError(f"{where}: unknown key {key!r}; allowed: {', '.join(allowed)}")


def _text(raw: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = raw.get(key, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {key}={value!r} must be a string that is not empty")
    return value


def _integer(raw: Mapping[str, Any], key: str, where: str, least: int = 0, default: int | None = None) -> int:
    value = raw.get(key, default)
    if type(value) is not int or value < least:
        raise ValueError(f"{where}: {key}={value!r} must be an integer of at least {least}")
    return value


def _seconds(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key, 0.0)
    if type(value) not in (int, float) or not 0 <= value <= 1e9:
        raise ValueError(f"{where}: {key}={value!r:.80} must be a number of seconds, 0 to 1e9")
    return float(value)
