"""Supervisor of one sandboxed program, in a bare interpreter of its own.

:mod:`recipes.code_agent.sandbox` starts it, writes a marshalled dict to its stdin (keys: see :func:`main`) and keeps
stdin open; end of file there means that the starter is gone or wants an end, and everything is killed. The result is a
marshalled dict on stdout::

    {"exit_code": int or None, "head": bytes, "tail": bytes, "num_left_out": int, "killed_reason": str or None}

or ``{"error": text}`` when the program could not be isolated or started, and so was not run.

The supervisor stays outside of the sandbox. It is the subreaper of everything that the program starts, measures it
together, and ends it together. It imports little because it is started for every run.
"""

import marshal
import os
import select
import signal
import sys
import time

import sandbox_isolation as isolation
import sandbox_processes as processes

_TICK_S = 0.02
"""Between two measurements; a program that forks or fills the disk at full speed stays near its limits."""
_MEASURE_SHARE = 0.1
"""Longest share of the time to spend on measuring."""
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Watch:
    """Compares what the program uses with its limits."""

    def __init__(self, spec):
        self.spec = spec
        self.start_s = time.monotonic()
        self._next_s = 0.0

    def exceeded(self):
        """Return the name of a limit that is exceeded, or None."""
        now_s = time.monotonic()
        if now_s - self.start_s > self.spec["wall_s"]:
            return "wall time"
        if now_s < self._next_s:
            return None
        reason = self._processes() or self._disk()
        end_s = time.monotonic()
        self._next_s = end_s + max(_TICK_S, (end_s - now_s) / _MEASURE_SHARE)
        return reason

    def _processes(self):
        cpu_ticks, resident = 0, {}
        for pid in processes.descendants():
            fields = processes.stat_fields(pid)
            if fields:
                cpu_ticks += int(fields[11]) + int(fields[12])
                resident[pid] = int(fields[21]) * processes.PAGE_BYTES
        if len(resident) > self.spec["num_processes"]:
            return "processes"
        if cpu_ticks / _CLOCK_TICKS_PER_S + processes.own_cpu_s() > self.spec["cpu_s"]:
            return "CPU time"
        limit = self.spec["memory_bytes"]
        if (
            sum(resident.values()) > limit
            and sum(processes.proportional_bytes(*item) for item in resident.items()) > limit
        ):
            return "memory"
        return None

    def _disk(self):
        spec = self.spec
        owner = spec["uid"] if spec["landlock"] == 0 else None
        return "disk" if processes.disk_bytes(spec["writable"], owner) > spec["disk_bytes"] else None


