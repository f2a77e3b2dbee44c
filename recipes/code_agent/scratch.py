"""Directories that don't outlive the process that made them.

Each process has one owner directory below ``<temporary directory>/verl_war_code_agent_<user id>`` and holds a lock on
the file next to it. The kernel drops the lock when the process dies, however it dies; the next process that starts
removes the directories whose lock it can take. That works across containers that share a temporary directory, where
process ids say nothing.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK_SUFFIX = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    pid: int
    directory: Path
    lock_fd: int


_owner: _Owner | None = None
_owner_guard = threading.Lock()


def new_directory(kind: str) -> Path:
    """Create an empty directory, accessible to this user only, whose name starts with ``kind``.

    The caller removes it with :func:`remove_tree`; what is left is removed when the process exits, or by the next
    process after a crash.

    Raises:
        RuntimeError: somebody else owns the place where the directories go.
    """
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_owner_directory()))


def base_directory() -> Path:
    """Return the directory that holds the owner directories of all processes of this user."""
    return Path(tempfile.gettempdir()) / f"verl_war_code_agent_{os.getuid()}"


def shared_directory(name: str) -> Path:
    """Return a directory that all processes of this user share, and that stays."""
    base = base_directory()
    _make_base(base)
    (base / name).mkdir(mode=0o700, exist_ok=True)
    return base / name


def _owner_directory() -> Path:
    global _owner
    with _owner_guard:
        base = base_directory()
        if _owner is None or _owner.pid != os.getpid() or _owner.directory.parent != base:
            _make_base(base)
            sweep(base)
            _owner = _new_owner(base)
            atexit.register(_release, _owner)
        _owner.directory.mkdir(mode=0o711, exist_ok=True)
        return _owner.directory


def _make_base(base: Path) -> None:
    base.mkdir(mode=0o711, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RuntimeError(f"{base} belongs to user {status.st_uid} or is no directory; remove it or set TMPDIR")
    # Other users may pass through, not list: a sandboxed program under another user id works further below.
    base.chmod(0o711)


def _new_owner(base: Path) -> _Owner:
    """Take a lock first and create its directory afterwards, so that no sweep finds the directory without a lock."""
    while True:
        lock_fd, lock_path = tempfile.mkstemp(suffix=_LOCK_SUFFIX, dir=base)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        # A sweep between the two calls has removed the file: try again with another one.
        if os.fstat(lock_fd).st_nlink > 0:
            directory = Path(lock_path.removesuffix(_LOCK_SUFFIX))
            directory.mkdir(mode=0o711)
            directory.chmod(0o711)
            return _Owner(pid=os.getpid(), directory=directory, lock_fd=lock_fd)
        os.close(lock_fd)


def _release(owner: _Owner) -> None:
    """Remove the owner directory at exit, unless this is a forked child of its owner."""
    if owner.pid == os.getpid():
        remove_tree(owner.directory)
        owner.directory.with_name(owner.directory.name + _LOCK_SUFFIX).unlink(missing_ok=True)
        os.close(owner.lock_fd)


def sweep(base: Path) -> int:
    """Remove the directories of dead processes below ``base`` and return how many there were."""
    num_removed = 0
    for lock_path in base.glob(f"*{_LOCK_SUFFIX}"):
        try:
            lock_fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(lock_path.with_name(lock_path.name.removesuffix(_LOCK_SUFFIX)))
            lock_path.unlink(missing_ok=True)
            num_removed += 1
        except BlockingIOError:
            continue
        finally:
            os.close(lock_fd)
    if num_removed:
        logger.info("removed the directories of %d dead processes below %s", num_removed, base)
    return num_removed


def remove_tree(root: Path) -> None:
    """Remove a directory that untrusted code has written to; nothing happens if it does not exist.

    Directories without permissions, and nesting deeper than the path limit or Python's recursion limit, are no
    obstacle: subdirectories are moved up before they are removed. Symbolic links are removed, never followed.
    """
    if not root.exists():
        return
    number = 0
    pending = [root]
    while pending:
        directory = pending.pop()
        os.chmod(directory, 0o700)
        with os.scandir(directory) as entries:
            children = list(entries)
        for child in children:
            if child.is_dir(follow_symlinks=False):
                os.chmod(child.path, 0o700)
                raised = root / f".raised-{number}"
                number += 1
                os.rename(child.path, raised)
                pending.append(raised)
            else:
                os.unlink(child.path)
        if directory != root:
            os.rmdir(directory)
    os.rmdir(root)
