"""A clone in miniature, in which `python -m verl.trainer.main_ppo` is `fake_training.py`."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_war.compare.plan import Plan

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0

PREPARE_DATA = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
for name in ("train.parquet", "val.parquet"):
    (out / name).write_text("rows")
with (out / "starts").open("a") as file:
    file.write("x")
"""


def take_ctrl_c():
    """Whoever runs the tests in the background may have them ignore Ctrl-C; the user at a terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """Root of the miniature clone."""
    root = tmp_path / "clone"
    (root / "recipes" / "code_agent" / "config" / "machine").mkdir(parents=True)
    (root / "recipes" / "code_agent" / "config" / "machine" / "cpu.yaml").touch()
    (root / "recipes" / "code_agent" / "prepare_data.py").write_text(PREPARE_DATA)
    (root / "verl" / "trainer").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fake_training.py"), root / "verl" / "trainer" / "main_ppo.py")
    for package in ("recipes", "recipes/code_agent", "verl", "verl/trainer"):
        (root / package / "__init__.py").touch()
    # The supervisor is ours, also where this package is not installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root


@pytest.fixture
def make_plan(repo, tmp_path):
    """`make_plan(**changes)`: a comparison of four steps in the miniature clone."""

    def make(**changes):
        values = dict(
            recipe="code_agent",
            algorithm="grpo",
            steps=4,
            machine="cpu",
            seed=1,
            arms=("stock", "war"),
            repeats=1,
            num_train=8,
            num_val=2,
            overrides=(),
            memory_bytes=0,
            stall_s=0.0,
            out=tmp_path / "out",
            repo=repo,
        )
        return Plan(**(values | changes))

    return make


@pytest.fixture
def start_compare(repo, tmp_path):
    """`start_compare(*arguments)` starts the command in the clone, output in `out.txt`; what still runs is stopped."""
    started = []

    def start(*arguments, log=tmp_path / "out.txt"):
        code = (
            "import argparse, sys\n"
            "from verl_war.compare import command\n"
            "parser = argparse.ArgumentParser()\n"
            "command.add_arguments(parser)\n"
            "sys.exit(command.run(parser.parse_args()))\n"
        )
        options = ["--steps", "4", "--memory-gb", "0", "--out", str(tmp_path / "out"), *arguments]
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *options],
                cwd=repo,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=take_ctrl_c,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def wait_until(condition, what):
    """Return the first true value of `condition()`; fail after `WAIT_S`."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {WAIT_S} s")


def is_running(pid):
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pids(path):
    """Process ids in a file, one a line; none when it does not exist."""
    return [int(line) for line in path.read_text().split()] if os.path.exists(path) else []
