"""`verl-war report RUN`: what happened in a run, as a page of HTML and a summary in plain text.

RUN is a router's journal (`custom.war.journal_path`), or a directory that holds journals, of a router that was started
again, too, and files of verl's `file` logger. The exit status is 1 when a file is damaged.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from verl_war.compare.series import read_records
from verl_war.core.journal import JournalError, UnreadableError
from verl_war.report.analysis import Analysis, analyse
from verl_war.report.brain import hushed
from verl_war.report.files import find
from verl_war.report.summary import as_text

EXIT_DAMAGED = 1
EXIT_USAGE = 2

LARGE_MB = 20
"""From here on reading takes so long that one asks what is going on: some 2 MB are read in a second."""

NO_JOURNAL = (
    "no journal: what the router did (load, regimes, moves, the critical path) is not in the page; a run writes one "
    "with actor_rollout_ref.rollout.custom.war.journal_path=FILE"
)
"""What is printed where there are only files of metrics."""

DASHBOARD = Path(__file__).parent / "grafana" / "verl_war.json"
"""For Grafana; its queries are to the Prometheus that `rollout.prometheus` of verl sets up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verl-war report`."""
    parser.description = __doc__
    parser.add_argument("source", type=Path, nargs="?", metavar="RUN", help="journal, or directory of a run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)")
    parser.add_argument("--grafana", type=Path, metavar="FILE", help="write the Grafana dashboard there")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Write the page and print the summary.

    Returns:
        The exit status: 0, 1 when a file is damaged, 2 when one cannot be read or an option is wrong.
    """
    stream = stream or sys.stdout
    try:
        if options.source is None and options.grafana is None:
            raise ValueError("name a journal or a directory of a run, or a file for --grafana")
        if options.grafana is not None:
            shutil.copyfile(DASHBOARD, options.grafana)
            stream.write(f"dashboard: {options.grafana}\n")
        if options.source is not None:
            write_report(options.source, options.out, stream)
    except JournalError as error:
        sys.stderr.write(f"verl-war report: {error}\n")
        return EXIT_USAGE if isinstance(error, UnreadableError) else EXIT_DAMAGED
    except (ValueError, OSError) as error:
        sys.stderr.write(f"verl-war report: {error}\n")
        return EXIT_USAGE
    return 0


def write_report(run: Path, out: Path, stream: TextIO) -> None:
    """Read a run, print its summary and write its page.

    Raises:
        JournalError: A journal or a file of metrics is damaged.
        ValueError: There is nothing to report, or matplotlib is missing.
        OSError: The page cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('matplotlib must be installed for this command: pip install "verl_war[recipes]"')
    files = find(run)
    with hushed():
        analyses = [_analyse(path) for path in files.journals]
    logged = {path: _logged(path) for path in files.metrics}
    for analysis in analyses:
        stream.write(as_text(analysis) + "\n\n")
    for path, steps in logged.items():
        stream.write(_metrics_line(path, steps) + "\n")
    if not analyses:
        stream.write(NO_JOURNAL + "\n")
    # Imported late: the summary should not wait for it.
    from verl_war.report.page import page

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(f"WAR: {run.resolve().name}", analyses, logged), encoding="utf-8")
    stream.write(f"page: {out}\n")


def _metrics_line(path: Path, steps: Mapping[int, Mapping[str, float]]) -> str:
    """How many steps a file of metrics has, and how long they took."""
    line = f"{path}: {len(steps)} steps"
    for name, metric in (("step", "timing_s/step"), ("rollout", "timing_s/gen")):
        seconds = [data[metric] for data in steps.values() if metric in data]
        if seconds:
            line += f", median {name} {statistics.median(seconds):.1f} s"
    return line


def _analyse(path: Path) -> Analysis:
    size_mb = path.stat().st_size / 1e6
    if size_mb >= LARGE_MB:
        sys.stderr.write(f"reading {path}, {size_mb:.0f} MB\n")
    return analyse(path)


def _logged(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step; verl writes more than one line for some."""
    steps: dict[int, dict[str, float]] = {}
    try:
        for number, (step, data) in enumerate(read_records(path), 1):
            _require_finite(data, f"{path}:{number}")
            steps.setdefault(step, {}).update(data)
    except ValueError as error:
        raise JournalError(str(error)) from error
    return steps


def _require_finite(data: Mapping[str, float], where: str) -> None:
    for name, value in data.items():
        if not abs(value) <= sys.float_info.max:  # Infinity, NaN, or an integer that is no float
            raise ValueError(
                f"{where}: {name}={value!r:.40} cannot be drawn; expected a finite number; correct or delete the line"
            )
