"""A small parent of one training run that lets none of its processes outlive it.

It is the subreaper of everything below it: processes that detach themselves (Ray's daemons do) become its children
instead of init's, whatever they did to their session, title or environment. When the run ends, when it is told to
stop, and when the process that started it dies, it ends all of them.

    python -m verl_war.compare.supervisor PARENT_PID GRACE_S COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

from verl_war.compare.processes import new_children, stop_all

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_S = 0.5
"""A signal ends the wait at once; this only bounds how late a deadline is noticed."""

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def supervise(command: list[str], parent_pid: int, grace_s: float) -> int:
    """Run ``command`` to its end or until told to stop, then end everything that it left.

    Args:
        command: Program and arguments; inherits output and environment.
        parent_pid: Process whose death stops the run.
        grace_s: How long the program may take to end after an interrupt.

    Returns:
        The program's exit status, 128 + signal number when a signal ended it or stopped us.
    """
    _become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    _die_with(parent_pid)
    # The program starts with the signals as a shell would have left them.
    defaults = {signal.SIGPIPE, signal.SIGXFSZ, *STOP_SIGNALS}
    pid = os.posix_spawn(command[0], command, os.environ, setsigmask=[], setsigdef=defaults)
    status = _wait(pid, math.inf)
    if status < 0:
        # Only the driver is interrupted: it shuts Ray down, and Ray its workers.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        _wait(pid, grace_s)
    remaining = stop_all(new_children)
    if remaining:
        sys.stderr.write(f"could not end: {', '.join(map(str, remaining))}\n")
    return status if status >= 0 else 128 - status


def _wait(pid: int, timeout_s: float) -> int:
    """Reap children until ``pid`` ends; its exit status, or minus the number of the signal that stops us.

    Within a finite ``timeout_s`` nothing stops us but the time; then the result is minus SIGALRM.
    """
    deadline_s = time.monotonic() + timeout_s
    while (status := _reap(pid)) is None:
        received = signal.sigtimedwait({*STOP_SIGNALS, signal.SIGCHLD}, POLL_S)
        if timeout_s == math.inf and received is not None and received.si_signo in STOP_SIGNALS:
            return -received.si_signo
        if time.monotonic() > deadline_s:
            return -signal.SIGALRM
    return status


def _reap(pid: int) -> int | None:
    """Collect all dead children; the exit status of ``pid`` if it was one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            if child == pid:
                code = os.waitstatus_to_exitcode(status)
                found = code if code >= 0 else 128 - code
    return found


def _become_subreaper() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent_pid: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the process {parent_pid} that started this run is gone")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    raise SystemExit(supervise(sys.argv[3:], int(sys.argv[1]), float(sys.argv[2])))
