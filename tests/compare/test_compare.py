"""The command from end to end, with a training that takes no time."""

import json
import signal
from pathlib import Path

import pytest

from tests.compare.conftest import is_running, read_pids, wait_until


def read(path):
    return path.read_text() if path.exists() else ""


def run(start_compare, tmp_path, *arguments, code=0):
    process = start_compare(*arguments)
    found = process.wait(60)
    output = read(tmp_path / "out.txt")
    assert found == code, output
    return output


def test_trains_both_arms_and_reports(start_compare, tmp_path):
    output = run(start_compare, tmp_path, "fake.scale=0.5")
    out = tmp_path / "out"
    assert "stock: step 4/4, reward 0.400, step 8.0 s, rollout 4.0 s" in output
    assert output.index("stock: step 1/4") < output.index("war: step 1/4")
    report = json.loads((out / "report.json").read_text())
    # Step 1 is cold: medians over steps 2, 3, 4.
    assert report["summary"]["arms"]["stock"]["quantities"]["step s, median"] == 6.0
    assert report["summary"]["ratios"]["war"]["step s, median"]["ratio"] == 0.5
    assert report["environment"]["python"]
    assert "| step s, median | 6.00 | 3.00 | 0.50 (0.50..0.50) |" in (out / "report.md").read_text()
    for name in ("reward", "tokens", "seconds"):
        assert (out / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "stock") in output and str(out / "report.md") in output


def test_repeating_the_command_keeps_what_is_complete(start_compare, tmp_path):
    run(start_compare, tmp_path)
    output = run(start_compare, tmp_path)
    assert "stock: complete" in output and "war: complete" in output
    assert read(tmp_path / "out" / "stock" / "starts") == "0\n"
    assert read(tmp_path / "out" / "data" / "starts") == "x"


def test_fresh_repeats_everything(start_compare, tmp_path):
    run(start_compare, tmp_path)
    run(start_compare, tmp_path, "--fresh")
    assert read(tmp_path / "out" / "stock" / "starts") == "0\n"
    assert sorted(path.name for path in (tmp_path / "out" / "stock" / "metrics").iterdir()) == ["attempt-001.jsonl"]


def test_fresh_gets_past_a_damaged_state(start_compare, tmp_path):
    run(start_compare, tmp_path)
    stock, war = (tmp_path / "out" / arm / "state.json" for arm in ("stock", "war"))
    stock.write_text('{"status": "comp')
    output = run(start_compare, tmp_path, code=2)
    assert f"{stock} is damaged" in output and "use --fresh to discard all results there" in output
    assert json.loads(war.read_text())["status"] == "complete", "nothing is lost"
    output = run(start_compare, tmp_path, "--fresh")
    assert f"stock: {stock} is damaged and is discarded with all results (--fresh)" in output
    assert [json.loads(path.read_text())["attempts"] for path in (stock, war)] == [1, 1]


def test_fresh_discards_no_state_where_nothing_was_compared(start_compare, tmp_path):
    state = tmp_path / "out" / "stock" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("of another program")
    output = run(start_compare, tmp_path, "--fresh", code=2)
    assert f"{state} is damaged, or no state file" in output and "choose another --out" in output
    assert state.read_text() == "of another program"


def test_fresh_discards_nothing_without_memory_to_repeat_it(start_compare, tmp_path):
    run(start_compare, tmp_path)
    output = run(start_compare, tmp_path, "--fresh", "--memory-gb", "100000", code=2)
    assert "training needs 100000.0 GiB of free memory" in output
    assert read(tmp_path / "out" / "stock" / "starts") == "0\n" and (tmp_path / "out" / "report.json").exists()
    assert "stock: complete" in run(start_compare, tmp_path)


def test_repeats_alternate_the_arms_and_count_on_the_seed(start_compare, tmp_path):
    run(start_compare, tmp_path, "--repeat", "2", "--seed", "5")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    order = [(trial["name"], trial["seed"]) for trial in report["trials"]]
    assert order == [("stock", 5), ("war", 5), ("war-2", 6), ("stock-2", 6)]
    assert report["summary"]["ratios"]["war"]["step s, median"]["repeats_min_max"] == [1.0, 1.0]


