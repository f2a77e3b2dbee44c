"""The live view as text: the fleet in two lines, then a line for each replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_war.core.fleet import Replica
from verl_war.core.journal import JournalError
from verl_war.report.brain import Brain
from verl_war.report.rollout import Rollout, Seen
from verl_war.report.steps import Step
from verl_war.report.summary import duration, features

BAR = 10
"""Characters of a bar of KV usage."""

RATE_OVER_S = 10.0
"""Rates are means over so long: turns end in bursts."""

BOLD, DIM, GREEN, YELLOW, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"

Paint = Callable[[str, str], str]
"""Colour and text -> text for the terminal."""

COLUMNS = (
    f"{'replica':<22} {'live':>5} {'fly':>4} {'run':>4} {'wait':>5}  {'KV in use':<{BAR + 5}} {'set':>5} {'slow':>5}"
)
SPECULATION_COLUMNS = f" {'regime':>6} {'accept':>6} {'budget':>6}"


@dataclass(slots=True)
class _Rate:
    """Sum of what was added in the last `RATE_OVER_S`."""

    added: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now_s: float, amount: float) -> None:
        self.added.append((now_s, amount))
        self.per_s(now_s)

    def per_s(self, now_s: float) -> float:
        while self.added and self.added[0][0] < now_s - RATE_OVER_S:
            self.added.popleft()
        return sum(amount for _, amount in self.added) / RATE_OVER_S


class View:
    """What a journal has told so far."""

    def __init__(self, header: Any) -> None:
        """Begin with the header.

        Raises:
            JournalError: It is none.
        """
        self._brain = Brain(header)
        self._config: Mapping[str, Any] = header.get("config") or {}
        self._rates: dict[str, _Rate] = {}
        self._rollout = Rollout(self._count)

    def apply(self, record: Any) -> None:
        """Take in an event.

        Raises:
            JournalError: It is damaged.
        """
        if not isinstance(record, Mapping):
            raise JournalError(f"{record!r:.80} is no event")
        self._brain.apply(record)
        self._rollout.apply(record)

    def lines(self, rows: int, is_coloured: bool, remarks: list[str]) -> list[str]:
        """The screen.

        Args:
            rows: How many lines fit.
            is_coloured: Whether the terminal takes ANSI colours.
            remarks: What to say below the head.
        """
        paint = _paint if is_coloured else _plain
        replicas = sorted(self._rollout.replicas.values(), key=lambda seen: seen.index)
        has_speculation = any(seen.speculation is not None for seen in replicas)
        beliefs = {replica.replica_id: replica for replica in self._brain.replicas()}
        lines = [*self._head(paint), *(paint(YELLOW, remark) for remark in remarks if remark), ""]
        lines.append(paint(DIM, COLUMNS + SPECULATION_COLUMNS * has_speculation))
        room = max(1, rows - len(lines) - 1)
        for seen in replicas[:room]:
            lines.append(_line(seen, beliefs.get(seen.replica_id), has_speculation, paint))
        if len(replicas) > room:
            lines.append(paint(DIM, f"... and {len(replicas) - room} more replicas; a taller window shows them"))
        return lines

    def _head(self, paint: Paint) -> list[str]:
        rollout = self._rollout
        step = rollout.steps[-1] if rollout.steps else None
        held = len(rollout.held)
        oldest_s = max((rollout.now_s - since_s for since_s in rollout.held.values()), default=0.0)
        waiting = f", oldest for {oldest_s:.1f} s" if held else ""
        rates = [f"{self._rate(name):,.0f} {label}" for name, label in (
            ("completion_tokens", "tokens/s of finished turns"),
            ("computed_tokens", "tokens/s computed"),
        )]  # fmt: skip
        return [
            paint(BOLD, _step_line(step, rollout.now_s)),
            f"held {held:,}{waiting} | " + " | ".join(rates) + f" | moved {rollout.moves:,} of {rollout.turns:,} turns",
            paint(DIM, f"on: {features(self._config)}"),
        ]

    def _count(self, name: str, replica_id: str, amount: float) -> None:
        if name in ("completion_tokens", "computed_tokens"):
            self._rates.setdefault(name, _Rate()).add(self._rollout.now_s, amount)

    def _rate(self, name: str) -> float:
        return self._rates.get(name, _Rate()).per_s(self._rollout.now_s)


def _step_line(step: Step | None, now_s: float) -> str:
    if step is None:
        return "no rollout yet"
    of = f" of {max(step.announced, step.begun):,}"
    failed = f" ({step.failed:,} failed)" if step.failed else ""
    if step.ended and step.ended >= max(step.announced, step.begun):
        return f"{step.name}: {step.ended:,}{of} trajectories done{failed}, makespan {duration(step.makespan_s)}"
    live = f"{step.begun - step.ended:,} live"
    return f"{step.name}: {step.ended:,}{of} trajectories done{failed}, {live}, for {duration(now_s - step.begin_s)}"


def _line(seen: Seen, belief: Replica | None, has_speculation: bool, paint: Paint) -> str:
    name = seen.replica_id if len(seen.replica_id) <= 22 else seen.replica_id[:20] + ".."
    if not seen.in_pool:
        return paint(RED, f"{name:<22} out of the pool")
    snapshot = seen.snapshot
    running, waiting = (snapshot.running_requests, snapshot.waiting_requests) if snapshot is not None else ("-", "-")
    usage = snapshot.kv_usage if snapshot is not None else None
    slow = f"{belief.pace.slowness:.2f}" if belief is not None else "-"
    line = f"{name:<22} {seen.live:>5} {seen.inflight:>4} {running:>4} {waiting:>5}  {_bar(usage, paint)} "
    line += f"{_working_set(belief)} {slow:>5}"
    return line + _speculation(seen, paint) if has_speculation else line


def _bar(usage: float | None, paint: Paint) -> str:
    if usage is None:
        return f"{'-':<{BAR + 5}}"
    filled = round(usage * BAR)
    colour = GREEN if usage < 0.7 else YELLOW if usage < 0.9 else RED
    return f"{paint(colour, '#' * filled)}{'.' * (BAR - filled)} {100 * usage:>3.0f}%"


def _working_set(belief: Replica | None) -> str:
    """Working set over what is trusted of the KV capacity."""
    if belief is None or not belief.capacity_tokens:
        return f"{'-':>5}"
    return f"{100 * belief.working_set_tokens / belief.trusted_tokens:>4.0f}%"


def _speculation(seen: Seen, paint: Paint) -> str:
    reading, grown = seen.speculation, seen.since_last()
    if reading is None:
        return f" {'-':>6} {'-':>6} {'-':>6}"
    share = f"{100 * grown.accepted_tokens / grown.drafted_tokens:.0f}%" if grown and grown.drafted_tokens else "-"
    regime = paint(GREEN if reading.regime == "low" else DIM, f"{reading.regime:>6}")
    return f" {regime} {share:>6} {reading.budget_tokens:>6}"


def _paint(colour: str, text: str) -> str:
    return f"{colour}{text}{RESET}" if text else text


def _plain(colour: str, text: str) -> str:
    del colour
    return text
