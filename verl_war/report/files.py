"""Which files of a run there are to read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files by kind, in the order of their names; a restarted router's journals in the order of their numbers."""

    journals: list[Path] = field(default_factory=list)
    metrics: list[Path] = field(default_factory=list)


def find(run: Path) -> RunFiles:
    """Journals and metrics of a run: the file itself, or everything below the directory that is one.

    Raises:
        ValueError: There is none.
    """
    if not run.exists():
        raise ValueError(f"{run} does not exist; expected a journal or the directory of a run")
    if not run.is_dir():
        return RunFiles(metrics=[run]) if _kind(run) == "metrics" else RunFiles(journals=[run])
    files = RunFiles()
    for path in sorted((path for path in run.rglob("*") if path.is_file()), key=_order):
        kind = _kind(path)
        if kind == "journal":
            files.journals.append(path)
        elif kind == "metrics":
            files.metrics.append(path)
    if not (files.journals or files.metrics):
        raise ValueError(
            f"{run} holds no journal; expected a file that custom.war.journal_path made, or one of verl's file logger"
        )
    return files


def _kind(path: Path) -> str:
    """By how the file begins; empty for what is neither."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b'{"war_journal"'):
        return "journal"
    return "metrics" if re.match(rb'\{"(step|data)":', head) else ""


def _order(path: Path) -> tuple[str, int]:
    name, _, number = str(path).rpartition(".")
    return (name, int(number)) if number.isdigit() else (str(path), 1)
