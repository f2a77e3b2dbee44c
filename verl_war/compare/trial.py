"""Running one trial: start or resume it, watch it, end all its processes, keep its state."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from verl_war.compare.failures import TrialFailed, Watchdog, failure_message
from verl_war.compare.machine import require_memory
from verl_war.compare.plan import Plan, Trial
from verl_war.compare.processes import marked_processes, remove_shared_memory, stop_all, tree
from verl_war.compare.progress import Display
from verl_war.compare.workspace import (
    SCRATCH_PARENT,
    SCRATCH_PREFIX,
    Status,
    TrialState,
    is_complete,
    load_state,
    rewind,
    save_state,
)
from verl_war.version import clone_version

logger = logging.getLogger(__name__)

POLL_S = 0.5


class Interrupted(BaseException):
    """The user, or the system, asked this process to stop.

    Attributes:
        signum: The signal that was received.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into :class:`Interrupted`; ignore further ones while we clean up."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(signum: int, _: FrameType | None) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signum)

    # A signal that was ignored before stays so: nohup and background jobs of shells rely on it.
    wanted = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, interrupt) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def run_trial(plan: Plan, trial: Trial, stream: TextIO) -> None:
    """Train ``trial`` from its newest checkpoint to its end. Does nothing when it is complete.

    Raises:
        ValueError: The machine has not enough free memory now.
        TrialFailed: The training ended with an error, or hangs; the message says what is known of the cause.
        Interrupted: We were told to stop. All processes of the trial are gone by then.
    """
    state = load_state(trial)
    if is_complete(trial, state, plan.steps):
        stream.write(f"{trial.name}: complete since an earlier run, kept (--fresh repeats it)\n")
        return
    require_memory(plan.memory_bytes, f"training {trial.name}")
    trial.metrics_directory.mkdir(parents=True, exist_ok=True)
    resumed_step = rewind(trial)
    if state.attempts:
        where = f"resumes behind the checkpoint of step {resumed_step}" if resumed_step else "starts again"
        stream.write(f"{trial.name}: was {state.status}, {where}\n")
    attempt = state.attempts + 1
    display = Display(trial.name, plan.steps, trial.console_log, trial.metrics_file(attempt), stream)
    with contextlib.closing(display), _attempt(trial, state, plan.repo) as (run_id, scratch):
        environment = plan.environment(trial, attempt, run_id, scratch)
        watchdog = Watchdog(trial.name, trial.console_log, trial.metrics_file(attempt), plan.stall_s)
        try:
            watchers = (display.update, watchdog.check)
            code = run_supervised(plan.command(trial), environment, trial.console_log, plan.repo, watchers)
            display.update()
            if code != 0:
                raise TrialFailed(failure_message(trial.name, code, trial.console_log))
        except TrialFailed:
            _keep_ray_logs(trial, scratch)
            raise


def prepare_data(plan: Plan, stream: TextIO) -> None:
    """Generate the tasks of the comparison unless they are there.

    Raises:
        TrialFailed: The generator ended with an error.
        Interrupted: We were told to stop.
    """
    files = [plan.data_directory / name for name in ("train.parquet", "val.parquet")]
    done = plan.data_directory / "complete"
    if not plan.generates_data or (done.exists() and all(file.exists() for file in files)):
        return
    stream.write(f"data: generating {plan.num_train} training and {plan.num_val} validation tasks\n")
    plan.data_directory.mkdir(parents=True, exist_ok=True)
    log = plan.data_directory / "console.log"
    with scratch_directory() as (run_id, scratch):
        code = run_supervised(plan.data_command(), plan.base_environment(run_id, scratch), log, plan.repo)
    if code != 0 or not all(file.exists() for file in files):
        raise TrialFailed(failure_message("data", code, log))
    done.touch()


def recover(state: TrialState) -> None:
    """End what a comparison left behind that was killed before it could clean up."""
    if state.status == "running":
        _clean_up(state.run_id, Path(state.scratch), state.started_at_s)


def run_supervised(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    cwd: Path,
    watchers: Iterable[Callable[[], None]] = (),
) -> int:
    """Run ``command`` below a supervisor, its output appended to ``log``; call ``watchers`` all the time.

    Returns:
        Exit status of the command.

    Raises:
        Interrupted: We were told to stop. Here, and when a watcher raises, the command and all that it started are
            gone.
    """
    with log.open("ab") as output, tree(command, cwd=cwd, env=environment, stdout=output) as process:
        while True:
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                for watch in watchers:
                    watch()


@contextlib.contextmanager
def _attempt(trial: Trial, state: TrialState, repo: Path) -> Iterator[tuple[str, Path]]:
    """Keep the state file true from the start of an attempt to its end, whatever ends it."""
    begin_s = time.time()
    with scratch_directory() as (run_id, scratch):
        running = replace(
            state,
            status="running",
            attempts=state.attempts + 1,
            run_id=run_id,
            scratch=str(scratch),
            started_at_s=begin_s,
            version=clone_version(repo),
        )
        save_state(trial, running)
        status: Status = "failed"
        try:
            yield run_id, scratch
            status = "complete"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            _clean_up(run_id, scratch, begin_s)
            save_state(trial, replace(running, status=status, seconds=state.seconds + time.time() - begin_s))


@contextlib.contextmanager
def scratch_directory() -> Iterator[tuple[str, Path]]:
    """A fresh run id and temporary directory."""
    parent = SCRATCH_PARENT if os.access(SCRATCH_PARENT, os.W_OK) else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
    try:
        yield uuid.uuid4().hex, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clean_up(run_id: str, scratch: Path, started_at_s: float) -> None:
    remaining = stop_all(lambda: marked_processes(run_id))
    if remaining:
        logger.warning("could not end these processes of the trial: %s", remaining)
    removed = remove_shared_memory(started_at_s)
    if removed:
        logger.info("removed %d shared memory segments that the trial left", len(removed))
    shutil.rmtree(scratch, ignore_errors=True)


def _keep_ray_logs(trial: Trial, scratch: Path) -> None:
    """Ray's own logs go with the temporary directory; after a failure they may hold the cause."""
    for logs in scratch.glob("ray/session_2*/logs"):
        shutil.copytree(logs, trial.directory / "ray_logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
