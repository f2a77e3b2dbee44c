"""Makes the decisions of a journal again and compares them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_war.core.journal import JournalError, manager_of, replay
from verl_war.replay.reader import records


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found.

    Attributes:
        events: Events that were replayed.
        placements: Turns that started, identical ones only.
        difference: The first decision that came out differently; empty when all are the same.
    """

    events: int
    placements: int
    difference: str = ""


def replay_file(path: Path) -> Outcome:
    """Let everything in a journal happen again, up to the first difference.

    Raises:
        JournalError: The file is damaged; the message names the line.
    """
    lines = records(path)
    events = placements = 0
    number, first = next(lines)
    try:
        manager = manager_of(first)
        for number, record in lines:
            starts, error = replay(manager, record)
            expected, expected_error = record.get("starts", []), record.get("error", "")
            if starts != expected or error != expected_error:
                was, now = _words(expected, expected_error), _words(starts, error)
                return Outcome(events, placements, f"{path}:{number}: {record['event']} led to {was}, now to {now}")
            events += 1
            placements += len(starts)
    except JournalError as error:
        if str(error).startswith(f"{path}:"):
            raise
        raise JournalError(f"{path}:{number}: {error}") from error
    return Outcome(events, placements)


def _words(starts: list[dict[str, Any]], error: str) -> str:
    if error:
        return error
    return "nothing" if not starts else json.dumps(starts)
