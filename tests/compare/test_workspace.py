"""Where a trial goes on, and whose directory it is."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.compare.test_series import training, write
from verl_war.compare.workspace import (
    LAST_PART,
    TRACKER,
    DamagedState,
    TrialState,
    claim,
    is_complete,
    load_state,
    locked,
    rewind,
    save_state,
)


@pytest.fixture
def trial(make_plan):
    return make_plan().trials()[0]


def checkpoint(trial, step, whole=True):
    folder = trial.checkpoints / f"global_step_{step}"
    folder.mkdir(parents=True)
    if whole:
        (folder / LAST_PART).touch()


@pytest.mark.parametrize(
    ("logged", "whole", "partial", "noted", "expected"),
    [
        pytest.param(0, [], [], None, 0, id="never saved"),
        pytest.param(4, [2, 4], [], "4", 4, id="clean stop"),
        pytest.param(5, [2, 4], [], "4", 4, id="stopped between two checkpoints"),
        pytest.param(5, [4], [6], "4", 4, id="stopped while saving"),
        pytest.param(5, [4, 6], [], "6", 4, id="saved but not logged"),
        pytest.param(6, [4, 6], [], "", 6, id="note cut off"),
        pytest.param(5, [4, 6], [], "", 4, id="note cut off and not logged"),
        pytest.param(6, [4], [], "6", 4, id="noted one is gone"),
        pytest.param(0, [1], [], "1", 0, id="first step saved but not logged"),
        pytest.param(3, [], [3], None, 0, id="stopped during the first save"),
    ],
)
def test_newest_checkpoint_without_a_gap(trial, logged, whole, partial, noted, expected):
    write(trial, 1, *[training(step, 0.1) for step in range(1, logged + 1)])
    trial.checkpoints.mkdir()
    for step in whole:
        checkpoint(trial, step)
    for step in partial:
        checkpoint(trial, step, whole=False)
    tracker = trial.checkpoints / TRACKER
    if noted is not None:
        tracker.write_text(noted)
    assert rewind(trial) == expected
    assert (tracker.read_text() if tracker.exists() else None) == (str(expected) if expected else None)
    left = {path.name for path in trial.checkpoints.glob("global_step_*")}
    assert left == {f"global_step_{step}" for step in whole if step <= expected}


def test_complete_needs_a_good_end_and_the_last_step(trial):
    write(trial, 1, *[training(step, 0.1) for step in (1, 2, 3)])
    assert is_complete(trial, TrialState(status="complete"), steps=3)
    assert not is_complete(trial, TrialState(status="complete"), steps=4)
    assert not is_complete(trial, TrialState(status="interrupted"), steps=3)


def test_state_survives_and_foreign_files_are_named(trial):
    assert load_state(trial) == TrialState()
    trial.directory.mkdir(parents=True)
    state = TrialState(status="failed", attempts=2, run_id="a", scratch="/tmp/war-x", started_at_s=1.0, seconds=2.5)
    save_state(trial, state)
    assert load_state(trial) == state
    save_state(trial, replace(state, status="running"))
    assert load_state(trial).status == "running"
    (trial.directory / "state.json").write_text('{"color": 1}')
    with pytest.raises(DamagedState, match="no state file of verl-war compare .*'color'"):
        load_state(trial)


RUNNING = b'{"status": "running", "run_id": "a", "started_at_s": 1.0, "scratch": "%s"}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"null", b'{"status": "comp', b"\xff\xfe", b"[" * 100_000),
        *(b'{"status": "done"}', b'{"attempts": "2"}', b'{"run_id": 5}', b'{"scratch": null}', b'{"seconds": "1"}'),
        *(b'{"status": "running"}', RUNNING % b"", RUNNING % b"/home/war-x", RUNNING % b"/tmp/../home/war-x"),
        *(RUNNING % b"/tmp/other", RUNNING % b"war-x", RUNNING % b"/tmp"),
    ],
)
def test_a_damaged_state_is_named_with_its_remedy(trial, content):
    path = trial.directory / "state.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(DamagedState) as error:
        load_state(trial)
    assert str(error.value).startswith(f"{path} is damaged") and "remove that file" in str(error.value)
    (trial.directory.parent / "plan.json").touch()
    with pytest.raises(DamagedState, match="use --fresh to discard all results there, or choose another --out"):
        load_state(trial)


def test_lock_ends_with_its_process(tmp_path):
    imports = "from pathlib import Path\nfrom verl_war.compare.workspace import locked\n"
    code = f"{imports}with locked(Path({str(tmp_path)!r})):"
    crashed = subprocess.run([sys.executable, "-c", code + "\n import os; os.kill(os.getpid(), 9)"], check=False)
    assert crashed.returncode == -9
    with locked(tmp_path):
        second = subprocess.run([sys.executable, "-c", code + " pass"], capture_output=True, text=True, check=False)
    assert "is in use by another comparison" in second.stderr
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below", "taken", "x" * 300])
def test_a_directory_that_cannot_be_made_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / ".lock").mkdir(parents=True)
    out = tmp_path / name
    with pytest.raises(ValueError) as error, locked(out):
        pass
    assert f"--out={out} cannot be used (" in str(error.value) and "give the name of a directory" in str(error.value)


def test_an_error_of_the_work_is_not_one_of_the_lock(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path):
        (tmp_path / "missing").read_text()


def test_arms_and_repeats_may_be_added_and_nothing_else_changed(make_plan, tmp_path):
    (tmp_path / "out").mkdir()
    claim(make_plan(arms=("stock",)), fresh=False)
    claim(make_plan(repeats=3), fresh=False)
    with pytest.raises(ValueError, match=r"holds another comparison \(steps: 4 -> 5\)"):
        claim(make_plan(steps=5), fresh=False)
    claim(make_plan(steps=5), fresh=True)
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["steps"] == 5


@pytest.mark.parametrize("text", ["", "[]", "5", "null", '{"steps": 4', "[" * 100_000])
def test_a_damaged_note_of_the_comparison_is_named(make_plan, tmp_path, text):
    path = tmp_path / "out" / "plan.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        claim(make_plan(), fresh=False)
    assert str(error.value).startswith(f"{path} is damaged (") and "--fresh to discard it" in str(error.value)
    assert path.read_text() == text
    claim(make_plan(), fresh=True)
    assert json.loads(path.read_text())["steps"] == 4


def test_fresh_deletes_nothing_of_the_user(make_plan, tmp_path):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "mine").touch()
    claim(make_plan(), fresh=True)
    assert (out / "data" / "mine").exists()
    (out / "notes").mkdir()
    claim(make_plan(), fresh=True)
    assert (out / "notes").exists()
