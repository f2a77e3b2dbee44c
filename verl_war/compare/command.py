"""`verl-war compare`: stock verl and WAR, the numbers side by side.

Mode `live` trains a recipe with both. Mode `fixed-work` has both, and rules of others, serve the very same trajectories
on real engines.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from verl_war.compare.failures import TrialFailed
from verl_war.compare.fixed_work import command as fixed_work
from verl_war.compare.machine import CPU_MEMORY_GIB, describe, memory_bytes, require_memory
from verl_war.compare.plan import ALGORITHMS, ARMS, RECIPES, Plan, Trial, find_repo
from verl_war.compare.report import Runs, summarise
from verl_war.compare.series import read_series
from verl_war.compare.tables import as_text, comparison_rows, markdown_report, notes
from verl_war.compare.trial import Interrupted, interruptible, prepare_data, recover, run_trial
from verl_war.compare.workspace import DamagedState, claim, load_state, locked, write_atomically

EXIT_FAILED = 1
EXIT_USAGE = 2

MIN_REPEATS_TO_JUDGE = 3
"""Of each arm; with fewer, `verl-war unchanged` can compare the first step, and nothing that is learnt."""

CPU_STALL_MINUTES = 30.0
"""Start-up and first step of the demo model take 2 minutes on two free cores, and 10 on busy ones."""

MODES = ("live", "fixed-work")

LIVE_DEFAULTS: dict[str, Any] = {
    "algorithm": "grpo", "steps": 5, "machine": "cpu", "num_train": 64, "num_val": 16, "stall_minutes": None,
}  # fmt: skip
"""Options of mode `live` alone, with what they are when not given."""

TRIAL_CONTENT = "console.log, metrics/, trajectories/, checkpoints/, tensorboard/"

NEEDED_MODULES = ("matplotlib", "tensorboard", "tqdm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verl-war compare`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mode", default="live", choices=MODES, help="what is compared (%(default)s)")
    parser.add_argument("--recipe", default="code_agent", metavar="|".join(RECIPES), help="whose agent (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of data, sampling and training (%(default)s)")
    parser.add_argument("--arms", help=f"what to compare; the first is the base ({','.join(ARMS)})")
    parser.add_argument(
        "--repeats", "--repeat", type=int, default=1, help="runs of each arm, with seeds SEED.. (%(default)s)"
    )
    parser.add_argument("--memory-gb", type=float, help=f"free GiB needed (live: {CPU_MEMORY_GIB:g} on cpu, else 0)")
    parser.add_argument("--out", type=Path, help="directory of results (runs/...)")
    parser.add_argument("--fresh", action="store_true", help="discard what an earlier run left in --out")
    live = parser.add_argument_group("live", "train for real")
    live.add_argument("--algorithm", metavar="|".join(ALGORITHMS), help=f"how ({LIVE_DEFAULTS['algorithm']})")
    live.add_argument("--steps", type=int, help=f"training steps of every trial ({LIVE_DEFAULTS['steps']})")
    live.add_argument("--machine", help=f"the recipe's configuration for it ({LIVE_DEFAULTS['machine']})")
    live.add_argument("--num-train", type=int, help=f"generated training tasks ({LIVE_DEFAULTS['num_train']})")
    live.add_argument("--num-val", type=int, help=f"generated validation tasks ({LIVE_DEFAULTS['num_val']})")
    live.add_argument(
        "--stall-minutes",
        type=float,
        help=f"without a step for that long, give up ({CPU_STALL_MINUTES:g} on cpu, else 0)",
    )
    live.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides for all arms, as for verl")
    fixed_work.add_arguments(parser)


def run(options: argparse.Namespace, stream: TextIO = sys.stdout) -> int:
    """Run the comparison and return the exit status: 0, 1 (a trial failed), 2 (usage), 128 + signal (stopped)."""
    try:
        with interruptible():
            if options.mode == "live":
                _refuse(options, fixed_work.DEFAULTS, "--mode fixed-work")
                compare(plan_of(options, Path.cwd()), options.fresh, stream)
            else:
                _refuse(options, {**LIVE_DEFAULTS, "overrides": []}, "--mode live")
                _require_modules()
                fixed_work.compare(fixed_work.plan_of(options, Path.cwd()), options.fresh, stream)
    except ValueError as error:
        sys.stderr.write(f"verl-war compare: {error}\n")
        return EXIT_USAGE
    except TrialFailed as error:
        sys.stderr.write(f"verl-war compare: {error}\nthe same command goes on where it stopped\n")
        return EXIT_FAILED
    except Interrupted as stop:
        sys.stderr.write(f"\nstopped by {stop}; no process is left, the same command goes on where it stopped\n")
        return 128 + stop.signum
    return 0


def _refuse(options: argparse.Namespace, others: Mapping[str, Any], mode: str) -> None:
    """Raise when an option of another mode was given.

    Raises:
        ValueError: One was; it would have no effect.
    """
    for name in others:
        value = getattr(options, name)
        if value not in (None, []):
            word = "KEY=VALUE" if name == "overrides" else "--" + name.replace("_", "-")
            raise ValueError(f"{word} ({value}) is for {mode}; leave it out or choose that mode")


def plan_of(options: argparse.Namespace, cwd: Path) -> Plan:
    """The plan that the options stand for.

    Raises:
        ValueError: An option is not what it may be, or ``cwd`` is not in a clone.
    """
    given = {name: value for name in LIVE_DEFAULTS if (value := getattr(options, name)) is not None}
    chosen = argparse.Namespace(**(vars(options) | LIVE_DEFAULTS | given))
    is_cpu = chosen.machine == "cpu"
    memory_gib = options.memory_gb if options.memory_gb is not None else CPU_MEMORY_GIB * is_cpu
    stall_minutes = options.stall_minutes if options.stall_minutes is not None else CPU_STALL_MINUTES * is_cpu
    return Plan(
        recipe=options.recipe,
        algorithm=chosen.algorithm,
        steps=chosen.steps,
        machine=chosen.machine,
        seed=options.seed,
        arms=tuple(ARMS) if options.arms is None else tuple(options.arms.split(",")),
        repeats=options.repeats,
        num_train=chosen.num_train,
        num_val=chosen.num_val,
        overrides=tuple(options.overrides),
        memory_bytes=memory_bytes(memory_gib),
        stall_s=60 * stall_minutes,
        out=(options.out or cwd / "runs" / default_name(chosen)).absolute(),
        repo=find_repo(cwd, options.recipe),
    )


def default_name(options: argparse.Namespace) -> str:
    """A name that the same command always gets, so that repeating it goes on where it stopped."""
    parts = [options.recipe, options.algorithm, options.machine, f"{options.steps}steps", f"seed{options.seed}"]
    special = [*options.overrides, options.num_train, options.num_val]
    if special != [64, 16]:
        parts.append(hashlib.sha256(repr(special).encode()).hexdigest()[:6])
    return "-".join(parts)


def compare(plan: Plan, fresh: bool, stream: TextIO) -> None:
    """Run all trials that are not complete yet and write the report.

    Raises:
        ValueError: The plan cannot be carried out here; nothing was lost.
        TrialFailed: A trial ended with an error; the ones before it are kept.
        Interrupted: We were told to stop.
    """
    _require_modules()
    with locked(plan.out):
        trials = plan.trials()
        for trial in trials:
            _end_leftovers(trial, fresh, stream)
        if fresh:  # nothing is deleted for trials that cannot start
            require_memory(plan.memory_bytes, "training")
        claim(plan, fresh)
        stream.write(f"comparing {' and '.join(plan.arms)}: {plan.recipe}, {plan.algorithm}, {plan.steps} steps\n")
        stream.write(f"results go to {plan.out}\n")
        prepare_data(plan, stream)
        for trial in trials:
            run_trial(plan, trial, stream)
        write_report(plan, trials, stream)


def _end_leftovers(trial: Trial, fresh: bool, stream: TextIO) -> None:
    """End what an earlier run of the trial left running; with `fresh` its state need not be readable.

    Raises:
        DamagedState: It is not, and nobody asked to discard it.
    """
    try:
        recover(load_state(trial))
    except DamagedState as error:
        if not (fresh and error.can_be_discarded):
            raise
        stream.write(
            f"{trial.name}: {error.path} is damaged and is discarded with all results (--fresh); whether an earlier "
            "run left something in /tmp/war-* is unknown\n"
        )


def write_report(plan: Plan, trials: list[Trial], stream: TextIO) -> None:
    """Write plots, `report.json` and `report.md`, and show the table."""
    # Imported late: it takes a second, and errors in the options should not wait for it.
    from verl_war.compare.plots import draw

    runs: Runs = {
        arm: [read_series(trial) for trial in sorted(trials, key=lambda trial: trial.repeat) if trial.arm == arm]
        for arm in plan.arms
    }
    plots = draw(runs, plan.out / "plots")
    report = _report(plan, trials, runs)
    write_atomically(plan.out / "report.json", json.dumps(report, indent=1))
    write_atomically(plan.out / "report.md", markdown_report(report, [f"plots/{path.name}" for path in plots]))
    stream.write(f"\n{as_text(comparison_rows(report['summary']))}\n\n{notes(report)}\n\n")
    stream.write(f"report:      {plan.out / 'report.md'} and report.json\n")
    stream.write(f"plots:       {', '.join(str(path) for path in plots)}\n")
    for trial in trials:
        stream.write(f"{trial.name + ':':12} {trial.directory}/ ({TRIAL_CONTENT})\n")
    if len(plan.arms) == 2 and plan.repeats >= MIN_REPEATS_TO_JUDGE:
        stream.write(f"is RL unchanged? verl-war unchanged {shlex.quote(str(plan.out))}\n")


def _report(plan: Plan, trials: list[Trial], runs: Runs) -> dict[str, Any]:
    states = {trial.name: load_state(trial) for trial in trials}
    return {
        "plan": plan.identity() | {"arms": list(plan.arms), "repeats": plan.repeats},
        "command": shlex.join(["verl-war", *sys.argv[1:]]),
        "trials": [
            {
                "name": trial.name,
                "arm": trial.arm,
                "seed": trial.seed,
                "attempts": states[trial.name].attempts,
                "seconds": states[trial.name].seconds,
                "version": states[trial.name].version,
                "command": shlex.join(plan.command(trial)),
            }
            for trial in trials
        ],
        "environment": describe(plan.repo),
        "summary": summarise(runs),
    }


def _require_modules() -> None:
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'{", ".join(missing)} must be installed for this command: pip install "verl_war[recipes]"')
