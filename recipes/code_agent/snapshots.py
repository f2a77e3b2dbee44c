"""Files of a task on disk: inline texts, and snapshots of repositories.

A snapshot is a directory, a tar archive (``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.bz2``, ``.tar.xz``) or a ``.zip``
archive; the paths in it are those of the repository. Whatever it holds, nothing is written outside of its target.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

MAX_SNAPSHOT_BYTES = 1 << 30
MAX_SNAPSHOT_FILES = 100_000
"""Larger than any repository that an agent repairs; every trajectory has a copy."""

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_SKIPPED_FOLDERS = {".git", "__pycache__"}


def write_files(root: Path, files: dict[str, str]) -> None:
    """Write text files, given by relative path, below ``root``, readable for every user.

    Raises:
        ValueError: a path leads outside of ``root``.
    """
    for path, text in files.items():
        target = root / _checked_path(path)
        _make_place(root, target)
        target.write_bytes(text.encode("utf-8"))
        target.chmod(0o644)


def unpack(snapshot: Path, root: Path) -> None:
    """Copy a snapshot into the existing directory ``root``, without ``.git`` and compiled files.

    Raises:
        ValueError: there is no such snapshot, or it is too large or holds something unsuitable.
    """
    num_bytes = num_files = 0
    with open_snapshot(snapshot) as entries:
        for entry in entries:
            num_bytes, num_files = num_bytes + entry.num_bytes, num_files + 1
            if num_bytes > MAX_SNAPSHOT_BYTES or num_files > MAX_SNAPSHOT_FILES:
                raise ValueError(
                    f"snapshot {snapshot}: more than {MAX_SNAPSHOT_BYTES} bytes or {MAX_SNAPSHOT_FILES} files; "
                    "leave out what the task does not need"
                )
            _write_entry(entry, root)


def read_text(snapshot: Path, path: str) -> str | None:
    """Return the text of one file of a snapshot, None when there is no such file.

    Raises:
        ValueError: there is no such snapshot, or the file holds no UTF-8 text.
    """
    with open_snapshot(snapshot) as entries:
        for entry in entries:
            if os.path.normpath(entry.path) == os.path.normpath(path) and entry.data is not None:
                try:
                    return entry.data.read().decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"snapshot {snapshot}: {path} is no UTF-8 text") from error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of a snapshot; a symbolic link has a ``link`` instead of ``data``."""

    path: str
    num_bytes: int
    executable: bool = False
    link: str | None = None
    data: IO[bytes] | None = None


@contextmanager
def open_snapshot(snapshot: Path) -> Iterator[Iterator[Entry]]:
    """Iterate over the files of a snapshot; the data of an entry must be read before the next one."""
    if snapshot.is_dir():
        yield _directory_entries(snapshot)
    elif not snapshot.is_file():
        raise ValueError(f"snapshot {snapshot}: no such file or directory; give the path of a repository's snapshot")
    elif snapshot.name.endswith(_TAR_SUFFIXES):
        with _naming(snapshot, tarfile.TarError), tarfile.open(snapshot) as archive:
            yield _tar_entries(archive)
    elif snapshot.name.endswith(".zip"):
        with _naming(snapshot, zipfile.BadZipFile), zipfile.ZipFile(snapshot) as archive:
            yield _zip_entries(archive)
    else:
        raise ValueError(f"snapshot {snapshot}: expected a directory, {', '.join(_TAR_SUFFIXES)} or .zip")


@contextmanager
def _naming(snapshot: Path, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (*kinds, EOFError, OSError) as error:
        raise ValueError(f"snapshot {snapshot}: can't be read ({error}); make the archive anew") from error


def _checked_path(path: str) -> PurePosixPath:
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"path {path!r}: expected a path relative to the repository, without '..'")
    return pure


def _directory_entries(snapshot: Path) -> Iterator[Entry]:
    for folder, folders, names in os.walk(snapshot):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(names + links):
            full = os.path.join(folder, name)
            path, status = os.path.relpath(full, snapshot), os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                yield Entry(path=path, num_bytes=0, link=os.readlink(full))
            elif stat.S_ISREG(status.st_mode):
                with open(full, "rb") as data:
                    yield Entry(path=path, num_bytes=status.st_size, executable=bool(status.st_mode & 0o100), data=data)


def _tar_entries(archive: tarfile.TarFile) -> Iterator[Entry]:
    for member in archive:
        if member.issym():
            yield Entry(path=member.name, num_bytes=0, link=member.linkname)
        elif member.isfile():
            data = archive.extractfile(member)
            yield Entry(path=member.name, num_bytes=member.size, executable=bool(member.mode & 0o100), data=data)
        elif not member.isdir():
            raise ValueError(f"snapshot {archive.name}: {member.name} is neither a file, a directory nor a link")


def _zip_entries(archive: zipfile.ZipFile) -> Iterator[Entry]:
    for member in archive.infolist():
        mode = member.external_attr >> 16
        if stat.S_ISLNK(mode):
            yield Entry(path=member.filename, num_bytes=0, link=archive.read(member).decode())
        elif not member.is_dir():
            with archive.open(member) as data:
                yield Entry(path=member.filename, num_bytes=member.file_size, executable=bool(mode & 0o100), data=data)


def _write_entry(entry: Entry, root: Path) -> None:
    path = _checked_path(entry.path)
    if _SKIPPED_FOLDERS & set(path.parts):
        return
    target = root / path
    _make_place(root, target)
    if entry.link is not None:
        _make_link(root, target, entry.link)
        return
    with open(target, "wb", opener=_no_follow) as file:
        shutil.copyfileobj(entry.data, file)
    target.chmod(0o755 if entry.executable else 0o644)


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _make_place(root: Path, target: Path) -> None:
    """Make the directories that the target goes into, unless a link leads outside."""
    if not _is_inside(root, target):
        raise ValueError(f"path {target.relative_to(root)}: leads outside of the repository through a link")
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in list(target.parents)[: len(target.relative_to(root).parts) - 1]:
        folder.chmod(0o755)


def _is_inside(root: Path, target: Path) -> bool:
    return Path(os.path.realpath(target)).is_relative_to(os.path.realpath(root))


def _make_link(root: Path, target: Path, link: str) -> None:
    if os.path.isabs(link) or not _is_inside(root, target.parent / link):
        raise ValueError(f"path {target.relative_to(root)}: is a link to {link!r}, outside of the repository")
    target.symlink_to(link)
