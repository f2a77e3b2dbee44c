"""The files of one trajectory: what the agent's tools see and change, and what is scored at the end.

A workspace is a directory of its own. Paths are relative to it, and nothing outside can be named: neither by ``..``
or an absolute path, nor through a symbolic link. Test files can be read but not changed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from recipes.code_agent.scratch import new_directory, remove_tree
from recipes.code_agent.snapshots import unpack, write_files
from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import TestOutcome, TestRunner

logger = logging.getLogger(__name__)


class ToolInputError(Exception):
    """What the agent asked for can't be done; the text is for the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceLimits:
    """Bounds on what tools return and store."""

    max_output_chars: int = 20_000
    """Longest text that a tool returns, about 5,000 tokens; longer files are read in parts."""
    max_list_entries: int = 400
    max_file_bytes: int = 2_000_000
    max_edited_bytes: int = 20_000_000
    """Sum over all edits of a trajectory."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"workspace: {name} is {getattr(self, name)}; expected at least 1")


_HIDDEN_NAMES = {".git", "__pycache__", ".pytest_cache"}
_TEST_SETTINGS = {"conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py"}
"""Files that change how tests run; writing one would be a way to pass without a fix."""


_CLOSE_TIMEOUT_S = 60.0

Method = TypeVar("Method", bound=Callable[..., Any])


def _exclusive(method: Method) -> Method:
    """Let one thread at a time use the workspace, and none after it was closed."""

    @wraps(method)
    def wrapper(self: Workspace, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            if self._closed:
                raise ToolInputError("the workspace is closed")
            return method(self, *args, **kwargs)

    return cast(Method, wrapper)


class Workspace:
    """Files and tools of one trajectory; use it as a context manager, or call :meth:`close`.

    Methods block on files and processes. They return the text for the agent.

    Args:
        task: what to repair.
        tests: runs the tests; used by this workspace alone.
        limits: bounds on outputs and edits.
    """

    def __init__(self, task: Task, tests: TestRunner, limits: WorkspaceLimits = WorkspaceLimits()) -> None:  # noqa: B008 - immutable
        self.task = task
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """How often something happened: ``edits``, ``test_runs``, ``errors``."""
        self.max_test_s = tests.max_duration_s
        """Longest time that a test run may take."""
        self._tests = tests
        self._guard = threading.Lock()
        """Held by whoever uses the files, so that nothing is written after they have been removed."""
        self._closed = False
        self._edited_bytes = 0
        self._read_only = set(task.test_files) | set(task.hidden_files)
        self.root = new_directory("workspace")
        try:
            # A sandboxed program may run as another user, who must be able to read.
            self.root.chmod(0o755)
            if task.snapshot is not None:
                unpack(Path(task.snapshot), self.root)
            write_files(self.root, task.files)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Workspace({self.task.task_id})"

    def close(self) -> None:
        """End a running test and remove the directory; may be called twice, and from another thread."""
        self._tests.stop()
        if not self._guard.acquire(timeout=_CLOSE_TIMEOUT_S):
            logger.error("%r is still in use; its directory is left until this process ends", self)
            return
        try:
            self._closed = True
            remove_tree(self.root)
        finally:
            self._guard.release()

    @_exclusive
    def list_files(self, path: str = ".") -> str:
        """Return the paths of all files below ``path``, one per line."""
        directory = self._resolve(path)
        if not directory.is_dir():
            raise ToolInputError(f"{path} is no directory")
        paths = sorted(self._walk(directory))
        shown = paths[: self.limits.max_list_entries]
        if len(paths) > len(shown):
            shown.append(f"[{len(paths) - len(shown)} more; name a directory]")
        return self._clip("\n".join(shown))

    @_exclusive
    def read_file(self, path: str, start: int = 1) -> str:
        """Return the text of a file from line ``start`` (from 1) on, as far as it fits."""
        lines = self._read(path).splitlines(keepends=True)
        if not 1 <= start <= max(1, len(lines)):
            raise ToolInputError(f"start must be 1 to {max(1, len(lines))}")
        text, number = "", start
        while number <= len(lines) and len(text) + len(lines[number - 1]) <= self.limits.max_output_chars:
            text += lines[number - 1]
            number += 1
        if number > len(lines):
            return text
        return text + f"[continues at line {number} of {len(lines)}]" if text else self._clip(lines[number - 1])

    @_exclusive
    def edit_file(self, path: str, search: str, replace: str) -> str:
        """Replace the only occurrence of ``search``; an empty ``search`` creates a new file."""
        target = self._resolve(path)
        name = target.relative_to(self.root).as_posix()
        if name in self._read_only or target.name in _TEST_SETTINGS:
            raise ToolInputError(f"{name} is read-only")
        if search:
            text = self._replaced(path, search, replace)
        elif target.exists():
            raise ToolInputError("search is empty")
        else:
            text = replace
        self._write(target, text)
        self.counts["edits"] += 1
        return f"edited {name}"

    @_exclusive
    def run_tests(self) -> str:
        """Run the task's tests and return their output."""
        self.counts["test_runs"] += 1
        return self._clip(self._tests.run(self.root, self.task).text)

    @_exclusive
    def score(self) -> TestOutcome:
        """Restore the test files, add the hidden ones and run everything once more."""
        originals = {path: self.task.files[path] for path in self.task.test_files if path in self.task.files}
        write_files(self.root, originals | self.task.hidden_files)
        return self._tests.run(self.root, self.task)

    def _resolve(self, path: str) -> Path:
        if not path or "\0" in path or len(path) > 1000:
            raise ToolInputError("path is empty or not a path")
        try:
            resolved = Path(os.path.realpath(self.root / path))
        except OSError as error:
            raise ToolInputError(f"{path}: {error.strerror}") from error
        if not resolved.is_relative_to(self.root):
            raise ToolInputError(f"{path} is outside of the package")
        return resolved

    def _walk(self, directory: Path) -> Iterator[str]:
        for folder, folders, names in os.walk(directory):
            folders[:] = sorted(set(folders) - _HIDDEN_NAMES)
            for name in names:
                yield os.path.relpath(os.path.join(folder, name), self.root)

    def _read(self, path: str) -> str:
        target = self._resolve(path)
        if not target.is_file():
            raise ToolInputError(f"no file {path}")
        if target.stat().st_size > self.limits.max_file_bytes:
            raise ToolInputError(f"{path} is larger than {self.limits.max_file_bytes} bytes")
        try:
            return target.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolInputError(f"{path} is not a text file") from error

    def _replaced(self, path: str, search: str, replace: str) -> str:
        text = self._read(path)
        count = text.count(search)
        if count == 0:
            raise ToolInputError(f"search text not found in {path}")
        if count > 1:
            raise ToolInputError(f"search text found {count} times in {path}")
        if search == replace:
            raise ToolInputError("search and replace are equal")
        return text.replace(search, replace)

    def _write(self, target: Path, text: str) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ToolInputError("replace holds characters that are no text") from error
        self._edited_bytes += len(data)
        if len(data) > self.limits.max_file_bytes or self._edited_bytes > self.limits.max_edited_bytes:
            raise ToolInputError("the edit is too large")
        try:
            write_files(self.root, {target.relative_to(self.root).as_posix(): text})
        except OSError as error:
            raise ToolInputError(f"{target.name}: {error.strerror}") from error

    def _clip(self, text: str) -> str:
        """Keep the beginning and the end of a text that is too long."""
        half, excess = self.limits.max_output_chars // 2, len(text) - self.limits.max_output_chars
        return text if excess <= 0 else f"{text[:half]}\n[{excess} characters left out]\n{text[-half:]}"
