"""`verl-war simulate`: policies on a simulated fleet, table, plot and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO

from verl_war.sim.draft_world import ACCEPTANCE, find_world
from verl_war.sim.hardware import PROFILES, load_profile
from verl_war.sim.policies.registry import POLICIES, PolicySpec, find_policies
from verl_war.sim.runner import BASE, Run, Study, Summary, complete_cases, run_study, summarise
from verl_war.sim.trace import read_trace, write_trace
from verl_war.sim.workload import SHAPES, generate
from verl_war.version import package_version

EXIT_USAGE = 2
EXIT_STOPPED = 130
NEEDED_MODULES = ("matplotlib", "tqdm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verl-war simulate`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = "\n".join(f"  {spec.name:20} {spec.summary}" for spec in POLICIES.values())
    parser.epilog = f"policies:\n{names}\n\nideal in the table is a lower bound of the makespan, not a policy"
    parser.add_argument("--hardware", default="h100_8b", help=f"{'|'.join(PROFILES)} or FILE.json (%(default)s)")
    parser.add_argument("--replicas", type=int, default=8, help="vLLM replicas (%(default)s)")
    parser.add_argument("--load", help="trajectories per replica (16,64,128; with a trace, what it holds)")
    parser.add_argument("--policies", default="stock,war", help="comma-separated, or all (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1..N (%(default)s)")
    parser.add_argument("--workload", default="default", help=f"{'|'.join(SHAPES)} or TRACE.jsonl (%(default)s)")
    parser.add_argument(
        "--acceptance",
        help=f"how predictable the text is, for drafts: {'|'.join(ACCEPTANCE)} (without it no engine speculates, and "
        "all policies are compared by their schedules alone)",
    )
    parser.add_argument(
        "--earlier-steps",
        type=int,
        default=0,
        metavar="N",
        help="begin every run with N steps of other trajectories, and measure the step after them (%(default)s)",
    )
    parser.add_argument("--kv-capacity", type=int, metavar="TOKENS", help="of a replica, instead of the hardware's")
    parser.add_argument("--host-kv", type=float, default=4.0, help="host tier in KV capacities (%(default)s)")
    parser.add_argument("--misstated-capacity", type=float, default=1.0, metavar="X", help="reported over true KV")
    parser.add_argument("--slow", default="", metavar="INDEX:FACTOR,..", help="replicas that take FACTOR times longer")
    parser.add_argument(
        "--war", action="append", default=[], metavar="KEY=VALUE", help="setting of custom.war in the war arms"
    )
    parser.add_argument("--write-trace", type=Path, help="write the first workload to this file and stop")
    parser.add_argument("--out", type=Path, help="directory of results (runs/simulate-...)")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Simulate and return the exit status: 0, 2 when an option is wrong, 130 when stopped by Ctrl-C."""
    out = stream or sys.stdout
    try:
        study = study_of(options)
        if options.write_trace is not None:
            trajectories = round(study.loads[0] * study.replicas)
            write_trace(options.write_trace, generate(SHAPES[study.workload], trajectories, 1))
            out.write(f"wrote {options.write_trace}\n")
            return 0
        simulate(study, options, out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"verl-war simulate: {error}\n")
        return EXIT_USAGE
    except Stopped as stop:
        sys.stderr.write(f"\nverl-war simulate: {stop}\n")
        return EXIT_STOPPED
    return 0


class Stopped(Exception):
    """The user pressed Ctrl-C."""


def simulate(study: Study, options: argparse.Namespace, stream: TextIO) -> None:
    """Run a study and write its results.

    Raises:
        ValueError: The study cannot be carried out.
        Stopped: By Ctrl-C; what was complete is written.
    """
    # Imported late: the options' errors should not wait for it.
    from verl_war.sim.plots import draw_ratios

    folder = options.out or Path("runs") / default_name(study)
    _require_directory(folder)
    setting = describe(study)
    runs, stopped = _run_all(study)
    runs = complete_cases(runs, len(study.arms()))
    if not runs:
        raise Stopped("stopped before all policies had run once; there are no results")
    summaries = summarise(runs)
    folder.mkdir(parents=True, exist_ok=True)
    report = setting | {
        "stopped": stopped,
        "runs": [item.as_dict() for item in runs],
        "summary": [dataclasses.asdict(summary) for summary in summaries],
    }
    (folder / "simulate.json").write_text(json.dumps(report, indent=1) + "\n")
    title = f"{study.hardware.name}, {study.replicas} replicas, workload {study.workload}, {study.seeds} seeds"
    if study.earlier_steps:
        title += f", after {study.earlier_steps} steps"
    if study.acceptance is not None:
        title += f", acceptance {study.acceptance}"
    draw_ratios(summaries, title, folder / "simulate.png")
    table = as_text(summaries, title)
    (folder / "simulate.txt").write_text(table + "\n")
    stream.write(f"{table}\n\nresults: {folder / 'simulate.json'}, simulate.png, simulate.txt\n")
    if study.acceptance is None:
        stream.write("schedules alone: no text can be drafted without --acceptance\n")
    if stopped:
        raise Stopped("stopped; the results are of the loads and seeds that were complete")


