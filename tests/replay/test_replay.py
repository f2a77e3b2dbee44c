"""A journal leads to the same decisions again, also elsewhere; damage and differences are named."""

import json
import os
import subprocess
import sys

import pytest

from tests.core.test_machine_profile import PROFILE
from tests.replay.conftest import CONFIG, reading, rollout
from verl_war.cli import main
from verl_war.core.journal import EVENTS, JournalError, RecordingManager, as_record, header
from verl_war.core.manager import WorkloadManager
from verl_war.core.types import PRICE_TERMS, Reason, Turn
from verl_war.replay.decisions import replay_file


def lines_of(path):
    return path.read_text().splitlines()


def rewrite(path, number, change):
    lines = lines_of(path)
    record = json.loads(lines[number - 1])
    change(record)
    lines[number - 1] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def first_line(path, condition):
    return next(n for n, line in enumerate(lines_of(path), start=1) if n > 1 and condition(json.loads(line)))


def first_turn(path):
    return first_line(path, lambda record: record.get("event") == "turn")


def test_everything_a_manager_decides_on_is_recorded():
    measured = {"on_decision_time", "on_process_time"}
    events = {name for name in vars(WorkloadManager) if name.startswith("on_")} - measured
    assert events | {"forget_sessions", "report"} == {event.method for event in EVENTS.values()}
    assert events <= set(vars(RecordingManager))


def test_the_same_decisions_come_out(journal, capsys):
    assert main(["replay", str(journal)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    records = [json.loads(line) for line in lines_of(journal)]
    reasons = {start["reason"] for record in records for start in record.get("starts", [])}
    assert {"priced", "sticky", "resumed"} <= reasons, "the recorded run is worth replaying"


def test_a_turn_that_no_replica_can_hold_is_placed_alike_and_explained(tmp_path, capsys):
    entries = []
    manager = RecordingManager(CONFIG, False, entries.append)
    for replica in ("r0", "r1"):
        manager.on_replica_up(replica, 1.0)
        manager.on_snapshot(replica, reading(0, 0), 1.0)
    for number in range(4):
        manager.on_turn(Turn(session_id=f"s{number}", trajectory_id=f"t{number}", prompt_tokens=15_000), 2.0)
    manager.on_turn(Turn(session_id="s", trajectory_id="huge", prompt_tokens=20_001), 3.0)
    path = tmp_path / "journal.jsonl"
    lines = [header(CONFIG, False), *(as_record(entry) for entry in entries)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay_file(path).difference == ""
    assert main(["replay", str(path), "--why", "huge"]) == 0
    out = capsys.readouterr().out
    assert "larger than any replica's KV (oversize)" in out and "held" not in out


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_also_in_a_process_that_hashes_strings_differently(journal, hash_seed):
    command = [sys.executable, "-m", "verl_war.cli", "replay", str(journal)]
    result = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_journal_holds_the_profile_that_the_decisions_were_made_with(tmp_path):
    entries = []
    rollout(RecordingManager(CONFIG, False, entries.append, PROFILE))
    lines = [header(CONFIG, False, PROFILE), *(as_record(entry) for entry in entries)]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay_file(path).difference == ""
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0] | {"profile": None}, *lines[1:]]))
    assert "led to" in replay_file(path).difference
    path.write_text(json.dumps(lines[0] | {"profile": {"version": 1}}) + "\n")
    with pytest.raises(JournalError, match="profile: profile lacks model"):
        replay_file(path)


