"""`verl-war top`: one picture without a terminal, a living one with it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.replay.conftest import reading, speculation
from verl_war.cli import main
from verl_war.report.tail import Tail


@pytest.fixture
def rich_journal(tiny, tmp_path):
    """The tiny case, engine readings, a second rollout under way, and a replica that is gone."""
    manager = tiny.manager
    manager.on_replica_up("r1", 20.0)
    for at_s, steps in ((20.0, 70), (21.0, 140)):
        manager.on_snapshot("r0", reading(50 * steps, steps), at_s)
        manager.on_speculation("r0", speculation(steps + 30), at_s)
    manager.on_step_begin(4, 8, 22.0, 4)
    tiny.ask("d", 22.0, 500, policy_step=4)
    tiny.ask("e", 22.0, 500, policy_step=4)
    tiny.answer("d", 23.0, 50, last=True)
    manager.on_replica_down("r1", 24.0, is_lost=True)
    return tiny.write(tmp_path / "journal.jsonl")


def test_one_picture(rich_journal, capsys):
    assert main(["top", str(rich_journal)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith("step 4: 1 of 8 trajectories done, 1 live, for 2.0 s")
    assert lines[1].startswith("held 0 | 8 tokens/s of finished turns | 350 tokens/s computed | moved ")
    assert "regime accept budget" in lines[4]
    r0, r1 = lines[5:]
    assert r0.split()[4:] == ["0", "#####.....", "50%", *r0.split()[7:]]
    assert r0.split()[-3:] == ["high", "75%", "0"] and r1.split() == ["r1", "out", "of", "the", "pool"]


def test_what_waits_and_what_is_silent_is_said(rich_journal, tmp_path, capsys):
    os.utime(rich_journal, (1.0, 1.0))
    (tmp_path / "journal.jsonl.2").write_text("")
    assert main(["top", str(rich_journal)]) == 0
    out = capsys.readouterr().out
    assert "nothing was written for" in out
    assert f"the router was started again; it writes to {tmp_path / 'journal.jsonl.2'}" in out
    assert main(["top", str(tmp_path / "journal.jsonl.2")]) == 0
    assert "is empty; the router has not begun" in capsys.readouterr().out


def test_a_journal_without_readings(tiny_journal, capsys):
    assert main(["top", str(tiny_journal)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 3: 3 of 3 trajectories done, makespan 8.0 s") and "regime" not in out


def test_a_long_list_is_cut(simulated):
    from verl_war.report.screen import View

    records = [json.loads(line) for line in simulated.read_text().splitlines()]
    view = View(records[0])
    for record in records[1:]:
        view.apply(record)
    assert view.lines(7, False, [])[-1] == "... and 1 more replicas; a taller window shows them"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_text("{nonsense\n"), ":1: no JSON"),
        (lambda path: path.write_text("[" * 100_000 + "\n"), ":1: no JSON (maximum recursion"),
        (lambda path: path.write_text('{"a": 1}\n'), ":1: no header of a WAR journal"),
        (lambda path: path.write_text(path.read_text() + "[1]\n"), ": [1] is no event"),
        (lambda path: path.write_text(path.read_text() + '{"event": "party"}\n'), ": event 'party' is unknown"),
    ],
)
def test_damage_is_an_error(tiny_journal, capsys, damage, words):
    damage(tiny_journal)
    assert main(["top", str(tiny_journal)]) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path, capsys):
    assert main(["top", str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl cannot be read: No such file" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_line_that_is_being_written_is_waited_for(tiny_journal):
    text = tiny_journal.read_text()
    tiny_journal.write_text(text[:-20])
    with Tail(tiny_journal) as tail:
        before = len(list(tail.read()))
        assert list(tail.read()) == []
        with tiny_journal.open("a") as file:
            file.write(text[-20:])
        assert len(list(tail.read())) == 1 and before + 1 == len(text.splitlines())


def test_on_a_terminal_it_follows_and_leaves_cleanly(tiny_journal):
    text = tiny_journal.read_text()
    half = len("".join(text.splitlines(keepends=True)[:-2]))
    tiny_journal.write_text(text[:half])
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "verl_war.cli", "top", str(tiny_journal)], stdout=theirs,
                               stderr=subprocess.PIPE, preexec_fn=_heed_interrupts)  # fmt: skip
    os.close(theirs)
    shown = _read_until(ours, b"2 of 3 trajectories done")
    with tiny_journal.open("a") as file:
        file.write(text[half:])
    shown += _read_until(ours, b"makespan 8.0 s")
    process.send_signal(signal.SIGINT)
    shown += _read_until(ours, b"\x1b[?1049l")
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    assert shown.index(b"\x1b[?1049h") < shown.index(b"2 of 3") and shown.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")
    process.stderr.close()
    os.close(ours)


def _heed_interrupts():
    """What runs in the background inherits that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(terminal, words, timeout_s=60.0):
    shown, deadline_s = b"", time.monotonic() + timeout_s
    while words not in shown:
        assert time.monotonic() < deadline_s, shown
        shown += os.read(terminal, 65536)
    return shown
