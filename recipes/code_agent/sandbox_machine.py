"""What the machine offers to the sandbox: a user id of its own, Landlock, an interpreter that others may start."""

from __future__ import annotations

import fcntl
import os
import pwd
import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from recipes.code_agent import sandbox_isolation as isolation
from recipes.code_agent.scratch import shared_directory


class SandboxError(RuntimeError):
    """The program could not be isolated or started, so it was not run; the text names the remedy."""


SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/proc", "/sys", "/dev")
_FIRST_USER_ID, _NUM_USER_IDS = 55000, 1000
"""Ids below 65536, which containers with own user ids map, outside of what distributions hand out."""


@contextmanager
def private_user() -> Iterator[int | None]:
    """Reserve a user id that nobody else runs under, or None when this process is not root.

    The kernel counts processes by user id, and nothing else limits those of root.
    """
    if os.geteuid() != 0:
        yield None
        return
    folder = shared_directory("users")
    offset = random.randrange(_NUM_USER_IDS)
    for number in range(_NUM_USER_IDS):
        uid = _FIRST_USER_ID + (offset + number) % _NUM_USER_IDS
        descriptor = os.open(folder / str(uid), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if not _is_real_user(uid) and _try_lock(descriptor):
                yield uid
                return
        finally:
            os.close(descriptor)
    raise SandboxError(f"all user ids from {_FIRST_USER_ID} on are in use; run fewer sandboxes at a time")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _is_real_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def give(root: Path, uid: int) -> None:
    os.chown(root, uid, uid)
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)


def landlock_version(confine: bool, uid: int | None) -> int:
    """Return the version of Landlock to use, 0 for none."""
    if not confine:
        return 0
    version = isolation.landlock_version()
    if version == 0 and uid is None:
        raise SandboxError(
            "sandbox: files is 'confine', but this kernel offers no Landlock and this process is not root; "
            "use a kernel of version 5.13 or later with Landlock, run as root, or set files: open"
        )
    return version


@cache
def interpreter() -> str:
    """Return this interpreter, free of symbolic links: a virtual environment adds nothing to a bare start."""
    return os.path.realpath(sys.executable)


@cache
def interpreter_paths() -> list[str]:
    """Return the places from which this interpreter and its environment load code."""
    stdlib = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return list(dict.fromkeys(map(os.path.realpath, [sys.prefix, sys.base_prefix, interpreter(), *stdlib])))


def must_keep_reading(paths: list[str], landlock: int) -> bool:
    """Return whether a private user needs the right to pass through directories that are closed to others."""
    closed = next((path for path in paths if not is_open_to_others(path)), None)
    if closed is None:
        return False
    if not landlock:
        raise SandboxError(
            f"sandbox: {closed} is closed to other users, such as the one that sandboxed programs run under; "
            "make it readable for all, or use a kernel with Landlock and files: confine"
        )
    return True


def is_open_to_others(path: str) -> bool:
    place = Path(path)
    try:
        return place.stat().st_mode & 0o001 > 0 and all(p.stat().st_mode & 0o001 for p in place.parents)
    except FileNotFoundError:
        return True


def environment(home: Path) -> dict[str, str]:
    path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    fixed = {"PATH": path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    return fixed | {"HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