def test_the_first_difference_is_shown(journal, capsys):
    number = first_line(journal, lambda record: record.get("starts"))

    def move(record):
        record["starts"][0]["replica_id"] = "elsewhere"

    rewrite(journal, number, move)
    assert main(["replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert f"journal.jsonl:{number}: " in out and '"replica_id": "elsewhere"' in out and "now to" in out


def test_another_setting_leads_elsewhere(journal, capsys):
    rewrite(journal, 1, lambda record: record["config"]["admission"].update(admit_fraction=0.4))
    assert main(["replay", str(journal)]) == 1
    assert "different after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_text(""), ["is empty"]),
        (lambda path: path.write_text(path.read_text()[:-10]), ["the line is cut off", "remove the line"]),
        (lambda path: path.write_bytes(path.read_bytes()[:500] + b"\xff\xfe\n"), ["journal.jsonl:", "no text"]),
        (lambda path: path.write_text("\n".join([lines_of(path)[0], "{nonsense", ""])), [":2: no JSON"]),
        (lambda path: path.write_text("\n".join([lines_of(path)[0], "[1]", ""])), [":2: [1] is no event"]),
        (lambda path: path.write_text("\n".join([lines_of(path)[0], "[" * 100_000, ""])), [":2: no JSON (max"]),
        (lambda path: path.write_text('{"a": 1}\n'), [":1: no header of a WAR journal"]),
        (lambda path: rewrite(path, 1, lambda r: r.update(war_journal=99)), [":1: war_journal=99", "reads 1"]),
        (
            lambda path: rewrite(path, 1, lambda r: r["config"].update(sed=1)),
            [":1: unknown key", "did you mean 'seed'"],
        ),
        (lambda path: rewrite(path, 1, lambda r: r["config"].pop("seed")), [":1: config.seed is missing"]),
        (lambda path: rewrite(path, 2, lambda r: r.update(event={})), [":2: event {} is unknown"]),
        (lambda path: rewrite(path, 2, lambda r: r.update(at_s=float("inf"))), [":2: at_s=inf of event"]),
        (
            lambda path: rewrite(path, first_turn(path), lambda r: r["turn"].update(block_hashes=True)),
            ["event 'turn' has a value of the wrong kind"],
        ),
        (lambda path: rewrite(path, 2, lambda r: r.update(event="party")), [":2: event 'party' is unknown"]),
        (lambda path: rewrite(path, 2, lambda r: r.pop("at_s")), [":2: at_s=None of event 'replica_up' is no time"]),
        (lambda path: rewrite(path, 2, lambda r: r.update(at_s="now")), [":2: at_s='now'", "no time in seconds"]),
        (lambda path: rewrite(path, 3, lambda r: r.update(replica_id="r9")), [":3: ", "'r9', which no event before"]),
        (lambda path: rewrite(path, 3, lambda r: r["snapshot"].update(kv_usage=7)), [":3: ", "kv_usage=7"]),
        (lambda path: rewrite(path, 3, lambda r: r["snapshot"].pop("kv_usage")), [":3: ", "kv_usage"]),
    ],
)
def test_damage_is_named_with_its_line(journal, capsys, damage, words):
    damage(journal)
    assert main(["replay", str(journal)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("verl-war replay: ")
    for word in words:
        assert word in error


@pytest.mark.parametrize("options", [[], ["--why", "t1"]])
def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path, capsys, options):
    assert main(["replay", str(tmp_path / "missing.jsonl"), *options]) == 2
    assert "missing.jsonl cannot be read: No such file" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), *options]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_placing_by_hash_needs_the_same_hash(journal, capsys):
    first = header(CONFIG, True)
    first["hash_check"] += 1
    journal.write_text(json.dumps(first) + "\n")
    assert main(["replay", str(journal)]) == 1
    assert "PYTHONHASHSEED" in capsys.readouterr().err


def test_why_tells_of_holding_pausing_and_running(journal, capsys):
    resumed = first_line(journal, lambda r: any(s["reason"] == "resumed" for s in r.get("starts", [])))
    start = next(s for s in json.loads(lines_of(journal)[resumed - 1])["starts"] if s["reason"] == "resumed")
    assert main(["replay", str(journal), "--why", start["trajectory_id"]]) == 0
    out = capsys.readouterr().out
    assert "held: its KV does not fit" in out
    assert f"runs on {start['replica_id']} after {start['held_s']:.3f} s of holding: its KV fits again (resumed)" in out
    assert "decoding" in out and "price" in out
    assert out.splitlines()[-1].endswith("is finished")


def test_why_tells_of_moves_and_broken_replicas(journal, capsys):
    lines = [json.loads(line) for line in lines_of(journal)[1:]]
    last_home = {}
    for record in lines:
        for start in record.get("starts", []):
            if record["at_s"] < next(r["at_s"] for r in lines if r["event"] == "replica_down"):
                last_home[start["trajectory_id"]] = start["replica_id"]
    victim = next(name for name, home in last_home.items() if home == "r2")
    assert main(["replay", str(journal), "--why", victim]) == 0
    assert "its replica r2 breaks" in capsys.readouterr().out


def test_why_names_the_line_of_a_time_that_cannot_be(journal, capsys):
    number = first_turn(journal)
    name = json.loads(lines_of(journal)[number - 1])["turn"]["trajectory_id"]
    rewrite(journal, number, lambda record: record.update(at_s=10**400))
    assert main(["replay", str(journal), "--why", name]) == 1
    assert f":{number}: at_s=1000" in capsys.readouterr().err


def test_why_of_an_unknown_trajectory_names_similar_ones(journal, capsys):
    assert main(["replay", str(journal), "--why", "t1x"]) == 1
    error = capsys.readouterr().err
    assert "'t1x' is not in" in error and "t1" in error.split("similar:")[1]


def test_all_reasons_and_prices_are_told_in_words():
    from verl_war.replay.story import REASONS, TERMS, _price

    assert set(REASONS) == set(Reason) and set(TERMS) == set(PRICE_TERMS)

    assert _price({}) == ""
    told = _price({"prefill_s": 0.25, "queue_s": 0.0, "decode_s": 1.5, "total": 1.75, "saved_s": 2.0})
    assert told == "; price 1.750 s = prefill of what the cache lacks 0.250 s + decoding 1.500 s, saves 2.000 s"
