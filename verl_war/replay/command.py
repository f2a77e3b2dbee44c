"""`verl-war replay FILE`: make the decisions of a recorded run again, or tell what became of one trajectory.

The file is what `custom.war.journal_path` made the router write. The exit status is 1 when a decision comes out
differently or the file is damaged, and 2 when it cannot be read.
"""

import argparse
import sys
from pathlib import Path
from typing import TextIO

from verl_war.core.journal import JournalError, UnreadableError
from verl_war.replay.decisions import replay_file
from verl_war.replay.story import story

EXIT_DIFFERENT = 1
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``verl-war replay``."""
    parser.description = __doc__
    parser.add_argument("file", type=Path, metavar="FILE", help="journal of a router")
    parser.add_argument("--why", metavar="TRAJECTORY", help="tell when this trajectory was held and why it moved")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Prints to ``stream`` (default: standard output) and returns the exit status."""
    stream = stream or sys.stdout
    try:
        if options.why is not None:
            stream.write("\n".join(story(options.file, options.why)) + "\n")
            return 0
        outcome = replay_file(options.file)
    except JournalError as error:
        sys.stderr.write(f"verl-war replay: {error}\n")
        return EXIT_USAGE if isinstance(error, UnreadableError) else EXIT_DIFFERENT
    if outcome.difference:
        stream.write(f"different after {outcome.events} events: {outcome.difference}\n")
        return EXIT_DIFFERENT
    stream.write(f"identical: {outcome.events} events, {outcome.placements} placements\n")
    return 0