def _require_directory(folder: Path) -> None:
    """Check that results can be put there, before the runs are made in vain. Makes nothing: there may be no results."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "may not be written to" if there.is_dir() else "is a file"
        raise ValueError(f"--out {folder}: {there} {what}; give the name of a directory that can be made")


def _run_all(study: Study) -> tuple[list[Run], bool]:
    """All runs, or those until Ctrl-C and True. Says on stderr how far it is: on a terminal by a bar, else by lines."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total, arms = study.count_runs(), len(study.arms())
    sys.stderr.write(f"{total} runs: {len(study.loads)} loads, {study.seeds} seeds, {arms} policies\n")
    runs: list[Run] = []
    with tqdm(total=total, unit="run", file=sys.stderr, disable=None) as bar:
        try:
            for number, result in enumerate(run_study(study), start=1):
                bar.update()
                if result is None:
                    continue
                runs.append(result)
                bar.set_postfix_str(f"load {result.load:g} seed {result.seed} {result.policy}")
                if bar.disable and len(runs) % arms == 0:
                    sys.stderr.write(f"load {result.load:g}, seed {result.seed} done: {number} of {total} runs\n")
        except KeyboardInterrupt:
            return runs, True
    return runs, False


def default_name(study: Study) -> str:
    """A name that tells the main options."""
    loads = "_".join(f"{load:g}" for load in study.loads)
    workload = Path(study.workload).stem
    acceptance = "" if study.acceptance is None else f"-{study.acceptance}"
    after = f"-after{study.earlier_steps}" if study.earlier_steps else ""
    return f"simulate-{study.hardware.name}-{study.replicas}x{loads}-{workload}-{study.seeds}seeds{after}{acceptance}"


def study_of(options: argparse.Namespace) -> Study:
    """The study that the options stand for.

    Raises:
        ValueError: An option is not what it may be.
    """
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'{", ".join(missing)} must be installed for this command: pip install "verl_war[recipes]"')
    hardware = load_profile(options.hardware)
    if options.kv_capacity is not None:
        _require("--kv-capacity", options.kv_capacity, 1, 1e12)
        hardware = dataclasses.replace(hardware, kv_capacity_tokens=options.kv_capacity)
    _require("--replicas", options.replicas, 1, 10_000)
    _require("--seeds", options.seeds, 1, 1000)
    _require("--host-kv", options.host_kv, 0, 1000)
    _require("--misstated-capacity", options.misstated_capacity, 0.05, 100)
    _require("--earlier-steps", options.earlier_steps, 0, 1000)
    if options.earlier_steps and options.workload not in SHAPES:
        raise ValueError(f"--earlier-steps {options.earlier_steps} is for generated workloads; a trace is one step")
    if options.acceptance is not None:
        find_world(options.acceptance)
    return Study(
        hardware=hardware,
        replicas=options.replicas,
        loads=_loads(options),
        policies=_policies(options),
        seeds=options.seeds,
        workload=options.workload,
        host_kv=options.host_kv,
        slowdown=_slowdown(options.slow, options.replicas),
        misstated_capacity=options.misstated_capacity,
        war_settings=_war_settings(options.war),
        acceptance=options.acceptance,
        earlier_steps=options.earlier_steps,
    )


def _policies(options: argparse.Namespace) -> tuple[PolicySpec, ...]:
    found = find_policies(options.policies)
    if options.acceptance is None:
        drafting = [spec.name for spec in found if spec.only_drafts]
        if drafting and options.policies != "all":
            raise ValueError(
                f"--policies {drafting[0]} is stock but for its drafts; say with --acceptance what is accepted"
            )
        found = [spec for spec in found if not spec.only_drafts]
    return tuple(found)


