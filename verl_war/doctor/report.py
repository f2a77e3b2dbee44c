"""What a check found, and how the whole is shown: to people as text, to programs as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

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

    def as_text(self) -> str:
        """Returns the report for people: one line per check, the remedy below what is wrong."""
        lines = [f"verl_war {__version__} on a {self.machine} machine"]
        for item in self.checks:
            lines.append(f"{_SIGNS[item.status]} {item.name}: {item.detail}")
            if item.remedy:
                lines.append(f"       -> {item.remedy}")
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        counts = {status: sum(item.status == status for item in self.checks) for status in _SIGNS}
        verdict = "Everything is as it must be" if self.ok else "Runs will not work like this"
        return f"{verdict}: {counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed."


def report(machine: Machine, checks: Iterable[Check]) -> Report:
    """Collects ``checks`` into a report."""
    return Report(machine, tuple(checks))
