"""Ways to run the tests of a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.code_agent import runner
from recipes.code_agent.tasks import Task


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


TestRunner = Callable[[Path, Task], TestOutcome]


def run_in_process(root: Path, task: Task) -> TestOutcome:
    """Run the tests of a generated task in this process, in a few milliseconds.

    Only for code that our own scripts wrote: nothing protects this process. Must be called in the main thread.
    """
    text, passed = runner.run_tests(str(root), task.test_files)
    return TestOutcome(text=text, passed=passed)
