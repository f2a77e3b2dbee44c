"""What a code-repair task is, and its JSON form inside a verl dataset row.

JSON form of a task (``extra_info["task"]`` of a row)::

    {"task_id": "demo-0-17",                     unique name
     "statement": "Package shop has a bug ...",  shown to the agent, never names the fix
     "files": {"shop/price.py": "def ..."},      text files, written over the snapshot if there is one
     "snapshot": null,                           directory or archive of a repository, see ``snapshots.py``
     "test_files": ["tests/test_price.py"],      read-only for the agent and restored before scoring
     "hidden_files": {},                         written just before scoring, so that the agent never sees them
     "fail_to_pass": ["tests/test_price.py::test_add_tax"],
     "pass_to_pass": [...],
     "test_command": null}                       null: the built-in runner; otherwise a shell command

Test ids are pytest's: ``path::name``. The id ``*`` of a task with a command means that it ends with exit status 0.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

EXIT_STATUS_TEST = "*"
"""Stands for all tests of a command whose output has no status lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One code-repair task; see the module's docstring for the fields."""

    task_id: str
    statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    test_files: tuple[str, ...] = ()
    hidden_files: dict[str, str] = field(default_factory=dict)
    test_command: str | None = None

    def __post_init__(self) -> None:
        for name in ("task_id", "statement"):
            if not getattr(self, name).strip():
                raise ValueError(f"task {self.task_id!r}: {name} is empty; give it a text")
        if not self.files and self.snapshot is None:
            raise ValueError(f"task {self.task_id!r}: neither files nor snapshot given; give one of them")
        if not self.fail_to_pass:
            raise ValueError(f"task {self.task_id!r}: fail_to_pass is empty; name the tests that the fix must pass")

    @property
    def required_tests(self) -> tuple[str, ...]:
        """Ids of all tests that have to pass for the task to be solved."""
        return self.fail_to_pass + self.pass_to_pass

    def to_json(self) -> str:
        """Return the JSON form, with keys in a fixed order."""
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read the JSON form.

        Raises:
            ValueError: the text is no JSON object, or a field is missing, unknown or of a wrong type.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"task: expected a JSON object, got broken JSON ({error}); prepare the data anew"
            ) from error
        if not isinstance(raw, dict):
            raise ValueError(f"task: expected a JSON object, got {type(raw).__name__}; prepare the data anew")
        return cls(**_checked_fields(raw))


SYSTEM_PROMPT = "You repair Python packages with the tools."


def prompt_messages(task: Task) -> list[dict[str, str]]:
    """Return the chat messages that a trajectory of the task starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.statement}]


_TEXT, _OPTIONAL_TEXT, _NAMES, _FILES = "a text", "a text or null", "a list of texts", "an object of path to text"
_FIELD_KINDS = {
    "task_id": _TEXT,
    "statement": _TEXT,
    "fail_to_pass": _NAMES,
    "pass_to_pass": _NAMES,
    "files": _FILES,
    "snapshot": _OPTIONAL_TEXT,
    "test_files": _NAMES,
    "hidden_files": _FILES,
    "test_command": _OPTIONAL_TEXT,
}


def _is_kind(value: Any, kind: str) -> bool:
    if kind == _NAMES:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == _FILES:
        return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)
    return isinstance(value, str) or (kind == _OPTIONAL_TEXT and value is None)


def _checked_fields(raw: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(raw.keys() - _FIELD_KINDS.keys()):
        raise ValueError(f"task: unknown field {unknown[0]!r}; allowed are {', '.join(_FIELD_KINDS)}")
    for name in ("task_id", "statement", "fail_to_pass"):
        if name not in raw:
            raise ValueError(f"task: field {name!r} is missing; prepare the data anew")
    for name, value in raw.items():
        if not _is_kind(value, _FIELD_KINDS[name]):
            raise ValueError(f"task: {name} must be {_FIELD_KINDS[name]}, got {value!r:.80}; prepare the data anew")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
