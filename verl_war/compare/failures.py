"""How a trial fails, how it is noticed when the training itself does not, and what the user is told."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

from verl_war.compare.progress import Follower

TAIL_LINES = 15
DETAIL_LINES = 5
LINE_WIDTH = 300

OUT_OF_MEMORY = "killed due to memory pressure (OOM)"
"""Ray's words when it kills workers because the machine's memory is used up, by whomever."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit)\b[^:]*:")


class TrialFailed(RuntimeError):
    """A trial ended with an error of its own, or would never end."""


class Watchdog:
    """Notices that a training waits for something that will not come: verl has no time-out for its rollouts.

    Args:
        name: Name of the trial.
        log: Console output of the training.
        metrics: File that grows with every step.
        stall_s: Longest time without a step that is taken for work, start-up included; 0 for no limit.
        clock: Seconds that only go up.
    """

    def __init__(
        self, name: str, log: Path, metrics: Path, stall_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._log_path, self._stall_s, self._clock = name, log, stall_s, clock
        self._log, self._metrics = Follower(log, from_end=True), Follower(metrics)
        self._progress_s = clock()

    def check(self) -> None:
        """Look for news.

        Raises:
            TrialFailed: The training cannot go on, or has not moved for too long.
        """
        if self._metrics.read():
            self._progress_s = self._clock()
        if OUT_OF_MEMORY in self._log.read():
            raise TrialFailed(
                f"{self._name}: Ray killed workers because the machine ran out of memory, and verl would wait for them "
                f"for ever; end other programs and repeat the command. Full log: {self._log_path}"
            )
        if 0 < self._stall_s < self._clock() - self._progress_s:
            raise TrialFailed(
                f"{self._name}: no step ended within {self._stall_s / 60:.0f} minutes; if your steps take that long, "
                f"raise --stall-minutes. Full log: {self._log_path}"
            )


def failure_message(name: str, code: int, log: Path) -> str:
    """What went wrong, as far as the log tells: its last exception with what belongs to it, then where to look."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line[:LINE_WIDTH] for line in _ANSI.sub("", text).replace("\r", "\n").splitlines() if line.strip()]
    # The driver's own exception names the cause; what Ray repeats from other processes is marked with their names.
    ends = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    end = ends[-1] if ends else len(lines) - 1
    details = itertools.takewhile(lambda line: line[:1].isspace(), lines[end + 1 : end + 1 + DETAIL_LINES])
    shown = [*lines[max(0, end + 1 - TAIL_LINES) : end + 1], *details]
    return "\n".join([f"{name} failed with exit status {code}; the end of its log:", *shown, f"full log: {log}"])
