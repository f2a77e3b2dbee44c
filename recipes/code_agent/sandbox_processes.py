"""Processes below this one, by ``/proc``: finding, measuring and killing them, and what their files take.

Used by :mod:`sandbox_launcher` in a bare interpreter, so it imports only the standard library and little of it.
"""

import os
import resource
import signal
import stat
import sys
import time

PAGE_BYTES = resource.getpagesize()
PUBLIC_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")
"""Where every user may write."""


def _children(pid):
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _all_children():
    """Map each process to its children, for kernels without ``/proc/PID/task/TID/children``."""
    by_parent = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = stat_fields(int(name))
        if fields:
            by_parent.setdefault(int(fields[1]), []).append(int(name))
    return by_parent


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def descendants():
    """Return all living descendants of this process, zombies included."""
    by_parent = None if _HAS_CHILDREN_FILES else _all_children()
    found, pending = [], [os.getpid()]
    while pending:
        pid = pending.pop()
        children = _children(pid) if by_parent is None else by_parent.get(pid, [])
        found += children
        pending += children
    return found


def stat_fields(pid):
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on, or None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def reap():
    """Collect dead children; return ``{pid: wait status}`` of those."""
    collected = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return collected
        if pid == 0:
            return collected
        collected[pid] = status


def kill_all(deadline_s=10.0):
    """Kill every descendant and return the wait statuses of the children among them.

    All are stopped before the first is killed: a stopped process can't fork, so the number of those that still run
    only shrinks, whereas killing one by one loses the race against a fork bomb.
    """
    collected, end_s = {}, time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        stopped = set()
        while fresh := set(descendants()) - stopped:
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
            stopped |= fresh
        if not stopped:
            break
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.001)
        collected.update(reap())
    return collected


def processes_of(uid):
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                yield int(name)
        except FileNotFoundError:
            continue


def num_tasks(uid):
    """Number of threads of all processes that run under the user id."""
    return sum(int(fields[17]) for fields in map(stat_fields, processes_of(uid)) if fields)


def kill_user(uid):
    """Kill what an earlier supervisor, itself killed, has left under this user id."""
    for pid in processes_of(uid):
        _signal(pid, signal.SIGKILL)


def proportional_bytes(pid, resident):
    """Resident memory with shared pages divided among their users, or ``resident`` where that is not to be learnt.

    A container's root may not look into processes of other users.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        pass
    return resident


def own_cpu_s():
    """CPU time of collected children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def disk_bytes(roots, uid):
    """Bytes that the files below the roots take; in public places only what belongs to ``uid`` counts."""
    total, pending = 0, [(root, None) for root in roots]
    pending += [(place, uid) for place in (PUBLIC_PLACES if uid is not None else ())]
    while pending:
        path, owner = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if owner is not None and status.st_uid != owner:
                        continue
                    total += max(status.st_blocks * 512, 4096)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append((entry.path, owner))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError:
            # A path longer than the system allows: nested on purpose.
            return sys.maxsize
    return total


def remove_public_files(uid):
    """Remove what the program left in places where every user may write."""
    for place in PUBLIC_PLACES:
        for folder, folders, names in os.walk(place, topdown=False):
            for name in folders + names:
                path = os.path.join(folder, name)
                try:
                    if os.lstat(path).st_uid == uid:
                        os.rmdir(path) if name in folders and not os.path.islink(path) else os.unlink(path)
                except OSError:
                    continue