class _Output:
    """The beginning and the end of what the program prints."""

    def __init__(self, descriptor, max_bytes):
        self.descriptor = descriptor
        self.head, self.tail, self.num_bytes = b"", b"", 0
        self._half = max_bytes // 2

    def read(self):
        """Take what is there; return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return True
        self.num_bytes += len(data)
        room = self._half - len(self.head)
        if room > 0:
            self.head, rest = self.head + data[:room], data[room:]
        else:
            rest = data
        if rest:
            self.tail = (self.tail + rest)[-self._half :]
        return bool(data)

    def drain(self):
        """Take what the dead have left in the pipe, which is at most one pipe full."""
        before = -1
        while before != self.num_bytes:
            before = self.num_bytes
            self.read()


# --- the program ------------------------------------------------------------------------------------------------------


def _become_program(spec, stdin, stdout, failure):
    """Isolate this process and become the program; never returns."""
    stage = "start"
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for source, target in ((stdin, 0), (stdout, 1), (stdout, 2)):
            os.dup2(source, target)
        os.set_inheritable(failure, False)
        os.closerange(3, failure)
        os.closerange(failure + 1, 4096)
        os.umask(0o022)
        # In need of memory the kernel ends this process first, not the trainer.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        stage = "resource limits"
        isolation.set_resource_limits(spec["memory_bytes"], spec["file_bytes"], spec["cpu_s"], spec["num_files"])
        if spec["uid"] is not None:
            stage = "user"
            isolation.change_user(spec["uid"], spec["keep_reading"])
        stage = "processes"
        isolation.limit_processes(
            spec["num_processes"], 0 if spec["uid"] is not None else processes.num_tasks(os.getuid())
        )
        isolation.die_with_parent()
        isolation.forbid_new_privileges()
        if spec["landlock"]:
            stage = "files"
            isolation.confine_files(spec["landlock"], spec["readable"], spec["writable"])
        stage = "network"
        _filter_system_calls(spec)
        stage = "program"
        os.chdir(spec["cwd"])
        # Python and this supervisor changed these; a program expects them as usual.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["command"][0], spec["command"], spec["env"])
    except OSError as error:
        os.write(failure, f"{stage}: {error}".encode())
    finally:
        os._exit(127)


def _filter_system_calls(spec):
    try:
        isolation.filter_system_calls(spec["allow_network"], spec["allow_unix"], spec["protected_pids"])
    except OSError:
        # The switch that accepts the network also accepts machines without filters.
        if not spec["allow_network"]:
            raise


def _start(spec):
    """Start the program; return its pid, the pipe with its output, and why it could not be started (or "")."""
    stdin = os.memfd_create("stdin")
    os.write(stdin, spec["stdin"])
    os.lseek(stdin, 0, os.SEEK_SET)
    output, output_end = os.pipe()
    failure, failure_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_program(spec, stdin, output_end, failure_end)
    for descriptor in (stdin, output_end, failure_end):
        os.close(descriptor)
    reason = os.read(failure, 4096).decode(errors="replace")
    os.close(failure)
    os.set_blocking(output, False)
    return pid, output, reason


def _supervise(spec, pid, output, wakeup):
    """Wait for the end of the program or of its limits; return its wait status (or None) and the reason to kill it."""
    watch, poller, collected = _Watch(spec), select.poll(), {}
    for descriptor in (output.descriptor, wakeup, 0):
        poller.register(descriptor, select.POLLIN)
    while True:
        events = dict(poller.poll(_TICK_S * 1000))
        if 0 in events:
            return None, "stopped"
        if output.descriptor in events and not output.read():
            poller.unregister(output.descriptor)
        if wakeup in events:
            os.read(wakeup, 4096)
        collected.update(processes.reap())
        if pid in collected:
            return collected[pid], None
        reason = "output" if output.num_bytes > spec["max_printed_bytes"] else watch.exceeded()
        if reason:
            return None, reason


def _wakeup_on_dead_children():
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _run(spec):
    isolation.become_subreaper()
    if spec["uid"] is not None:
        processes.kill_user(spec["uid"])
    wakeup = _wakeup_on_dead_children()
    pid, descriptor, failure = _start(spec)
    if failure:
        os.waitpid(pid, 0)
        return {"error": failure}
    output = _Output(descriptor, spec["max_output_bytes"])
    status, reason = _supervise(spec, pid, output, wakeup)
    killed = processes.kill_all()
    output.drain()
    status = killed.get(pid) if status is None else status
    exit_code = None if status is None else os.waitstatus_to_exitcode(status)
    if reason is None and exit_code == -signal.SIGXCPU:
        reason = "CPU time"
    num_left_out = output.num_bytes - len(output.head) - len(output.tail)
    result = {"exit_code": exit_code, "killed_reason": reason, "num_left_out": num_left_out}
    return result | {"head": output.head, "tail": output.tail}


def main():
    """Run the program that the dict on stdin describes.

    Keys: command, cwd, env, stdin; wall_s, cpu_s, memory_bytes, num_processes, num_files, file_bytes, disk_bytes,
    max_output_bytes, max_printed_bytes; uid (None: keep the user), keep_reading; landlock (version, 0 for none),
    readable, writable; allow_network, allow_unix, protected_pids.
    """
    size = int.from_bytes(sys.stdin.buffer.raw.read(8), "little")
    data = b""
    while len(data) < size:
        part = sys.stdin.buffer.raw.read(size - len(data))
        if not part:
            return
        data += part
    spec = marshal.loads(data)
    if spec["protected_pids"]:
        spec["protected_pids"] += [os.getpid(), -os.getpid()]
    result = _run(spec)
    if spec["uid"] is not None and not spec["landlock"]:
        processes.remove_public_files(spec["uid"])
    _write_all(1, marshal.dumps(result))


def _write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
