"""Ways to run the tests of a task: sandboxed, or in this process for code that our own scripts wrote."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.code_agent import runner
from recipes.code_agent.sandbox import GRACE_S, SandboxLimits, SandboxResult, SandboxRun
from recipes.code_agent.tasks import EXIT_STATUS_TEST, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """What a run of the tests said.

    Attributes:
        text: output for the agent.
        passed: for each test id that reported, whether it passed.
    """

    __test__ = False  # no test class, whatever its name

    text: str
    passed: dict[str, bool]

    def num_passed(self, test_ids: tuple[str, ...]) -> int:
        """Return how many of the tests passed; those that did not report failed."""
        return sum(self.passed.get(test_id, False) for test_id in test_ids)


class TestRunner(Protocol):
    """Runs the tests of one workspace, one run at a time."""

    __test__ = False

    max_duration_s: float
    """Longest time that a run takes, waiting for its turn not counted."""

    def run(self, root: Path, task: Task) -> TestOutcome:
        """Run the task's tests on the files below ``root``."""

    def stop(self) -> None:
        """End a run that is under way in another thread, and refuse later ones."""


class InProcessTests:
    """Runs generated tasks in this process, in a few milliseconds and with the same output as the sandbox.

    Only for code that our own scripts wrote: nothing protects this process. Must be used in the main thread.
    """

    max_duration_s = math.inf

    def run(self, root: Path, task: Task) -> TestOutcome:
        """See :class:`TestRunner`."""
        text, passed = runner.run_tests(str(root), task.test_files)
        return TestOutcome(text=text, passed=passed)

    def stop(self) -> None:
        """There is never anything to stop."""


_RUNNER_SOURCE = Path(runner.__file__).read_text(encoding="utf-8")
_MIN_REPORT_BYTES = 1 << 18
"""Room for the report of a few thousand tests."""


class SandboxedTests:
    """Runs tests in the sandbox: a task's own command, or else the small runner of generated tasks."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.max_duration_s = limits.wall_s + GRACE_S
        self._limits = limits
        self._guard = threading.Lock()
        self._stopped = False
        self._current: SandboxRun | None = None

    def run(self, root: Path, task: Task) -> TestOutcome:
        """See :class:`TestRunner`.

        Raises:
            SandboxError: the tests could not be isolated, and so were not run.
        """
        return self._run_command(root, task) if task.test_command else self._run_generated(root, task)

    def stop(self) -> None:
        """See :class:`TestRunner`."""
        with self._guard:
            self._stopped = True
            if self._current is not None:
                self._current.kill()

    def _wait(self, run: SandboxRun) -> SandboxResult:
        with self._guard:
            self._current = run
            if self._stopped:
                run.kill()
        return run.wait()

    def _run_generated(self, root: Path, task: Task) -> TestOutcome:
        secret = secrets.token_hex(16)
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _RUNNER_SOURCE]
        limits = dataclasses.replace(self._limits, output_bytes=max(self._limits.output_bytes, _MIN_REPORT_BYTES))
        stdin = "\n".join([secret, *task.test_files]).encode()
        result = self._wait(SandboxRun(command, root, limits, stdin=stdin))
        text, found, report = result.output.partition(f"\n{secret}\n")
        if not found:
            return TestOutcome(text=_ended_early(result), passed={})
        lines = [line.rpartition("\t") for line in report.splitlines()]
        return TestOutcome(text=text, passed={test_id: status == "passed" for test_id, _, status in lines})

    def _run_command(self, root: Path, task: Task) -> TestOutcome:
        command = ["/bin/sh", "-c", task.test_command]
        result = self._wait(SandboxRun(command, root, self._limits, writable_copy=True))
        passed = parse_statuses(result.output) | {EXIT_STATUS_TEST: result.exit_code == 0}
        end = f"\n{_ended_early(result)}" if result.killed_reason else ""
        return TestOutcome(text=result.output + end, passed=passed)


def _ended_early(result: SandboxResult) -> str:
    if result.killed_reason:
        return f"tests ended: {result.killed_reason} limit exceeded"
    last = result.output[-500:].strip()
    return f"tests ended early with exit code {result.exit_code}" + (f"\n{last}" if last else "")


_PASSED, _NOT_PASSED = ("PASSED", "XFAIL", "XPASS"), ("FAILED", "ERROR", "SKIPPED")
_STATUS = "|".join(_PASSED + _NOT_PASSED)
_STATUS_FIRST = re.compile(rf"^(?:(PASSED) (\S+::.+)|({_STATUS}) (\S+::.+?)(?: - .*)?)$")
"""All but PASSED may have a reason behind a dash; a dash can also be part of an id."""
_STATUS_LAST = re.compile(rf"^(\S+::.+?) ({_STATUS})\b")


def parse_statuses(output: str) -> dict[str, bool]:
    """Read pytest's status lines, of the summary (``-rA``) or of the verbose form (``-v``).

    Returns:
        For each test id whether it passed; a test that is reported twice must pass twice.
    """
    passed: dict[str, bool] = {}
    for line in output.splitlines():
        if match := _STATUS_FIRST.match(line):
            status, test_id = match[1] or match[3], match[2] or match[4]
        elif match := _STATUS_LAST.match(line):
            test_id, status = match.groups()
        else:
            continue
        passed[test_id] = passed.get(test_id, True) and status in _PASSED
    return passed
