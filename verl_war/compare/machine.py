"""What a comparison needs to know of the machine: free memory, and the facts that belong beside a result."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

from verl_war.support import SUPPORT
from verl_war.version import clone_version

CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30

CPU_MEMORY_GIB = 12.0
"""What two replicas, two trainers, Ray and their shared memory take with the demo model: 11.6 GiB were seen."""


MOST_MEMORY_GIB = 1_000_000
"""More than any machine has, and finite."""


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that new processes can get: the machine's, or less where a container limits us."""
    available = psutil.virtual_memory().available
    limit, used = _read_limit(cgroup / "memory.max"), _read_limit(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # The page cache counts as used but is given back on demand.
    return min(available, limit - used + _cached_bytes(cgroup / "memory.stat"))


def memory_bytes(gib: float) -> int:
    """Bytes of `--memory-gb`.

    Raises:
        ValueError: It is no amount of memory.
    """
    if not 0 <= gib <= MOST_MEMORY_GIB:
        raise ValueError(f"--memory-gb={gib} must be between 0 and {MOST_MEMORY_GIB}")
    return int(gib * GIB)


def require_memory(needed_bytes: int, what: str) -> None:
    """Check that ``what`` can run now.

    Raises:
        ValueError: There is less memory; states needed and found.
    """
    found_bytes = available_memory_bytes()
    if found_bytes < needed_bytes:
        raise ValueError(
            f"{what} needs {needed_bytes / GIB:.1f} GiB of free memory and {found_bytes / GIB:.1f} GiB are free; end "
            "other programs (another training run?) or lower --memory-gb if you know that less is enough, and repeat "
            "the same command: what is finished is kept"
        )


def describe(repo: Path) -> dict[str, str]:
    """Versions and hardware, for reports."""
    versions = {row.distribution: _installed(row.distribution) for row in SUPPORT}
    return {
        "verl_war": clone_version(repo),
        **{name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / GIB:.0f} GiB",
        "system": platform.platform(terse=True),
    }


def _read_limit(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _cached_bytes(path: Path) -> int:
    rows = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
