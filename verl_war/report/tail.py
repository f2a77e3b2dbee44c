"""Following a journal that still grows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_war.core.journal import JournalError, UnreadableError

READ_BYTES = 1 << 20


class Tail:
    """Gives the complete lines of a file, those that are there and those that come."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            UnreadableError: It cannot be read.
        """
        self.path = path
        self.line = 0
        self._rest = b""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error.strerror}; expected a journal") from error

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:  # fmt: skip
        self._file.close()

    def read(self) -> Iterator[Any]:
        """Records that have come since the last call; a line without its end waits for the next one.

        Raises:
            JournalError: A line is no JSON; the message names it.
        """
        while data := self._file.read(READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self.line += 1
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise JournalError(f"{self.path}:{self.line}: no JSON ({error}); expected one record a line") from (
                        error
                    )

    def silent_s(self) -> float:
        """Seconds since the file was written to."""
        return max(0.0, time.time() - self.path.stat().st_mtime)

    def successor(self) -> Path | None:
        """The journal of a router that was started again; None when there is none."""
        name, _, number = self.path.name.rpartition(".")
        following = f"{name}.{int(number) + 1}" if number.isdigit() else f"{self.path.name}.2"
        path = self.path.with_name(following)
        return path if path.exists() else None
