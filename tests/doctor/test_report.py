"""`verl-war doctor`: the report, the command and its exit status."""

import argparse
import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_war import cli
from verl_war.doctor import command
from verl_war.doctor.report import SCHEMA, Check, check, report

PRINTS = (sys.executable, "-c")


FINDINGS = [Check("a.x", "ok", "fine"), Check("a.y", "warning", "odd", "look"), Check("b.z", "failed", "bad", "mend")]


@pytest.mark.parametrize(("checks", "ok"), [(FINDINGS, False), (FINDINGS[:2], True), ([], True)])
def test_only_failures_make_a_report_bad(checks, ok):
    assert report("cpu", checks).ok == ok


def test_text_shows_every_check_and_remedy():
    stream = io.StringIO()
    report("cpu", FINDINGS, stream)
    text = stream.getvalue()
    assert (
        "ok   a.x: fine" in text and "WARN a.y: odd\n       -> look" in text and "FAIL b.z: bad\n       -> mend" in text
    )
    assert text.splitlines()[-1] == "Runs will not work like this: 1 ok, 1 warnings, 1 failed."


def test_what_is_found_is_shown_before_the_next_check_begins():
    stream = io.StringIO()

    def checks():
        for item in FINDINGS:
            yield item
            assert stream.getvalue().endswith(item.as_text() + "\n")

    assert report("cpu", checks(), stream).checks == tuple(FINDINGS)


def test_json_layout_is_stable():
    body = json.loads(report("cpu", FINDINGS).as_json())
    assert list(body) == ["schema", "verl_war", "machine", "ok", "checks"]
    assert (body["schema"], body["machine"], body["ok"]) == (SCHEMA, "cpu", False) and SCHEMA == 1
    assert body["checks"] == [dataclasses.asdict(item) for item in FINDINGS]
    assert all(isinstance(value, str) for item in body["checks"] for value in item.values())


def test_check_takes_detail_and_remedy_only_when_needed():
    assert check("n", True, "d", "r") == Check("n", "ok", "d")
    assert check("n", False, "d", "r") == Check("n", "failed", "d", "r")
    assert check("n", False, "d", "r", otherwise="warning").status == "warning"


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_exit_status(monkeypatch, findings, status):
    monkeypatch.setattr(command, "examine", lambda options, machine: iter(findings))
    stream, text = io.StringIO(), io.StringIO()
    assert command.run(argparse.Namespace(json=True), stream) == status
    assert json.loads(stream.getvalue())["ok"] == (status == 0)
    assert command.run(argparse.Namespace(json=False), text) == status
    assert len(text.getvalue().splitlines()) == 2 + len(findings) + sum(bool(item.remedy) for item in findings)


@pytest.mark.upstream
def test_quick_doctor_starts_nothing_and_takes_seconds(tmp_path, capsys):
    started = time.monotonic()
    status = cli.main(["doctor", "--quick", "--json", "--model", str(tmp_path / "nowhere")])
    body = json.loads(capsys.readouterr().out)
    assert status == 1 and not body["ok"]
    failed = [item["name"] for item in body["checks"] if item["status"] == "failed" and item["name"].startswith("m")]
    assert "model.path" in failed
    names = {item["name"] for item in body["checks"]}
    assert {"version.verl", "patch.verl_value_head", "machine.memory", "ray.cluster"} <= names
    assert not {"patches.applied", "ray.start"} & names
    assert time.monotonic() - started < 30


def test_console_script_lists_its_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2


def test_doctor_imports_nothing_heavy():
    code = "import sys, verl_war.doctor.command; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([*PRINTS, code], capture_output=True, text=True, check=True, cwd=Path.cwd()).stdout.split()
    assert not {"verl", "vllm", "torch", "ray", "transformers", "matplotlib"} & set(loaded)
