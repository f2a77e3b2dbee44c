"""The command: its files, its exit status, and what it says of directories that it cannot use."""

import json

import pytest

from tests.compare.unchanged.generated import write_comparison
from verl_war import cli
from verl_war.compare.unchanged.trajectories import read_trajectories


def test_files_table_and_exit_status(tmp_path, capsys):
    grpo = write_comparison(tmp_path / "grpo", samples=8)
    ppo = write_comparison(tmp_path / "ppo", samples=8, chance=1, algorithm="ppo")
    arguments = ["unchanged", str(grpo), str(ppo), "--permutations", "999", "--margin", "0.15"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    text = (tmp_path / "out" / "unchanged.txt").read_text()
    assert text in output
    for part in ("code_agent, grpo: seeds 1, 2, 3; 4 steps", "code_agent, ppo", "RL unchanged in all of this: yes"):
        assert part in text
    found = json.loads((tmp_path / "out" / "unchanged.json").read_text())
    assert [study["title"] for study in found["studies"]] == ["code_agent, grpo", "code_agent, ppo"]
    assert len(found["studies"][0]["curves"]["war"]["2"]) == 4
    assert (tmp_path / "out" / "unchanged.png").read_bytes().startswith(b"\x89PNG")


def test_a_change_is_the_exit_status(tmp_path, capsys):
    folder = write_comparison(tmp_path, samples=8, change=lambda row, step: row | {"turns": row["turns"] + 2})
    assert cli.main(["unchanged", str(folder), "--permutations", "999"]) == 1
    output = capsys.readouterr().out
    assert "same distribution at step 1:   NO" in output
    assert (folder / "unchanged.json").exists()


def test_a_bad_option_is_a_usage_error(tmp_path, capsys):
    assert cli.main(["unchanged", str(write_comparison(tmp_path)), "--margin", "-1"]) == 2
    assert "--margin=-1.0 must be above 0" in capsys.readouterr().err


def change_report(folder, change):
    report = json.loads((folder / "report.json").read_text())
    change(report)
    (folder / "report.json").write_text(json.dumps(report))


def cut(folder):
    path = folder / "war-2" / "trajectories" / "numbers" / "3.jsonl"
    path.write_text(path.read_text()[:-20])


def lose_a_key(folder):
    path = folder / "stock" / "trajectories" / "numbers" / "1.jsonl"
    path.write_text(path.read_text().replace('"turns"', '"turn"', 1))


def rename_prompt(folder):
    path = folder / "war" / "trajectories" / "numbers" / "2.jsonl"
    path.write_text(path.read_text().replace('"1-5"', '"other"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "report.json").unlink(), "report.json does not exist; expected the directory of a"),
        (lambda folder: (folder / "report.json").write_text("{"), "report.json is no report of `verl-war compare"),
        (lambda folder: change_report(folder, lambda r: r["plan"].update(arms=["war"])), "arms=war, expected two"),
        (
            lambda folder: change_report(folder, lambda r: r["trials"].pop()),
            r"seed 3 has runs of \['stock'\], expected",
        ),
        (lambda folder: (folder / "war/trajectories/numbers/2.jsonl").unlink(), "numbers/2.jsonl does not exist"),
        (lambda folder: (folder / "war/trajectories/numbers/2.jsonl").write_text(""), "2.jsonl is empty"),
        (cut, r"war-2/trajectories/numbers/3.jsonl:32: expected the numbers of a trajectory, found"),
        (lose_a_key, r"stock/trajectories/numbers/1.jsonl:1: expected the numbers of a trajectory"),
        (rename_prompt, "in step 2 of seed 1 only stock was given prompt 1-5, expected the same prompts in both"),
    ],
    ids=["unfinished", "damaged-report", "one-arm", "missing-run", "missing-step", "empty", "cut", "key", "prompts"],
)
def test_directories_that_cannot_be_used(tmp_path, capsys, damage, message):
    folder = write_comparison(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_trajectories(folder)
    assert cli.main(["unchanged", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("verl-war unchanged: ")
