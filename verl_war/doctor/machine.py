"""Checks of the machine: processor or accelerator, memory, disk, Ray, processes left over from other runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_war.compare.machine import CPU_MEMORY_GIB, GIB, available_memory_bytes
from verl_war.doctor.report import Check, Status, check
from verl_war.support import Machine

VLLM_CPU_FLAGS = ("avx512f", "avx2")
"""vLLM's CPU wheels for x86 hold kernels for these instruction sets and no others."""

RAY_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""``ray start`` writes it, and ``ray.init()`` joins the cluster that it names."""

RAY_TIMEOUT_S = 120.0

BUSY_SHARE = 0.5
"""Of the cores; a run computes on all of them."""

LEFTOVERS = ("raylet", "gcs_server", "ray::", "VLLM::")
"""How the processes of Ray and vLLM call themselves."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """How much of a resource must be free.

    Attributes:
        fail_bytes: Below this a run cannot work.
        warn_bytes: Below this a run may not work.
    """

    fail_bytes: int
    warn_bytes: int

    def status(self, free_bytes: int) -> Status:
        """Returns what ``free_bytes`` means."""
        if free_bytes < self.fail_bytes:
            return "failed"
        return "warning" if free_bytes < self.warn_bytes else "ok"


MEMORY = Threshold(fail_bytes=8 * GIB, warn_bytes=int(CPU_MEMORY_GIB * GIB))
"""For the demo model on a CPU machine."""

SHARED_MEMORY = Threshold(fail_bytes=GIB, warn_bytes=2 * GIB)
"""Ray's object store takes 1 GB on a CPU machine, weight buckets 128 MiB per trainer; containers often have 64 MiB."""

DISK = Threshold(fail_bytes=GIB, warn_bytes=5 * GIB)
"""Ray's session logs and spilled objects, and checkpoints of a small model."""


def check_processor(machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Says what computes; on a CPU machine, whether vLLM has kernels for it."""
    cores = len(os.sched_getaffinity(0))
    if machine == "gpu":
        return _check_accelerator()
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
    usable = [flag for flag in VLLM_CPU_FLAGS if flag in flags]
    detail = f"{cores} cores" + (f" with {usable[0]}" if usable else "")
    if not flags:  # not x86: the wheel for this architecture has its own kernels
        return Check("machine.processor", "ok", detail)
    return check(
        "machine.processor",
        bool(usable),
        detail + ("" if usable else f" with neither of {', '.join(VLLM_CPU_FLAGS)}"),
        "vLLM has no kernels for this processor; use another machine",
    )


def _check_accelerator() -> Check:
    tool = shutil.which("nvidia-smi")
    listed = "" if tool is None else subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return check(
        "machine.accelerator",
        count > 0,
        f"{count} GPUs seen by nvidia-smi, torch is built for accelerators",
        'on a machine without GPU install the CPU packages: pip install "verl_war[cpu]"; '
        "on the login node of a GPU cluster ignore this",
        otherwise="warning",
    )


def check_load(processes_running: float | None = None) -> Check:
    """Says whether other programs compute (mean of the last minute): what a run then takes tells little."""
    running = os.getloadavg()[0] if processes_running is None else processes_running
    cores = len(os.sched_getaffinity(0))
    return check(
        "machine.load",
        running <= BUSY_SHARE * cores,
        f"{running:.1f} processes computing on {cores} cores",
        "runs work, but take longer; for measurements wait until the machine is quiet",
        otherwise="warning",
    )


def check_resources(machine: Machine, scratch: Path = Path("/tmp"), shm: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Compares free memory, shared memory and disk with what a small run takes."""
    yield _free("memory", available_memory_bytes(), MEMORY, "end other programs, or use a larger machine")
    if machine == "cpu" and shm.exists():
        yield _free("shared_memory", _free_bytes(shm), SHARED_MEMORY, "remount it larger (docker run --shm-size=4g)")
    for place in dict.fromkeys([scratch, Path.cwd()]):
        yield _free(f"disk.{place}", _free_bytes(place), DISK, f"free space on the file system of {place}")


def _free(name: str, free_bytes: int, threshold: Threshold, remedy: str) -> Check:
    status = threshold.status(free_bytes)
    detail = f"{free_bytes / GIB:.1f} GiB free, {threshold.warn_bytes / GIB:.0f} GiB wanted"
    return Check(f"machine.{name}", status, detail, "" if status == "ok" else remedy)


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def check_ray_cluster(cluster_file: Path = RAY_CLUSTER_FILE) -> Check:
    """Says whether verl will start its own Ray or join a running one, which ignores ``ray_kwargs.ray_init``."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address and cluster_file.exists():
        address = cluster_file.read_text().strip()
    return check(
        "ray.cluster",
        not address,
        f"runs will join the cluster at {address}" if address else "runs will start their own",
        "if that is not meant: unset RAY_ADDRESS and run 'ray stop'",
        otherwise="warning",
    )


def check_ray_starts(command: Iterable[str] = ()) -> Check:
    """Starts a minimal Ray in another process and runs one task on it."""
    code = (
        "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False, object_store_memory=100_000_000);"
        "assert ray.get(ray.remote(lambda: 41 + 1).remote()) == 42; ray.shutdown()"
    )
    words = list(command) or [sys.executable, "-c", code]
    remedy = "look into /tmp/ray/session_latest/logs; free memory and /dev/shm, and check that localhost ports are open"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=RAY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check("ray.start", "failed", f"Ray did not run a task within {RAY_TIMEOUT_S:.0f} s", remedy)
    last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    good = done.returncode == 0
    return check("ray.start", good, "starts and runs a task" if good else f"does not start: {last_line}", remedy)


def check_leftovers(processes: Iterable[psutil.Process] | None = None) -> Iterator[Check]:
    """Looks for processes of Ray and vLLM: orphans hold memory for nothing, others belong to a run."""
    named = [(p, _title(p)) for p in (psutil.process_iter() if processes is None else processes)]
    found = [(process, title) for process, title in named if title.startswith(LEFTOVERS)]
    orphans = [item for item in found if _is_orphan(item[0])]
    running = [item for item in found if item not in orphans]
    yield check(
        "processes.orphans",
        not orphans,
        _listing(orphans) or "none",
        f"if no run of yours owns them: kill {' '.join(str(p.pid) for p, _ in orphans)}",
    )
    yield check(
        "processes.other_runs",
        not running,
        _listing(running) or "none",
        "wait for that run to end, or make sure that memory suffices for both",
        otherwise="warning",
    )


def _title(process: psutil.Process) -> str:
    """How ``process`` calls itself: its title, or the name of its program."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""
    return Path(words[0]).name if words and "::" not in words[0] else "".join(words[:1])


def _is_orphan(process: psutil.Process) -> bool:
    try:
        return process.ppid() <= 1
    except psutil.NoSuchProcess:
        return False


def _listing(items: list[tuple[psutil.Process, str]]) -> str:
    return ", ".join(f"{title} ({process.pid})" for process, title in items)
