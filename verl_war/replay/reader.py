"""Journals of the router as files of one JSON record a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_war.core.journal import JournalError, UnreadableError


class CutOffError(JournalError):
    """The last line ends early; what precedes it is sound."""


def records(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and content of each line.

    Raises:
        UnreadableError: The file is not there or cannot be read.
        JournalError: The file is empty, or a line is damaged; the message names the line.
        CutOffError: The last line is cut off.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    raise CutOffError(
                        f"{path}:{number}: the line is cut off: the router was killed while it wrote, or the file was "
                        f"copied while it grew. What is before it is sound; remove the line to use that"
                    )
                try:
                    yield number, json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:  # the latter: ten thousand brackets
                    raise JournalError(f"{path}:{number}: no JSON ({error}); expected one record a line") from error
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}; expected a journal") from error
    except UnicodeDecodeError as error:
        raise JournalError(f"{path}:{number + 1}: no text ({error.reason}); expected a journal") from error
    if number == 0:
        raise JournalError(f"{path} is empty; expected a header and the router's events")
