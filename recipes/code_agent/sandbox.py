"""Run a program that nobody trusts: bounded in everything, without network, and gone without a trace afterwards.

:func:`run_in_sandbox` starts a supervisor (:mod:`recipes.code_agent.sandbox_launcher`), which isolates the program and
ends it, with all that it has started, when it exits or exceeds a limit. The calling process may be large and have many
threads: nothing of it is copied but file descriptors that close by themselves.

What the program meets, as root and as an ordinary user, also in a container without extra capabilities:

* its own session, user id (when started by root), empty environment, and an own directory that is ``HOME`` and
  ``TMPDIR``, the only place where it may write, removed at the end;
* resource limits per process, and on the sum of its processes what the supervisor measures every 20 ms;
* a system call filter: no sockets, no other process, no mounts, no namespaces;
* Landlock: only the interpreter, the system directories and the working directory can be read.

Where the machine can't give this, :class:`SandboxError` says what is missing and which switch accepts the loss.
"""

from __future__ import annotations

import logging
import marshal
import math
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.code_agent import sandbox_machine as machine
from recipes.code_agent.sandbox_machine import SandboxError
from recipes.code_agent.scratch import new_directory, remove_tree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a sandboxed program may use. Limits hold for the program and all that it starts together."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    """Resident memory in all, and address space of each process."""
    num_processes: int = 64
    """Processes and threads."""
    num_files: int = 256
    """Open files of each process."""
    file_bytes: int = 64 << 20
    """Size of each file."""
    disk_bytes: int = 256 << 20
    """Size of all files in the program's own directory."""
    output_bytes: int = 64 << 10
    """What is kept of the output: the first and the last half of it."""
    printed_bytes: int = 256 << 20
    """Output after which the program is ended."""
    network: str = "block"
    """``block``: no sockets. ``allow``: as without a sandbox."""
    unix_sockets: bool = False
    """Allow sockets between processes of this machine even when the network is blocked."""
    files: str = "confine"
    """``confine``: write only to the own directory, read only system directories, interpreter and working directory.
    ``open``: whatever the user may do."""
    readable_paths: tuple[str, ...] = ()
    """Further places that may be read, for instance a virtual environment with a project's requirements."""

    def __post_init__(self) -> None:
        for name, allowed in (("network", ("block", "allow")), ("files", ("confine", "open"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"sandbox: {name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"sandbox: {name} is {value}; expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a sandboxed program ended.

    Attributes:
        exit_code: exit status; negative for the signal that ended it; None when it could not be learnt.
        output: stdout and stderr as one text, shortened in the middle to the limit.
        timed_out: whether the wall or CPU time ran out.
        duration_s: from the start of the supervisor to the end of everything.
        killed_reason: the exceeded limit (``wall time``, ``CPU time``, ``memory``, ``processes``, ``disk``,
            ``output``), ``stopped`` by :meth:`SandboxRun.kill`, or None.
    """

    exit_code: int | None
    output: str
    timed_out: bool
    duration_s: float
    killed_reason: str | None


def run_in_sandbox(
    command: Sequence[str],
    cwd: str | Path,
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008 - immutable
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> SandboxResult:
    """Run a program and wait for its end; blocks for ``limits.wall_s`` and a little more at most.

    Args:
        command: program and arguments; the program is looked up in ``PATH``.
        cwd: working directory, read-only for the program.
        limits: what it may use.
        stdin: what it can read from its standard input.
        env: additions to its environment.

    Raises:
        SandboxError: the program could not be isolated or started.
    """
    return SandboxRun(command, cwd, limits, stdin=stdin, env=env).wait()


GRACE_S = 20.0
"""What the supervisor may take beyond the wall time before it counts as lost; killing a fork bomb takes most."""
_SLOTS = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""More runs at a time would only make each other exceed their wall time."""


class SandboxRun:
    """A program in the sandbox that another thread can :meth:`kill`. Arguments: see :func:`run_in_sandbox`.

    With ``writable_copy`` the program works in a copy of ``cwd`` that is thrown away.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str | Path,
        limits: SandboxLimits,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        writable_copy: bool = False,
    ) -> None:
        self._command = list(command)
        self._cwd = os.path.realpath(cwd)
        self._limits = limits
        self._stdin = stdin
        self._env = dict(env or {})
        self._writable_copy = writable_copy
        self._guard = threading.Lock()
        self._stopped = False
        self._control_fd: int | None = None
        """The supervisor ends everything when this end of its stdin closes."""

    def kill(self) -> None:
        """End the program, or keep it from starting; :meth:`wait` then returns with the reason ``stopped``."""
        with self._guard:
            self._stopped = True
            self._close_control()

    def wait(self) -> SandboxResult:
        """Run the program, see :func:`run_in_sandbox`."""
        with _SLOTS, machine.private_user() as uid:
            start_s = time.monotonic()
            own = new_directory("sandbox")
            try:
                raw = self._supervise(self._spec(own, uid), own)
            finally:
                remove_tree(own)
            return self._result(raw, time.monotonic() - start_s)

    def _spec(self, own: Path, uid: int | None) -> dict[str, object]:
        """Prepare the program's own directory and describe the run for the supervisor."""
        limits = self._limits
        own.chmod(0o711)
        home = own / "home"
        home.mkdir(mode=0o700)
        cwd = self._cwd
        if self._writable_copy:
            cwd = str(home / "work")
            shutil.copytree(self._cwd, cwd, symlinks=True)
        if uid is not None:
            machine.give(home, uid)
        readable = [*machine.interpreter_paths(), self._cwd, *map(os.path.realpath, limits.readable_paths)]
        landlock = machine.landlock_version(limits.files == "confine", uid)
        return {
            "command": self._command,
            "cwd": cwd,
            "env": machine.environment(home) | self._env,
            "stdin": self._stdin,
            "wall_s": limits.wall_s,
            "cpu_s": math.ceil(limits.cpu_s),
            "memory_bytes": limits.memory_bytes,
            "num_processes": limits.num_processes,
            "num_files": limits.num_files,
            "file_bytes": limits.file_bytes,
            "disk_bytes": limits.disk_bytes,
            "max_output_bytes": limits.output_bytes,
            "max_printed_bytes": limits.printed_bytes,
            "uid": uid,
            "keep_reading": uid is not None and machine.must_keep_reading([*readable, str(own)], landlock),
            "landlock": landlock,
            "readable": [*machine.SYSTEM_PATHS, *readable],
            "writable": [str(home)],
            "allow_network": limits.network == "allow",
            "allow_unix": limits.unix_sockets,
            "protected_pids": [-1, os.getpid(), -os.getpgrp()] if uid is None else [],
        }

    def _supervise(self, spec: dict[str, object], own: Path) -> dict[str, object]:
        """Start the supervisor and return what it reports."""
        with open(own / "errors", "w+b") as errors:
            with self._guard:
                if self._stopped:
                    return _STOPPED
                supervisor, self._control_fd = _start_supervisor(marshal.dumps(spec), errors.fileno())
            try:
                reply = _read_until_end(supervisor.stdout.fileno(), self._limits.wall_s + GRACE_S)
            finally:
                with self._guard:
                    self._close_control()
                supervisor.kill()
                supervisor.wait()
                supervisor.stdout.close()
            if not reply:
                if self._stopped:
                    return _STOPPED
                errors.seek(0)
                raise SandboxError(f"the sandbox supervisor failed: {errors.read(4000).decode(errors='replace')}")
        return marshal.loads(reply)

    def _close_control(self) -> None:
        if self._control_fd is not None:
            os.close(self._control_fd)
            self._control_fd = None

    def _result(self, raw: dict[str, object], duration_s: float) -> SandboxResult:
        if "error" in raw:
            raise SandboxError(_explain(str(raw["error"]), self._command))
        middle = f"\n[{raw['num_left_out']} bytes left out]\n".encode() if raw["num_left_out"] else b""
        return SandboxResult(
            exit_code=raw["exit_code"],
            output=(raw["head"] + middle + raw["tail"]).decode("utf-8", errors="replace"),
            timed_out=raw["killed_reason"] in ("wall time", "CPU time"),
            duration_s=duration_s,
            killed_reason=raw["killed_reason"],
        )


_STOPPED = {"exit_code": None, "killed_reason": "stopped", "num_left_out": 0, "head": b"", "tail": b""}

# --- the supervisor process -------------------------------------------------------------------------------------------

_START = "import sys; sys.path.append({!r}); from sandbox_launcher import main; main()"


def _start_supervisor(spec: bytes, errors_fd: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the supervisor with its description; return it and the descriptor whose closing ends it.

    Without ``preexec_fn``, :mod:`subprocess` starts it by vfork, which copies nothing of a large process.
    """
    control_end, control_fd = os.pipe()
    command = [machine.interpreter(), "-I", "-S", "-c", _START.format(str(Path(__file__).parent))]
    try:
        supervisor = subprocess.Popen(
            command, stdin=control_end, stdout=subprocess.PIPE, stderr=errors_fd, env={}, start_new_session=True
        )
    except BaseException:
        os.close(control_fd)
        raise
    finally:
        os.close(control_end)
    view = memoryview(len(spec).to_bytes(8, "little") + spec)
    try:
        while view:
            view = view[os.write(control_fd, view) :]
    except BrokenPipeError:
        # It died at once; its empty reply and its stderr tell why.
        logger.warning("the sandbox supervisor died before it knew what to do")
    return supervisor, control_fd


def _read_until_end(descriptor: int, timeout_s: float) -> bytes:
    """Read a pipe until its end.

    Raises:
        SandboxError: the end did not come in time.
    """
    end_s = time.monotonic() + timeout_s
    poller, data = select.poll(), b""
    poller.register(descriptor, select.POLLIN)
    while (left_s := end_s - time.monotonic()) > 0:
        if poller.poll(left_s * 1000):
            part = os.read(descriptor, 1 << 20)
            if not part:
                return data
            data += part
    raise SandboxError(f"the sandbox supervisor did not end within {timeout_s:g} s and was killed")


_REMEDIES = {
    "user": "run as an ordinary user, or give the container the capabilities SETUID, SETGID and DAC_OVERRIDE",
    "files": "use a kernel with Landlock, or set files: open",
    "network": "use Linux on x86_64 or aarch64 with seccomp filters, or set network: allow",
    "processes": "end other processes of this user, or raise its limit (ulimit -u)",
    "program": "check that the program exists and that every user may read it",
}


def _explain(error: str, command: list[str]) -> str:
    stage = error.split(":")[0]
    return f"the sandbox could not start {command[0]!r} ({error}); {_REMEDIES.get(stage, 'see the system call named')}"
