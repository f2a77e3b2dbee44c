"""Finding and ending whatever a trial started: driver, Ray, vLLM engines, and all that detached itself from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import psutil

RUN_ID_ENV = "VERL_WAR_RUN_ID"
"""Marks every process of a run, so that none is left behind. Changes nobody's behaviour."""

GRACE_S = 10.0
"""How long verl's driver may take to shut Ray down after Ctrl-C."""

SHARED_MEMORY = Path("/dev/shm")

SHARED_MEMORY_PREFIXES = ("psm_", "verl_weights_", "torch_")
"""Segments of Python's `multiprocessing`, of verl's weight transfer and of PyTorch; they outlive a killed process.

Not its semaphores (`sem.mp-*`, 32 bytes): glibc maps a semaphore before it gets its name, so /proc shows those in use
under another name, and removing one that looks unused breaks other programs while they start.
"""

TERMINATE_GRACE_S = 3.0
"""Ray and vLLM end within a second or two of SIGTERM when they can."""

KILL_ROUNDS = 10
"""A process may start another one while the first is being killed; nothing survives a few rounds of that."""

KILL_WAIT_S = 2.0

STOP_TIMEOUT_S = 60.0
"""A supervisor needs its grace periods and a few seconds; past this, it is stuck and is killed too."""

_GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


@contextlib.contextmanager
def tree(
    command: list[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[bytes] | IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` so that nothing that it starts outlives the ``with`` block, or this process.

    Args:
        command: Program (absolute path) and arguments.
        cwd: Its working directory.
        env: Its environment, to which a run id is added when it has none.
        stdout: Open file for its output and its errors.

    Yields:
        The supervisor of the program; it ends with the program's exit status once all processes are gone. On leaving
        the block before that, the program is interrupted as by Ctrl-C, and everything that goes on is killed.
    """
    env = {RUN_ID_ENV: uuid.uuid4().hex, **env}
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_war.compare.supervisor", str(os.getpid()), str(GRACE_S), *command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        # Ctrl-C reaches us alone; we pass it on in order.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _stop(process)
        stop_all(lambda: marked_processes(env[RUN_ID_ENV]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def new_children(known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """All living descendants of this process, without those below ``known``."""
    skipped = set(known)
    children = [child for child in psutil.Process().children() if child not in skipped]
    return _living([*children, *_descendants(children)])


def marked_processes(run_id: str) -> list[psutil.Process]:
    """All living processes of the run, on the evidence of their environment, and their descendants.

    Ray and vLLM overwrite the environment that the kernel shows for a process when they set its title. Such a process
    is found as a descendant of one that did not, and by :mod:`verl_war.compare.supervisor` in any case.
    """
    marked = [process for process in psutil.process_iter() if _environment(process).get(RUN_ID_ENV) == run_id]
    return _living({*marked, *_descendants(marked)})


def stop_all(find: Callable[[], list[psutil.Process]], grace_s: float = TERMINATE_GRACE_S) -> list[psutil.Process]:
    """End the processes that ``find`` returns: SIGTERM, then SIGKILL until there are none.

    Returns:
        The processes that are still there, which takes a process stuck in the kernel or one of another user.
    """
    _signal_and_wait(find(), signal.SIGTERM, grace_s)
    for _ in range(KILL_ROUNDS):
        remaining = find()
        if not remaining:
            return []
        _signal_and_wait(remaining, signal.SIGKILL, KILL_WAIT_S)
    return find()


def remove_shared_memory(since_s: float, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove segments that appeared after ``since_s`` (seconds since the epoch) and that no process uses any more.

    Returns:
        Names of the files removed.
    """
    candidates = {str(path) for path in _segments(folder, since_s)}
    unused = candidates - _mapped_files(candidates) if candidates else set()
    for path in unused:
        Path(path).unlink(missing_ok=True)
    return sorted(Path(path).name for path in unused)


def _segments(folder: Path, since_s: float) -> Iterable[Path]:
    uid = psutil.Process().uids().effective
    for path in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.name.startswith(SHARED_MEMORY_PREFIXES) and status.st_uid == uid and status.st_ctime >= since_s:
                yield path


def _mapped_files(candidates: set[str]) -> set[str]:
    used: set[str] = set()
    for process in psutil.process_iter():
        # psutil's memory_maps() makes the kernel count pages, which takes seconds for processes of this size.
        with contextlib.suppress(*_GONE, psutil.AccessDenied, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            used |= {candidate for candidate in candidates if candidate in maps}
            used |= candidates & {file.path for file in process.open_files()}
    return used


def _environment(process: psutil.Process) -> dict[str, str]:
    # Processes of other users, and those that end while we look, are none of ours.
    with contextlib.suppress(*_GONE, psutil.AccessDenied, OSError):
        return process.environ()
    return {}


def _descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(*_GONE):
            found += process.children(recursive=True)
    return found


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in set(processes):
        with contextlib.suppress(*_GONE):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _signal_and_wait(processes: list[psutil.Process], signum: int, timeout_s: float) -> None:
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.send_signal(signum)
    deadline_s = time.monotonic() + timeout_s
    while _living(processes) and time.monotonic() < deadline_s:
        time.sleep(0.05)
