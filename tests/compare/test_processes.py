"""Nothing that a command starts outlives it."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from tests.compare.conftest import ROOT, is_running, read_pids, wait_until
from verl_war.compare import processes

SLEEP = "import time; time.sleep(600)"

DETACH = """
import os, sys, time, signal
if os.fork(): sys.exit(0)
os.setsid()
if os.fork(): os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(600)
"""

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(600)
"""

KEEPS_SPAWNING = """
import os, signal, sys, time
def spawn(*_):
    if os.fork() == 0:
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, spawn)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
while True: time.sleep(600)
"""

POLITE = """
import os, sys, time
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(sys.argv[1] + ".saved", "w").write("x")
"""


@pytest.fixture
def env():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)


@pytest.mark.parametrize(
    "code", [DETACH, STUBBORN, KEEPS_SPAWNING, POLITE], ids=["detached", "stubborn", "spawns", "polite"]
)
def test_leaving_the_block_ends_everything(tmp_path, env, code):
    pids = tmp_path / "pids"
    with (tmp_path / "log").open("wb") as log:
        with processes.tree([sys.executable, "-c", code, str(pids)], cwd=tmp_path, env=env, stdout=log):
            (first,) = wait_until(lambda: read_pids(pids), "the start")
    assert not any(map(is_running, read_pids(pids)))
    assert first in read_pids(pids)


def test_a_program_is_given_the_time_to_end_by_itself(tmp_path, env, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 20.0)
    pids = tmp_path / "pids"
    with (tmp_path / "log").open("wb") as log:
        with processes.tree([sys.executable, "-c", POLITE, str(pids)], cwd=tmp_path, env=env, stdout=log):
            wait_until(lambda: read_pids(pids), "the start")
            time.sleep(0.1)
    assert (tmp_path / "pids.saved").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(0)", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_exit_status_is_that_of_the_program(tmp_path, env, code, expected):
    with (tmp_path / "log").open("wb") as log:
        with processes.tree([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=log) as child:
            assert child.wait(20) == expected


def test_marked_processes_are_found_with_their_descendants(env):
    hides = f"import os, subprocess, sys; os.environ.clear(); subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    parent = subprocess.Popen([sys.executable, "-c", hides], env={**env, processes.RUN_ID_ENV: "test-a"})
    other = subprocess.Popen([sys.executable, "-c", SLEEP], env={**env, processes.RUN_ID_ENV: "test-b"})
    try:
        found = wait_until(lambda: len(processes.marked_processes("test-a")) == 2, "the child") and (
            processes.marked_processes("test-a")
        )
        assert parent.pid in {process.pid for process in found}
        assert processes.stop_all(lambda: processes.marked_processes("test-a")) == []
        assert not any(is_running(process.pid) for process in found)
        assert is_running(other.pid)
    finally:
        for process in (parent, other):
            process.kill()
            process.wait()


def test_shared_memory_in_use_and_that_of_others_stays(tmp_path):
    (tmp_path / "psm_before").touch()
    begin_s = time.time() + 0.05
    time.sleep(0.1)
    for name in ("psm_left", "verl_weights_left", "notes.txt", "psm_open", "psm_mapped"):
        (tmp_path / name).write_bytes(b"x")
    with (tmp_path / "psm_open").open(), (tmp_path / "psm_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 1)
        file.close()
        assert processes.remove_shared_memory(begin_s, tmp_path) == ["psm_left", "verl_weights_left"]
        mapped.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "psm_before", "psm_mapped", "psm_open"]