def _loads(options: argparse.Namespace) -> tuple[float, ...]:
    if options.workload not in SHAPES:
        if not options.workload.endswith(".jsonl"):
            raise ValueError(
                f"--workload {options.workload!r} is unknown; expected one of {', '.join(SHAPES)} or a TRACE.jsonl"
            )
        if options.write_trace is not None:
            raise ValueError("--write-trace writes a generated workload; --workload names a trace already")
        if options.load is not None:
            raise ValueError(f"--load {options.load} is for generated workloads; a trace holds its own number")
        return (len(read_trace(Path(options.workload))) / options.replicas,)
    loads = []
    for word in ("16,64,128" if options.load is None else options.load).split(","):
        try:
            load = float(word)
        except ValueError:
            raise ValueError(f"--load: {word!r} is not a number; expected for instance 16,64,128") from None
        _require("--load", load, 1 / options.replicas, 100_000)
        if load in loads:
            raise ValueError(f"--load: {word!r} is given twice; give every load once")
        loads.append(load)
    return tuple(loads)


def _slowdown(text: str, replicas: int) -> dict[int, float]:
    slow: dict[int, float] = {}
    for word in filter(None, text.split(",")):
        index, _, factor = word.partition(":")
        try:
            slow[int(index)] = float(factor)
        except ValueError:
            raise ValueError(f"--slow: {word!r} is not INDEX:FACTOR; expected for instance 0:2") from None
        _require("--slow INDEX", int(index), 0, replicas - 1)
        _require("--slow FACTOR", float(factor), 0.01, 1000)
    return slow


def _war_settings(words: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        group, dot, name = key.partition(".")
        if not (equals and dot and name):
            raise ValueError(
                f"--war {word!r} is not GROUP.KEY=VALUE; expected for instance admission.admit_fraction=0.8"
            )
        try:
            value = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            value = text
        settings.setdefault(group, {})[name] = value
    return settings


def _require(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} {value:g} must be between {least:g} and {most:g}")


def describe(study: Study) -> dict[str, Any]:
    """All that is needed to repeat a study."""
    shape = SHAPES.get(study.workload)
    return {
        "command": shlex.join(["verl-war", *sys.argv[1:]]),
        "versions": {"verl_war": package_version(), "python": platform.python_version()},
        "hardware": dataclasses.asdict(study.hardware),
        "replicas": study.replicas,
        "loads": list(study.loads),
        "seeds": list(range(1, study.seeds + 1)),
        "workload": {"name": study.workload, "shape": None if shape is None else dataclasses.asdict(shape)},
        "host_kv": study.host_kv,
        "slowdown": study.all_slowdowns,
        "misstated_capacity": study.misstated_capacity,
        "war_settings": study.war_settings,
        "earlier_steps": study.earlier_steps,
        "acceptance": None if study.acceptance is None else _world_of(study.acceptance),
    }


def _world_of(name: str) -> dict[str, Any]:
    return {"name": name, **dataclasses.asdict(find_world(name))}


def as_text(summaries: list[Summary], title: str) -> str:
    """The table: a policy per line, a load per column."""
    loads = list(dict.fromkeys(summary.load for summary in summaries))
    cell = {(summary.load, summary.policy): summary for summary in summaries}
    names = list(dict.fromkeys(summary.policy for summary in summaries))
    width = max(len(name) for name in (*names, "trajectories per replica"))
    lines = [title, "stock's makespan / makespan: mean over seeds (least - most); over 1 is faster than stock verl", ""]
    lines.append("trajectories per replica".ljust(width) + "".join(f"{load:>20g}" for load in loads))
    for name in names:
        cells = (cell[load, name] for load in loads)
        ratios = (f"{c.ratio_mean:.2f} ({c.ratio_least:.2f} - {c.ratio_most:.2f})" for c in cells)
        lines.append(name.ljust(width) + "".join(f"{text:>20}" for text in ratios))
    base = [cell[load, BASE] for load in loads]
    for label, texts in (
        ("stock's makespan, s", [f"{item.makespan_s:.0f}" for item in base]),
        ("stock's cache hit rate", [f"{item.hit_rate:.2f}" for item in base]),
        ("peak of contexts over KV", [f"{item.kv_demand_peak:.2f}" for item in base]),
    ):
        lines.append(label.ljust(width) + "".join(f"{text:>20}" for text in texts))
    return "\n".join(lines)
