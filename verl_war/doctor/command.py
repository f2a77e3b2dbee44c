"""`verl-war doctor`: check packages, patches, machine and model; the exit status is 1 when something is wrong."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from verl_war import support
from verl_war.doctor import installation
from verl_war.doctor import machine as machine_checks
from verl_war.doctor.model import check_model
from verl_war.doctor.report import Check, report
from verl_war.patches import catalog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``verl-war doctor``."""
    parser.description = __doc__
    parser.add_argument("--json", action="store_true", help="print the report as JSON (layout: doctor/report.py)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="also check this model directory")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest prompt plus response, with --model")
    parser.add_argument("--quick", action="store_true", help="import and start nothing: a second instead of a minute")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Prints the report to ``stream`` (default: standard output); returns 0 when no check failed, else 1."""
    stream = stream or sys.stdout
    machine = support.installed_machine()
    findings = report(machine, examine(options, machine), None if options.json else stream)
    if options.json:
        stream.write(findings.as_json() + "\n")
    return 0 if findings.ok else 1


def examine(options: argparse.Namespace, machine: support.Machine) -> Iterator[Check]:
    """Runs all checks that ``options`` ask for, the cheap ones first."""
    yield from installation.check_versions(machine)
    yield from installation.check_conflicts(machine, try_imports=not options.quick)
    yield from installation.check_patch_guards(catalog.PATCHES, machine)
    yield machine_checks.check_processor(machine)
    yield machine_checks.check_load()
    yield from machine_checks.check_resources(machine)
    yield from machine_checks.check_leftovers()
    yield machine_checks.check_ray_cluster()
    if options.model is not None:
        yield from check_model(options.model, machine, options.max_tokens)
    if not options.quick:
        yield installation.check_patches_apply(machine)
        yield machine_checks.check_ray_starts()
