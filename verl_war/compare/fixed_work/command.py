"""`verl-war compare --mode fixed-work`: options, the working process, and the report."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from verl_war.compare.failures import TrialFailed, Watchdog, failure_message
from verl_war.compare.fixed_work import records, workload
from verl_war.compare.fixed_work.arms import ARMS, DEFAULT_ARMS, find_arms
from verl_war.compare.fixed_work.episodes import read_episodes
from verl_war.compare.fixed_work.plan import FixedWorkPlan, episodes_file
from verl_war.compare.fixed_work.progress import RunsDisplay
from verl_war.compare.machine import memory_bytes, require_memory
from verl_war.compare.plan import RECIPES, base_environment, find_repo
from verl_war.compare.trial import run_supervised, scratch_directory
from verl_war.compare.workspace import claim_identity, locked, require_identity

DEFAULTS: dict[str, Any] = {
    "load": "low,middle,high", "replicas": 2, "kv_tokens": 8192, "trace": "", "clock_scale": 1.0, "run_minutes": 30.0,
}  # fmt: skip
"""Options of this mode, with values for a machine of two cores."""

WORK_MODULE = "verl_war.compare.fixed_work.work"
"""The program that makes the runs."""

REMOVED_BY_FRESH = ("plan.json", "console.log", "report.md", "report.json", "report.html", "runs.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this mode. Without a default, so that another mode can tell that they were given."""
    group = parser.add_argument_group("fixed work", "replay the same trajectories on real engines in every arm")
    group.add_argument(
        "--load", metavar="low|middle|high|sweep|N,N", help=f"trajectories per replica ({DEFAULTS['load']})"
    )
    group.add_argument("--replicas", type=int, help=f"engines of each kind ({DEFAULTS['replicas']})")
    group.add_argument("--kv-tokens", type=int, help=f"KV capacity of a replica ({DEFAULTS['kv_tokens']})")
    group.add_argument("--trace", metavar="FILE", help="JSONL file of trajectories (recorded episodes of --recipe)")
    group.add_argument("--clock-scale", type=float, metavar="X", help="factor on the delays of tools (1)")
    group.add_argument(
        "--run-minutes", type=float, help=f"a run that takes longer has failed ({DEFAULTS['run_minutes']:g})"
    )
    arms = "\n".join(f"  {arm.name:20} {arm.summary}" for arm in ARMS.values())
    parser.epilog = f"arms of --mode fixed-work:\n{arms}"


def plan_of(options: argparse.Namespace, cwd: Path) -> FixedWorkPlan:
    """The plan that the options stand for.

    Raises:
        ValueError: An option is not what it may be, or ``cwd`` is not in a clone.
    """
    given = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    chosen = argparse.Namespace(**(DEFAULTS | given))
    if options.recipe not in RECIPES:
        raise ValueError(f"--recipe={options.recipe!r} must be one of {', '.join(RECIPES)}")
    repo = find_repo(cwd, options.recipe)
    arms = find_arms(DEFAULT_ARMS if options.arms is None else options.arms)
    if not 1 <= chosen.replicas <= 64:
        raise ValueError(f"--replicas={chosen.replicas} must be between 1 and 64")
    if chosen.trace:
        if "load" in given:
            raise ValueError(f"--load={options.load} is for recorded episodes; a trace holds its own number")
        chosen.trace = str(Path(chosen.trace).absolute())
        loads: tuple[float, ...] = (len(workload.from_trace(Path(chosen.trace))) / chosen.replicas,)
    else:
        mean = workload.mean_context_tokens(read_episodes(episodes_file(repo, options.recipe)))
        loads = workload.parse_loads(chosen.load, chosen.kv_tokens, mean)
    return FixedWorkPlan(
        arms=tuple(arm.name for arm in arms),
        loads=loads,
        repeats=options.repeats,
        replicas=chosen.replicas,
        kv_tokens=chosen.kv_tokens,
        recipe=options.recipe,
        trace=chosen.trace,
        clock_scale=chosen.clock_scale,
        seed=options.seed,
        limit_s=60 * chosen.run_minutes,
        memory_bytes=memory_bytes(options.memory_gb or 0.0),
        out=(options.out or cwd / "runs" / default_name(options)).absolute(),
        repo=repo,
    )


