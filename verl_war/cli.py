"""Console script ``verl-war``: names the commands and hands over to them."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("verl_war.doctor.command", "check packages, patches, machine and model"),
    "compare": ("verl_war.compare.command", "train with stock verl and with WAR, side by side"),
    "unchanged": (
        "verl_war.compare.unchanged.command",
        "tell from a comparison whether WAR left the training as it was",
    ),
    "simulate": ("verl_war.sim.command", "try routing and admission policies on a simulated fleet"),
    "report": ("verl_war.report.command", "show what happened in a run: a page of plots and a summary"),
    "top": ("verl_war.report.top", "watch a run from the journal that its router writes"),
    "replay": ("verl_war.replay.command", "make the decisions of a recorded run again, and explain them"),
}
"""Name -> module with ``add_arguments(parser)`` and ``run(options) -> exit status``, and one line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="verl-war", description="Workload-aware rollouts for verl.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if words[:1] == [name]:  # only the command that runs is imported: the others may need what is not installed
            chosen = importlib.import_module(module)
            chosen.add_arguments(command)
            command.set_defaults(run=chosen.run)
    options, rest = parser.parse_known_args(words)
    if rest:
        # argparse takes positional arguments in one piece; Hydra overrides may stand before and behind options.
        if not hasattr(options, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.overrides = [*options.overrides, *rest]
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