def test_a_failing_arm_shows_its_error_and_resumes(start_compare, tmp_path):
    output = run(start_compare, tmp_path, "fake.crash_at=3", code=1)
    assert "stock failed with exit status 1" in output
    assert "RuntimeError: no luck in step 3" in output
    assert str(tmp_path / "out" / "stock" / "console.log") in output
    assert not (tmp_path / "out" / "war").exists()

    output = run(start_compare, tmp_path, "fake.crash_at=3", code=1)
    assert "stock: was failed, resumes behind the checkpoint of step 2" in output
    assert read(tmp_path / "out" / "stock" / "starts") == "0\n2\n"
    assert "war failed" in output

    run(start_compare, tmp_path, "fake.crash_at=3")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["summary"]["arms"]["stock"]["steps"] == [4]
    assert report["summary"]["arms"]["stock"]["missing_steps"] == [[]]
    # The first steps of both starts, 1 and 3, are cold.
    assert report["summary"]["arms"]["stock"]["quantities"]["step s, median"] == 6.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fake.oom_at=2"], "stock: Ray killed workers because the machine ran out of memory"),
        (["fake.hang_at=2", "--stall-minutes", "0.02"], "stock: no step ended within 0 minutes"),
    ],
)
def test_a_training_that_would_wait_for_ever_is_ended(start_compare, tmp_path, arguments, message):
    overrides = [argument for argument in arguments if "=" in argument]
    options = [argument for argument in arguments if "=" not in argument]
    output = run(start_compare, tmp_path, *options, "--arms", "stock", *overrides, code=1)
    assert message in output
    assert json.loads((tmp_path / "out" / "stock" / "state.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("signum", "overrides"), [(signal.SIGINT, []), (signal.SIGINT, ["fake.daemons=1"]), (signal.SIGTERM, [])]
)
def test_stopping_leaves_no_process_and_resumes(start_compare, tmp_path, signum, overrides):
    stock = tmp_path / "out" / "stock"
    arguments = ["--arms", "stock", "fake.hang_at=3", *overrides]
    process = start_compare(*arguments)
    wait_until(lambda: "hanging at 3" in read(stock / "console.log"), "step 3")
    daemons = wait_until(lambda: read_pids(stock / "daemons"), "the daemon") if overrides else []
    segment = Path(read(stock / "segment") or "/nonexistent")
    assert all(map(is_running, daemons))
    process.send_signal(signum)
    assert process.wait(60) == 128 + signum
    assert not any(map(is_running, daemons))
    assert not segment.exists()
    state = json.loads((stock / "state.json").read_text())
    assert state["status"] == "interrupted"
    assert not Path(state["scratch"]).exists()

    output = run(start_compare, tmp_path, *arguments)
    assert "resumes behind the checkpoint of step 2" in output


def test_what_a_finished_training_leaves_behind_is_ended(start_compare, tmp_path):
    run(start_compare, tmp_path, "fake.daemons=1")
    for arm in ("stock", "war"):
        (pid,) = read_pids(tmp_path / "out" / arm / "daemons")
        assert not is_running(pid)
        assert not Path(read(tmp_path / "out" / arm / "segment")).exists()


def test_a_killed_comparison_leaves_no_process_and_no_stale_lock(start_compare, tmp_path):
    stock = tmp_path / "out" / "stock"
    process = start_compare("fake.hang_at=3", "fake.daemons=1")
    wait_until(lambda: "hanging at 3" in read(stock / "console.log"), "step 3")
    (daemon,) = wait_until(lambda: read_pids(stock / "daemons"), "the daemon")
    process.kill()
    wait_until(lambda: not is_running(daemon), "the end of the daemon")
    scratch = Path(json.loads((stock / "state.json").read_text())["scratch"])
    assert scratch.exists()
    output = run(start_compare, tmp_path, "fake.hang_at=3", "fake.daemons=1", "--arms", "stock")
    assert "stock: was running, resumes behind the checkpoint of step 2" in output
    assert not scratch.exists()


def test_second_comparison_in_the_same_directory_is_refused(start_compare, tmp_path):
    first = start_compare("fake.hang_at=1")
    wait_until(lambda: "hanging at 1" in read(tmp_path / "out" / "stock" / "console.log"), "step 1")
    second = start_compare("fake.hang_at=1", log=tmp_path / "second.txt")
    assert second.wait(60) == 2
    assert f"is in use by another comparison (process {first.pid})" in read(tmp_path / "second.txt")
    assert first.poll() is None

    elsewhere = start_compare("--out", str(tmp_path / "other"), log=tmp_path / "third.txt")
    assert elsewhere.wait(60) == 0
    assert first.poll() is None


def test_too_little_memory_is_an_error_that_keeps_what_is_done(start_compare, tmp_path):
    run(start_compare, tmp_path, "--arms", "stock")
    output = run(start_compare, tmp_path, "--memory-gb", "1000000", code=2)
    assert "training war needs 1000000.0 GiB of free memory and " in output
    assert json.loads((tmp_path / "out" / "stock" / "state.json").read_text())["status"] == "complete"
    assert read(tmp_path / "out" / "stock" / "starts") == "0\n"


def test_outside_of_a_clone_is_a_clear_error(start_compare, tmp_path):
    output = run(start_compare, tmp_path, "--recipe", "poetry", code=2)
    assert "no recipes/poetry/config in" in output