def default_name(options: argparse.Namespace) -> str:
    """A name that the same work always gets, so that repeating the command goes on where it stopped."""
    work = [getattr(options, name) for name in ("replicas", "kv_tokens", "trace", "clock_scale")]
    digest = "" if work == [None] * 4 else "-" + hashlib.sha256(repr(work).encode()).hexdigest()[:6]
    return f"fixed-work-{options.recipe}-seed{options.seed}{digest}"


def compare(plan: FixedWorkPlan, fresh: bool, stream: TextIO) -> None:
    """Make all runs that are not done yet and write the report, also when stopped.

    Raises:
        ValueError: The plan cannot be carried out here; nothing was lost.
        TrialFailed: A run failed or was refused, or the working process ended; the other runs are kept.
        Interrupted: We were told to stop.
    """
    with locked(plan.out):
        if not fresh:
            require_identity(plan.out, plan.identity())
        runs = plan.runs()
        missing = [run for run in runs if fresh or not records.is_done(plan.runs_directory, run)]
        # Before the trajectories are generated, which take memory too, and before anything is deleted.
        if missing:
            require_memory(plan.needed_bytes, _engines_text(plan))
        plan.check_work()
        if fresh:
            _remove_results(plan.out)
        claim_identity(plan.out, plan.identity())
        stream.write(f"{len(runs) - len(missing)} of {len(runs)} runs are done; results go to {plan.out}\n")
        try:
            if missing:
                _work(plan, stream)
        finally:
            _report(plan, stream)
    lost = [run.name for run in plan.runs() if not _counts(plan, run)]
    if lost:
        raise TrialFailed(f"{len(lost)} runs do not count: {', '.join(lost[:5])}; the report says why")


def _counts(plan: FixedWorkPlan, run: records.Run) -> bool:
    path = records.path_of(plan.runs_directory, run)
    return path.exists() and records.load(path, run).status == "complete"


def _engines_text(plan: FixedWorkPlan) -> str:
    kinds = plan.engine_kinds
    return (
        f"a comparison with {len(kinds) * plan.replicas} engines ({plan.replicas} for each of {', '.join(kinds)}; KV "
        f"for {plan.kv_tokens} tokens each)"
    )


def _work(plan: FixedWorkPlan, stream: TextIO) -> None:
    with scratch_directory() as (run_id, scratch):
        environment = base_environment(plan.repo, run_id, scratch, is_cpu=True)
        command = [sys.executable, "-m", WORK_MODULE, plan.as_json()]
        with contextlib.closing(RunsDisplay(plan, stream)) as display:
            watchdog = Watchdog("runs", plan.console_log, plan.console_log, 0.0)
            begin_s = time.monotonic()
            code = run_supervised(command, environment, plan.console_log, plan.repo, (display.update, watchdog.check))
            is_told = code == 1 and all(records.path_of(plan.runs_directory, run).exists() for run in plan.runs())
            if code != 0 and not is_told:  # a run that failed has a record of it
                raise TrialFailed(failure_message("the runs", code, plan.console_log))
            display.update()
        stream.write(f"all runs are over after {(time.monotonic() - begin_s) / 60:.0f} min\n")


def _report(plan: FixedWorkPlan, stream: TextIO) -> None:
    # Imported late: it takes a second, and errors in the options should not wait for it.
    from verl_war.compare.fixed_work.report import write_report

    if any(records.path_of(plan.runs_directory, run).exists() for run in plan.runs()):
        write_report(plan, stream)


def _remove_results(out: Path) -> None:
    """Delete what a comparison made, and nothing that somebody else put there."""
    if not (out / "plan.json").exists():
        return
    shutil.rmtree(out / "runs", ignore_errors=True)
    for path in [*out.glob("trace_load*.jsonl"), *(out / name for name in REMOVED_BY_FRESH)]:
        path.unlink(missing_ok=True)
