"""Traces of a scripted agent that often errs, to clone a first policy from.

Every trace really runs the tools on a generated task. The scripted agent knows the bug but is made unreliable on
purpose: it reads the wrong file, quotes a line wrongly, writes a plausible wrong fix, gives up or forgets to check.
A model that clones it solves some of the tasks and fails at decisions that reinforcement learning can sharpen.

Format of a trace (JSON-compatible)::

    {"messages": [{"role": "system", "content": ...}, {"role": "user", "content": ...},
                  {"role": "assistant", "content": "", "tool_calls": [
                      {"type": "function", "function": {"name": "read_file", "arguments": {"path": ...}}}]},
                  {"role": "tool", "content": ...}, ...,
                  {"role": "assistant", "content": "Fixed."}],
     "tools": [tool schemas],
     "task_id": str, "solved": bool}

Calls have no id and their arguments are objects: that is what verl renders with the Hermes format.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipes.code_agent.actions import perform, tool_schemas
from recipes.code_agent.generate import SIZES, GeneratedTask, PackageSize, generate
from recipes.code_agent.tasks import prompt_messages
from recipes.code_agent.testing import InProcessTests
from recipes.code_agent.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Probabilities of the scripted agent's errors, each at one kind of decision."""

    skip_first_run: float = 0.1
    """Start without running the tests: the agent then guesses which file to read."""
    list_first: float = 0.5
    """Look at the list of files; costs a turn, does no harm."""
    wrong_file: float = 0.1
    give_up_early: float = 0.05
    """End after having looked, without an edit."""
    wrong_quote: float = 0.08
    """The text to replace is not in the file."""
    wrong_fix: float = 0.45
    give_up: float = 0.55
    """After each failure."""
    skip_check: float = 0.15
    """End right after an edit instead of running the tests."""
    max_attempts: int = 2
    """Edits that the agent tries."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "max_attempts" and not 0 <= value <= 1:
                raise ValueError(f"noise: {name} is {value}; expected a probability in 0..1")
        if self.max_attempts < 1:
            raise ValueError(f"noise: max_attempts is {self.max_attempts}; expected at least 1")


def demonstrations(
    num_traces: int,
    seed: int,
    *,
    noise: Noise = Noise(),  # noqa: B008 - immutable
    size: PackageSize = SIZES["demo"],
) -> Iterator[dict[str, Any]]:
    """Yield traces, about 15 ms each; the same arguments give the same traces.

    The tasks are none of those that :mod:`recipes.code_agent.prepare_data` writes for the same seed. Must be called
    in the main thread.
    """
    for index in range(num_traces):
        generated = generate(-1 - seed, index, size)
        rng = random.Random(f"demonstrations/{seed}/{index}")
        with Workspace(generated.task, InProcessTests()) as workspace:
            agent = _ScriptedAgent(generated, workspace, rng, noise)
            agent.play()
            outcome = workspace.score()
        solved = all(outcome.passed.get(test_id, False) for test_id in generated.task.required_tests)
        yield {
            "messages": agent.messages,
            "tools": tool_schemas(),
            "task_id": generated.task.task_id,
            "solved": solved,
        }


class _ScriptedAgent:
    """One trajectory; ``messages`` grows as it plays."""

    def __init__(self, generated: GeneratedTask, workspace: Workspace, rng: random.Random, noise: Noise) -> None:
        self.messages: list[dict[str, Any]] = list(prompt_messages(generated.task))
        self._bug = generated.bug
        self._files = generated.task.files
        self._workspace = workspace
        self._rng = rng
        self._noise = noise
        self._replaced = self._bug.broken
        """What stands where the bug was."""

    def play(self) -> None:
        self._explore()
        for _ in range(0 if self._chance(self._noise.give_up_early) else self._noise.max_attempts):
            if self._attempt():
                return
            if self._chance(self._noise.give_up):
                break
        self._say("I could not fix it.")

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _call(self, tool: str, **arguments: str) -> str:
        function = {"name": tool, "arguments": arguments}
        self.messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        result = perform(self._workspace, tool, arguments)
        self.messages.append({"role": "tool", "content": result})
        return result

    def _say(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def _explore(self) -> None:
        """Find the broken module: by the failing test's name, or by guessing."""
        informed = not self._chance(self._noise.skip_first_run)
        if informed:
            self._call("run_tests")
        if not informed or self._chance(self._noise.list_first):
            self._call("list_files")
        wrong = 0.5 if not informed else self._noise.wrong_file
        others = [path for path in self._files if path != self._bug.path and self._files[path]]
        if self._chance(wrong):
            self._call("read_file", path=self._rng.choice(others))
        self._call("read_file", path=self._bug.path)

    def _attempt(self) -> bool:
        """Edit and check; return whether the agent believes that it is done (and has said so)."""
        quote = self._misquoted() if self._chance(self._noise.wrong_quote) else self._replaced
        fix = self._wrong_fix() if self._chance(self._noise.wrong_fix) else self._bug.line
        if quote == fix:
            fix = self._bug.line
        result = self._call("edit_file", path=self._bug.path, search=quote, replace=fix)
        if result.startswith("Error"):
            return False
        self._replaced = fix
        if not self._chance(self._noise.skip_check) and "FAIL" in self._call("run_tests"):
            return False
        self._say("Fixed.")
        return True

    def _wrong_fix(self) -> str:
        forms = [form for form in self._bug.wrong_fixes if form != self._replaced]
        return self._rng.choice(forms) if forms else self._bug.line + " + 1"

    def _misquoted(self) -> str:
        """Return a line that resembles the broken one but is not in the file."""
        return self._bug.line if self._bug.line not in self._files[self._bug.path] else self._replaced + ":"
