"""`verl-war doctor`: processors, memory, disk, Ray and stray processes."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.doctor.helpers import assert_remedies, by_name
from verl_war.compare.machine import GIB
from verl_war.doctor import machine

PRINTS = (sys.executable, "-c")


@pytest.mark.parametrize(
    ("cpuinfo", "status", "shown"),
    [
        ("flags\t\t: fpu avx2 avx512f\n", "ok", "avx512f"),
        ("flags\t\t: fpu avx2\n", "ok", "avx2"),
        ("flags\t\t: fpu sse4_2\n", "failed", "neither"),
        ("Features\t: asimd\n", "ok", "cores"),
    ],
)
def test_processor(tmp_path, cpuinfo, status, shown):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    found = machine.check_processor("cpu", tmp_path / "cpuinfo")
    assert_remedies([found])
    assert found.status == status and shown in found.detail


@pytest.mark.parametrize(("listed", "status"), [("GPU 0: NVIDIA H200\nGPU 1: NVIDIA H200\n", "ok"), ("", "warning")])
def test_accelerators(tmp_path, monkeypatch, listed, status):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.check_processor("gpu")
    assert_remedies([found])
    assert found.status == status and found.detail.startswith("2 GPUs" if listed else "0 GPUs")


def test_no_accelerator_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_processor("gpu").status == "warning"


@pytest.mark.parametrize(
    ("free_gib", "status"), [(0.1, "failed"), (0.99, "failed"), (1.5, "warning"), (2, "ok"), (100, "ok")]
)
def test_thresholds(free_gib, status):
    assert machine.Threshold(GIB, 2 * GIB).status(int(free_gib * GIB)) == status


@pytest.mark.parametrize(("memory_gib", "disk_gib", "status"), [(64, 64, "ok"), (10, 3, "warning"), (1, 0.5, "failed")])
def test_resources(monkeypatch, tmp_path, memory_gib, disk_gib, status):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: int(memory_gib * GIB))
    monkeypatch.setattr(machine, "_free_bytes", lambda place: int(disk_gib * GIB))
    monkeypatch.chdir(tmp_path)
    found = by_name(machine.check_resources("cpu", scratch=tmp_path))
    assert_remedies(found.values())
    assert found["machine.memory"].status == found[f"machine.disk.{tmp_path}"].status == status


def test_small_shared_memory_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_free_bytes", lambda place: 64 * 2**20)
    found = by_name(machine.check_resources("cpu", shm=tmp_path))["machine.shared_memory"]
    assert found.status == "failed" and "--shm-size" in found.remedy


@pytest.mark.parametrize(
    ("variable", "file", "shown"),
    [("", None, "start their own"), ("10.0.0.1:6379", None, "10.0.0.1"), ("", "127.0.0.1:1", "127.0.0.1:1")],
)
def test_running_ray_clusters_are_noticed(monkeypatch, tmp_path, variable, file, shown):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    if file is not None:
        (tmp_path / "cluster").write_text(file)
    found = machine.check_ray_cluster(tmp_path / "cluster")
    assert_remedies([found])
    assert found.status == ("ok" if "own" in shown else "warning") and shown in found.detail


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [("pass", "ok", "starts"), ("raise OSError('no space left')", "failed", "no space left")],
)
def test_ray_start(code, status, shown):
    found = machine.check_ray_starts((*PRINTS, code))
    assert_remedies([found])
    assert found.status == status and shown in found.detail


def test_ray_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(machine, "RAY_TIMEOUT_S", 0.2)
    assert machine.check_ray_starts((*PRINTS, "import time; time.sleep(60)")).status == "failed"


def sleeper(title, **options):
    """A process that calls itself ``title``."""
    code = "import sys, time; print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([title, "-c", code], executable=sys.executable, stdout=subprocess.PIPE, **options)
    child.stdout.read(1)
    return child


def test_processes_of_another_run_are_a_warning():
    child = sleeper("VLLM::EngineCore")
    try:
        found = by_name(machine.check_leftovers([psutil.Process(child.pid), psutil.Process()]))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert found["processes.orphans"].status == "ok"
    assert found["processes.other_runs"].status == "warning"
    assert found["processes.other_runs"].detail == f"VLLM::EngineCore ({child.pid})"


def test_orphans_fail_and_are_named(monkeypatch):
    monkeypatch.setattr(machine, "_is_orphan", lambda process: True)
    child = sleeper("ray::WorkerDict")
    try:
        found = by_name(machine.check_leftovers([psutil.Process(child.pid)]))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert found["processes.orphans"].status == "failed"
    assert f"kill {child.pid}" in found["processes.orphans"].remedy


def test_parentless_processes_are_orphans():
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'], stdout=-3);"
        "print(p.pid, flush=True)"
    )
    pid = int(subprocess.run([*PRINTS, code], stdout=subprocess.PIPE, text=True, check=True).stdout)
    orphan = psutil.Process(pid)
    try:
        child = sleeper("sleeper")
        assert machine._is_orphan(orphan) and not machine._is_orphan(psutil.Process(child.pid))
    finally:
        orphan.kill()
        child.kill()
        child.wait()
        child.stdout.close()


def test_processes_that_end_while_we_look_are_passed_over():
    child = sleeper("raylet")
    process = psutil.Process(child.pid)
    child.kill()
    child.wait()
    child.stdout.close()
    assert {item.status for item in machine.check_leftovers([process])} == {"ok"}


def test_a_busy_machine_is_told():
    cores = len(os.sched_getaffinity(0))
    assert machine.check_load(0.0).status == "ok"
    busy = machine.check_load(float(cores))
    assert busy.status == "warning" and f"{cores:.1f} processes" in busy.detail and "quiet" in busy.remedy
