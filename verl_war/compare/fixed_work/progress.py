"""What a person sees while the runs are made: what goes on now, how many are done, and the time that is left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TextIO

from verl_war.compare.fixed_work import records
from verl_war.compare.fixed_work.plan import FixedWorkPlan, Run
from verl_war.compare.progress import Display

MARK = "verl-war> "
"""Begins the lines of the working process that are for people."""


class RunsDisplay(Display):
    """Progress of a comparison, from the working process's output and its records."""

    def __init__(self, plan: FixedWorkPlan, stream: TextIO) -> None:
        self._plan, self._runs = plan, plan.runs()
        self._seconds: dict[str, float] = {}
        # A run that failed before has a record already, and is made again.
        directory = plan.runs_directory
        self._failed = {
            run.name: records.attempts(directory, run) for run in self._runs if not records.is_done(directory, run)
        }
        super().__init__("runs", len(self._runs), plan.console_log, plan.runs_directory, stream)

    def _follow_log(self, text: str) -> None:
        said = [line[len(MARK) :] for line in text.splitlines() if line.startswith(MARK)]
        if said:
            self._phase = said[-1]
            self._show()

    def _follow_metrics(self) -> None:
        for run in self._runs:
            path = records.path_of(self._plan.runs_directory, run)
            if run.name not in self._seconds and path.exists():
                record = records.load(path, run)
                if record.attempt > self._failed.get(run.name, 0):
                    self._seconds[run.name] = record.totals["makespan_s"]
        done = len(self._seconds)
        if done > self._shown_step:
            self._shown_step = done
            left_s = seconds_left(self._runs, self._seconds)
            self._status = f"{done}/{len(self._runs)} runs" + (f", about {left_s / 60:.0f} min left" if left_s else "")
            self._show()


def seconds_left(runs: Sequence[Run], seconds: Mapping[str, float]) -> float:
    """Time for the runs that are missing, as long as those of the same load took; of another load, in proportion."""
    by_load: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        if run.name in seconds:
            by_load[run.case.load].append(seconds[run.name])
    if not by_load:
        return 0.0
    nearest: Callable[[float], float] = lambda load: min(by_load, key=lambda known: abs(known - load))  # noqa: E731
    total = 0.0
    for run in runs:
        if run.name not in seconds:
            known = nearest(run.case.load)
            total += fmean(by_load[known]) * run.case.load / known
    return total
