"""The command without engines: resumption, failures, refusals, Ctrl-C, the directory, the report."""

import argparse
import csv
import io
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.compare.conftest import is_running, take_ctrl_c, wait_until
from tests.compare.fixed_work.helpers import ROOT, plan, spec
from verl_war.compare import command as compare_command
from verl_war.compare.fixed_work import command
from verl_war.compare.fixed_work.plan import FixedWorkPlan
from verl_war.sim.trace import write_trace

FAKE_WORK = "tests.compare.fixed_work.fake_work"


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A directory for the command, whose working process is a fake."""
    monkeypatch.setattr(command, "WORK_MODULE", FAKE_WORK)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


def parsed(*words):
    parser = argparse.ArgumentParser()
    compare_command.add_arguments(parser)
    return parser.parse_args(words)


def run(out, *arguments):
    """Exit status and output of the command."""
    words = ["--mode", "fixed-work", "--arms", "stock,margin,war", "--load", "1,3", "--repeats", "2"]
    options = parsed(*words, "--memory-gb", "0.01", "--out", str(out), *arguments)
    stream = io.StringIO()
    return compare_command.run(options, stream), stream.getvalue()


def wish(out, **wanted):
    (out / "fake.json").write_text(json.dumps(wanted))


def plays(out):
    """Arms in the order in which they were played, and how."""
    return [line.split() for line in (out / "plays").read_text().splitlines()]


def rows(out):
    return list(csv.DictReader((out / "runs.csv").open()))


def test_runs_are_made_once_and_reported(out):
    code, text = run(out)
    assert code == 0, (out / "console.log").read_text()[-3000:]
    assert "2.00 (2.00..2.00), n=2" in text  # 8.01 / 4.01 and 8.02 / 4.02
    assert {(row["load"], row["arm"], row["status"]) for row in rows(out)} == {
        (load, arm, "complete") for load in "13" for arm in ("stock", "margin", "war")
    }
    assert len(rows(out)) == 12
    report = json.loads((out / "report.json").read_text())
    assert {row["arm"]: row["speed_up"] and round(row["speed_up"]["mean"], 1) for row in report["rows"]} == {
        "stock": None, "margin": 1.3, "war": 2.0,
    }  # fmt: skip
    before = plays(out)
    assert run(out)[0] == 0
    assert plays(out) == before  # nothing was left to do
    assert run(out, "--repeats", "3")[0] == 0
    added = [arm for arm, _, kind in plays(out)[len(before) :] if kind == "measured"]
    assert sorted(added) == ["margin", "margin", "stock", "stock", "war", "war"]  # of the third repeat


def test_engines_of_a_kind_serve_all_its_arms_after_a_warm_up(out):
    run(out)
    assert (out / "starts").read_text().split() == ["plain", "war"] or (
        (out / "starts").read_text().split() == ["war", "plain"]
    )
    played = plays(out)
    assert ["stock", "0", "earlier"] in played  # the earlier step, which WAR may know
    assert [int(earlier) for arm, earlier, _ in played if arm == "war"] == [1] * 4
    assert sum(kind == "warm-up" for *_, kind in played) == 4  # of each kind, as stock verl and as the arm


def test_a_run_that_fails_is_kept_marked_and_made_again(out):
    wish(out, fail=["margin"])
    code, text = run(out)
    assert code == 1
    assert "load1_repeat1_margin does not count, failed: RuntimeError: an engine broke" in text
    assert "war" in text  # the others went on
    failed = [row for row in rows(out) if row["status"] == "failed"]
    assert [row["arm"] for row in failed] == ["margin"] * 4
    assert failed[0]["output_tokens"] == "90"  # what it had measured
    wish(out)
    code, text = run(out)
    assert code == 0
    assert sorted((row["attempt"], row["status"]) for row in rows(out) if row["arm"] == "margin") == (
        [("1", "failed")] * 4 + [("2", "complete")] * 4
    )
    assert "does not count, failed" in (out / "report.html").read_text()


def test_without_an_earlier_step_only_the_arms_that_know_it_fail(out):
    wish(out, fail_earlier=True)
    code, text = run(out)
    assert code == 1
    assert "load1_repeat1_war does not count, failed: the text of an earlier step could not be generated" in text
    assert "OSError: no space" in text
    assert {row["arm"] for row in rows(out) if row["status"] == "complete"} == {"stock", "margin"}


def test_arms_that_do_other_work_are_refused(out):
    wish(out, short=["war"])
    code, text = run(out)
    assert code == 1
    assert "load1_repeat1_war does not count, refused:" in text
    report = json.loads((out / "report.json").read_text())
    assert {row["arm"] for row in report["rows"]} == {"stock", "margin"}
    assert sum(run["status"] == "refused" for run in report["runs"]) == 4
    before = plays(out)
    run(out)
    assert plays(out) == before


def test_without_a_base_there_are_no_ratios(out):
    wish(out, fail=["stock"])
    code, text = run(out)
    assert code == 1
    assert "no run of stock counts, so there are no ratios" in text


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--arms", "stock,wra"], "'wra' is unknown (did you mean 'war'?)"),
        (["--load", "much"], "--load: 'much' is neither low, middle, high, sweep nor"),
        (["--load", "99999999"], "must be at most 10000"),
        (["--trace", "missing.jsonl", "--load", "4"], "--load=4 is for recorded episodes"),
        (["--kv-tokens", "256"], "and a replica has KV for --kv-tokens=256"),
        (["--memory-gb", "100000"], "needs 100000.0 GiB of free memory"),
        (["--recipe", "cod_agent"], "--recipe='cod_agent' must be one of code_agent, search_agent"),
        (["--steps", "3"], "--steps (3) is for --mode live"),
        (["trainer.x=1"], "KEY=VALUE (['trainer.x=1']) is for --mode live"),
        (["--arms", ""], "--arms: '' is unknown"),
        (["--run-minutes", "0"], "--run-minutes=0.0 must be between 0.01"),
        (["--run-minutes", "-5"], "--run-minutes=-5.0 must be between"),
        (["--run-minutes", "nan"], "--run-minutes=nan must be between"),
        (["--run-minutes", "inf"], "--run-minutes=inf must be between"),
        (["--memory-gb", "-1"], "--memory-gb=-1.0 must be between 0 and 1000000"),
        (["--memory-gb", "nan"], "--memory-gb=nan must be between"),
        (["--memory-gb", "inf"], "--memory-gb=inf must be between"),
        (["--replicas", "0"], "--replicas=0 must be between 1 and 64"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(out, capsys, arguments, message):
    assert run(out, *arguments)[0] == 2
    assert message in capsys.readouterr().err
    assert not (out / "starts").exists()


def test_a_missing_trace_is_said(out, capsys):
    assert compare_command.run(parsed("--mode", "fixed-work", "--trace", "missing.jsonl", "--out", str(out))) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_out_that_is_a_file_is_a_wrong_option(out, capsys):
    (out / "file").touch()
    assert run(out / "file")[0] == run(out / "file" / "below")[0] == 2
    assert capsys.readouterr().err.count("cannot be used (") == 2


def test_options_of_fixed_work_are_refused_in_live_mode(out, capsys):
    assert run(out, "--mode", "live")[0] == 2
    assert "--load (1,3) is for --mode fixed-work" in capsys.readouterr().err


def test_another_comparison_in_the_directory_is_left_alone(out, capsys):
    run(out)
    assert run(out, "--seed", "9")[0] == 2
    assert "holds another comparison (seed: 1 -> 9)" in capsys.readouterr().err
    (out / "mine").write_text("x")
    assert run(out, "--seed", "9", "--fresh")[0] == 0
    assert {row["seed"] for row in rows(out)} == {"9", "10"}
    assert (out / "mine").exists()


def test_results_of_other_work_are_left_alone(out, capsys):
    run(out)
    found = json.loads((out / "plan.json").read_text())
    assert found["work"].startswith("recorded 3 ")
    del found["work"]  # as before episodes were recorded
    (out / "plan.json").write_text(json.dumps(found))
    assert run(out)[0] == 2
    assert "holds another comparison (work: None -> 'recorded 3 " in capsys.readouterr().err


def test_nothing_is_discarded_for_a_comparison_that_cannot_start(out, capsys):
    run(out)
    before = sorted(out.rglob("*.json"))
    for arguments, message in (
        (["--memory-gb", "100000"], "needs 100000.0 GiB of free memory"),
        (["--kv-tokens", "256"], "and a replica has KV for --kv-tokens=256"),
    ):
        assert run(out, "--fresh", *arguments)[0] == 2
        assert message in capsys.readouterr().err
        assert sorted(out.rglob("*.json")) == before
    assert run(out, "--memory-gb", "100000")[0] == 0  # nothing is missing, so no engine starts


def test_memory_is_asked_for_before_trajectories_are_made(out, capsys, monkeypatch):
    monkeypatch.setattr(FixedWorkPlan, "specs", None)
    assert run(out, "--memory-gb", "100000")[0] == 2
    assert "needs 100000.0 GiB of free memory" in capsys.readouterr().err
    assert not (out / "plan.json").exists()


def test_a_trace_that_was_edited_is_another_comparison(out, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"

    def compare(*arguments):
        words = ["--mode", "fixed-work", "--trace", str(trace), "--arms", "stock", "--memory-gb", "0.01"]
        options = parsed(*words, "--out", str(out), *arguments)
        return compare_command.run(options, io.StringIO())

    write_trace(trace, [spec("g-0"), spec("g-1")])
    assert compare() == compare("--repeats", "2") == 0
    write_trace(trace, [spec("g-0"), spec("g-1", tool=21)])  # as many trajectories, so the same load
    assert compare("--repeats", "3") == 2
    message = capsys.readouterr().err
    assert "holds another comparison (trace_digest: '" in message and "--fresh to discard it" in message
    assert len(rows(out)) == 2
    assert compare("--fresh") == 0
    assert len(rows(out)) == 1


def test_a_directory_in_use_is_refused(out, capsys):
    code = (
        "import pathlib, sys, time\n"
        "from verl_war.compare.workspace import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert holder.stdout.readline() == "held\n"
        assert run(out)[0] == 2
        assert f"is in use by another comparison (process {holder.pid})" in capsys.readouterr().err
    finally:
        holder.kill()
        holder.wait()
    assert run(out)[0] == 0


def test_ctrl_c_keeps_what_was_measured(out):
    words = ["--mode", "fixed-work", "--arms", "stock,margin,war", "--load", "1", "--memory-gb", "0.01"]
    found = plan(out, loads=(1,), repeats=1)
    *earlier, last = found.order(found.cases()[0])
    wish(out, hang=last)
    code = (
        "import argparse, sys\n"
        "from verl_war.compare import command\n"
        "from verl_war.compare.fixed_work import command as fixed_work\n"
        f"fixed_work.WORK_MODULE = {FAKE_WORK!r}\n"
        "parser = argparse.ArgumentParser()\n"
        "command.add_arguments(parser)\n"
        "sys.exit(command.run(parser.parse_args()))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--out", str(out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=take_ctrl_c,
    )  # fmt: skip
    try:
        wait_until(lambda: (out / "hangs").exists(), "the run that hangs")
        os.kill(process.pid, signal.SIGINT)
        text = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "the same command goes on where it stopped" in text
    report = json.loads((out / "report.json").read_text())
    assert {run["name"] for run in report["runs"]} == {f"load1_repeat1_{arm}" for arm in earlier}
    assert not is_running(int((out / "hangs").read_text()))
    wish(out)
    before = len(plays(out))
    assert run(out, "--load", "1", "--repeats", "1")[0] == 0
    assert sum(arm == last and kind == "measured" for arm, _, kind in plays(out)[before:]) == 1
    assert len(rows(out)) == 3
