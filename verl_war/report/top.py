"""`verl-war top FILE`: a run as it goes on, from the journal that its router writes.

Columns: `live` trajectories whose last turn was placed there, `fly` turns in flight, `run` and `wait` requests in the
engine, KV blocks in use, `set` the working set over what admission trusts of the KV, `slow` measured over modelled
seconds of engine steps, regime, accepted over drafted tokens between the last two readings, longest draft allowed.

Without a terminal it prints one picture and ends. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from verl_war.core.journal import JournalError, UnreadableError
from verl_war.report.brain import hushed
from verl_war.report.screen import View
from verl_war.report.tail import Tail

EXIT_DAMAGED = 1
EXIT_USAGE = 2

REDRAW_EVERY_S = 0.5
"""The router writes its journal once a second."""

SILENT_AFTER_S = 5.0
"""A router that watches engines writes every second; without events of any kind there is something to say."""

HOME, TO_END, HIDE_CURSOR, SHOW_CURSOR = "\x1b[H", "\x1b[J", "\x1b[?25l", "\x1b[?25h"
CLEAR_LINE = "\x1b[K"
ALTERNATE, ORIGINAL = "\x1b[?1049h", "\x1b[?1049l"
CUT_LINES, WRAP_LINES = "\x1b[?7l", "\x1b[?7h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verl-war top`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE", help="journal of a router")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Show the journal until Ctrl-C, or once where `stream` is no terminal.

    Returns:
        The exit status: 0, 1 when the journal is damaged, 2 when it cannot be read.
    """
    stream = stream or sys.stdout
    try:
        with hushed(), Tail(options.file) as tail:
            if stream.isatty():
                _follow(tail, stream)
            else:
                stream.write("\n".join(_picture(tail, _read(tail, None), sys.maxsize, False)) + "\n")
    except JournalError as error:
        sys.stderr.write(f"verl-war top: {error}\n")
        return EXIT_USAGE if isinstance(error, UnreadableError) else EXIT_DAMAGED
    return 0


def _follow(tail: Tail, stream: TextIO) -> None:
    """Redraw until Ctrl-C, on the terminal's other page, so that what was there comes back."""
    view: View | None = None
    stream.write(ALTERNATE + HIDE_CURSOR + CUT_LINES)
    try:
        while True:
            view = _read(tail, view)
            size = shutil.get_terminal_size()
            lines = _picture(tail, view, size.lines, True)
            stream.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines[: size.lines - 1]) + TO_END)
            stream.flush()
            time.sleep(REDRAW_EVERY_S)
    except KeyboardInterrupt:
        pass
    finally:
        stream.write(WRAP_LINES + SHOW_CURSOR + ORIGINAL)
        stream.flush()


def _read(tail: Tail, view: View | None) -> View | None:
    """Take in what is new. None while not even the header is there."""
    for record in tail.read():
        try:
            if view is None:
                view = View(record)
            else:
                view.apply(record)
        except JournalError as error:
            raise JournalError(f"{tail.path}:{tail.line}: {error}") from error
    return view


def _picture(tail: Tail, view: View | None, rows: int, is_coloured: bool) -> list[str]:
    if view is None:
        return [f"{tail.path} is empty; the router has not begun"]
    silent_s, successor = tail.silent_s(), tail.successor()
    remarks = [f"nothing was written for {silent_s:.0f} s"] if silent_s >= SILENT_AFTER_S else []
    if successor is not None:
        remarks.append(f"the router was started again; it writes to {successor}")
    return view.lines(rows, is_coloured, remarks)
