"""Ctrl-C in the middle of a real training, and going on from its checkpoint."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.compare.conftest import ROOT, is_running, take_ctrl_c

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

OVERRIDES = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.val_before_train=False",
]


def start(out):
    options = ["--arms", "war", "--steps", "3", "--num-train", "16", "--num-val", "4", "--out", str(out)]
    with (out.parent / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "verl_war.cli", "compare", *options, *OVERRIDES],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=take_ctrl_c,
        )


def wait_for_step(process, metrics, limit_s=600):
    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if metrics.exists() and '"step":1' in metrics.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"no step was logged within {limit_s} s; exit status {process.poll()}")


def test_interrupted_training_leaves_nothing_behind_and_resumes(tmp_path):
    out = tmp_path / "out"
    segments = set(Path("/dev/shm").glob("psm_*"))
    process = start(out)
    try:
        wait_for_step(process, out / "war" / "metrics" / "attempt-001.jsonl")
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in family)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130, (tmp_path / "output.txt").read_text()
    finally:
        process.terminate()
        process.wait(90)
    assert not [child for child in family if is_running(child.pid)]
    assert set(Path("/dev/shm").glob("psm_*")) <= segments
    state = json.loads((out / "war" / "state.json").read_text())
    assert state["status"] == "interrupted" and not Path(state["scratch"]).exists()

    process = start(out)
    try:
        assert process.wait(800) == 0, (tmp_path / "output.txt").read_text()
    finally:
        process.terminate()
        process.wait(90)
    assert "war: was interrupted, resumes behind the checkpoint of step" in (tmp_path / "output.txt").read_text()
    assert "Resuming from" in (out / "war" / "console.log").read_text()
    arm = json.loads((out / "report.json").read_text())["summary"]["arms"]["war"]
    assert arm["steps"] == [3] and arm["missing_steps"] == [[]]
    assert arm["war"]["war/trajectories"]["median"] == 16
