"""Unified diffs applied to texts in memory, exactly: a hunk fits at its place or the diff is refused.

Nothing has to be installed for it, and preparing a dataset can check each row without touching a repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_GIT_HEADER = re.compile(r"^diff --git a/(.+) b/(.+)$")
_HUNK_HEADER = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(slots=True, kw_only=True)
class _Side:
    """One side of a hunk: its first line number, from 1, and its lines with their line ends."""

    start: int
    num_lines: int
    lines: list[str] = field(default_factory=list)

    @property
    def index(self) -> int:
        """Where the side begins in its file; an empty side is named by the line before it."""
        return self.start - 1 if self.num_lines else self.start


@dataclass(slots=True, kw_only=True)
class _FileDiff:
    old_path: str | None = None
    new_path: str | None = None
    hunks: list[tuple[_Side, _Side]] = field(default_factory=list)

    def reversed(self) -> _FileDiff:
        hunks = [(new, old) for old, new in self.hunks]
        return _FileDiff(old_path=self.new_path, new_path=self.old_path, hunks=hunks)


def apply_diff(diff: str, read: Callable[[str], str | None], *, reverse: bool = False) -> dict[str, str | None]:
    """Apply a unified diff (plain or git's) to files.

    Args:
        diff: text of the diff.
        read: returns the text of a file given by its path, or None when there is none.
        reverse: undo the diff instead.

    Returns:
        The new text of each changed file, None for a removed one.

    Raises:
        ValueError: the text is no diff, is of a binary file or does not fit the files; the message names the file and
            the hunk.
    """
    changed: dict[str, str | None] = {}
    for part in _parse(diff):
        part = part.reversed() if reverse else part
        name = part.new_path or part.old_path
        before = "" if part.old_path is None else changed.get(part.old_path, read(part.old_path))
        if before is None:
            raise ValueError(f"diff of {name}: there is no file {part.old_path}")
        after = _apply_hunks(before, part.hunks, name)
        if part.old_path not in (None, part.new_path):
            changed[part.old_path] = None
        if part.new_path is not None:
            changed[part.new_path] = after
    if not changed:
        raise ValueError(f"diff: it changes no file ({diff[:60]!r}); expected a unified diff")
    return changed


def _apply_hunks(text: str, hunks: list[tuple[_Side, _Side]], name: str | None) -> str:
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    lines = lines if lines[-1] else lines[:-1]
    result: list[str] = []
    position = 0
    for number, (old, new) in enumerate(hunks, start=1):
        if old.index < position or lines[old.index : old.index + len(old.lines)] != old.lines:
            raise ValueError(f"diff of {name}: hunk {number} does not fit at line {old.start}")
        result += lines[position : old.index] + new.lines
        position = old.index + len(old.lines)
    return "".join(result + lines[position:])


def _parse(diff: str) -> list[_FileDiff]:
    parts: list[_FileDiff] = []
    lines = diff.split("\n")
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if match := _GIT_HEADER.match(line):
            parts.append(_FileDiff(old_path=match[1], new_path=match[2]))
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise ValueError(f"diff: {line[:80]!r} is binary; only text files can be changed")
        elif line.startswith("--- ") and position < len(lines) and lines[position].startswith("+++ "):
            _take_paths(parts, line, lines[position])
            position += 1
        elif match := _HUNK_HEADER.match(line):
            if not parts:
                raise ValueError(f"diff: hunk {line[:40]!r} comes before any file name")
            position = _take_hunk(parts[-1], match, lines, position)
        elif parts and not parts[-1].hunks:
            _take_git_line(parts[-1], line)
    return parts


def _take_paths(parts: list[_FileDiff], old_line: str, new_line: str) -> None:
    # git's own header has come right before; a plain diff starts a new file here.
    if not parts or parts[-1].hunks:
        parts.append(_FileDiff())
    parts[-1].old_path, parts[-1].new_path = _path_in(old_line, "a/"), _path_in(new_line, "b/")


def _path_in(line: str, prefix: str) -> str | None:
    path = line[4:].split("\t")[0].rstrip("\r")
    return None if path == "/dev/null" else path.removeprefix(prefix)


def _take_git_line(part: _FileDiff, line: str) -> None:
    if line.startswith("new file mode"):
        part.old_path = None
    elif line.startswith("deleted file mode"):
        part.new_path = None


def _take_hunk(part: _FileDiff, header: re.Match[str], lines: list[str], position: int) -> int:
    """Read the lines of one hunk; return the position after it."""
    numbers = [1 if number is None else int(number) for number in header.groups()]
    old, new = _Side(start=numbers[0], num_lines=numbers[1]), _Side(start=numbers[2], num_lines=numbers[3])
    sides = {" ": (old, new), "-": (old,), "+": (new,), "": (old, new)}
    name = part.new_path or part.old_path
    while len(old.lines) < old.num_lines or len(new.lines) < new.num_lines:
        line = lines[position] if position < len(lines) else "end of the diff"
        if line[:1] not in sides:
            raise ValueError(f"diff of {name}: hunk {len(part.hunks) + 1} is cut off or malformed at {line[:40]!r}")
        position += 1
        for side in sides[line[:1]]:
            side.lines.append(line[1:] + "\n")
        position = _take_missing_line_end(lines, position, sides[line[:1]])
    part.hunks.append((old, new))
    return position


def _take_missing_line_end(lines: list[str], position: int, sides: tuple[_Side, ...]) -> int:
    if position < len(lines) and lines[position].startswith("\\"):
        for side in sides:
            side.lines[-1] = side.lines[-1][:-1]
        return position + 1
    return position
