"""What a check found, and how the whole is shown: to people as text, to programs as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

from verl_war.support import Machine
from verl_war.version import __version__

SCHEMA = 1
"""Number of the JSON layout; a change that is not a mere addition raises it."""

Status = Literal["ok", "warning", "failed"]
_SIGNS: dict[str, str] = {"ok": "ok  ", "warning": "WARN", "failed": "FAIL"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: ``area.subject``, stable between releases.
        status: ``failed`` when a run will not work, ``warning`` when it may not.
        detail: What was found and what was expected.
        remedy: What to do about it; empty when the status is ``ok``.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def as_text(self) -> str:
        """Returns the finding for people: a line, and below it the remedy of what is wrong."""
        line = f"{_SIGNS[self.status]} {self.name}: {self.detail}"
        return f"{line}\n       -> {self.remedy}" if self.remedy else line


def check(name: str, good: bool, detail: str, remedy: str, otherwise: Status = "failed") -> Check:
    """Returns an ``ok`` check when ``good``, else one with status ``otherwise`` and the remedy."""
    return Check(name, "ok", detail) if good else Check(name, otherwise, detail, remedy)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings for one machine."""

    machine: Machine
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return all(item.status != "failed" for item in self.checks)

    def as_json(self) -> str:
        """Returns the report as JSON.

        An object of ``schema`` (number, see :data:`SCHEMA`), ``verl_war`` (version), ``machine`` (``cpu`` or ``gpu``),
        ``ok`` (boolean) and ``checks``, a list of objects with the attributes of :class:`Check`, all strings.
        """
        body: dict[str, Any] = {"schema": SCHEMA, "verl_war": __version__, "machine": self.machine, "ok": self.ok}
        return json.dumps({**body, "checks": [asdict(item) for item in self.checks]}, indent=2)

    def summary(self) -> str:
        """Returns the verdict, and how many checks came out how."""
        counts = {status: sum(item.status == status for item in self.checks) for status in _SIGNS}
        verdict = "Everything is as it must be" if self.ok else "Runs will not work like this"
        return f"{verdict}: {counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed."


def report(machine: Machine, checks: Iterable[Check], stream: TextIO | None = None) -> Report:
    """Collects ``checks`` into a report; with ``stream`` each is shown as it is found, as some take half a minute."""
    found = []
    if stream is not None:
        print(f"verl_war {__version__} on a {machine} machine", file=stream, flush=True)
    for item in checks:
        found.append(item)
        if stream is not None:
            print(item.as_text(), file=stream, flush=True)
    result = Report(machine, tuple(found))
    if stream is not None:
        print(result.summary(), file=stream, flush=True)
    return result
