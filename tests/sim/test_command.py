import json

import pytest

from verl_war.cli import main
from verl_war.sim import command
from verl_war.sim.runner import run_study
from verl_war.sim.trace import read_trace
from verl_war.version import package_version

TINY = ("simulate", "--hardware", "cpu_2core", "--replicas", "2", "--workload", "small", "--seeds", "2")


def test_table_plot_and_json(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [*TINY, "--load", "4,16", "--policies", "war,upper_bound,stock_offload", "--out", str(out)]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "trajectories per replica" in table and "upper_bound" in table and "ideal" in table
    assert "no text can be drafted without --acceptance" in table
    assert (out / "simulate.png").stat().st_size > 5000
    assert (out / "simulate.txt").read_text() in table
    report = json.loads((out / "simulate.json").read_text())
    assert len(report["runs"]) == 2 * 2 * 4
    assert {run["policy"] for run in report["runs"]} == {"stock", "war", "upper_bound", "stock_offload"}
    assert report["hardware"]["name"] == "cpu_2core"
    assert report["workload"]["shape"]["group_size"] == 8
    stock = [row for row in report["summary"] if row["policy"] == "stock"]
    assert [row["ratio_mean"] for row in stock] == [1.0, 1.0]
    first = [run for run in report["runs"] if run["load"] == 16 and run["seed"] == 1]
    assert len({(run["turns"], run["output_tokens"], run["prompt_tokens"]) for run in first}) == 1


def test_without_a_terminal_each_load_and_seed_is_a_line(tmp_path, capsys):
    arguments = [*TINY, "--load", "2,4", "--policies", "war,upper_bound", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    first, *lines = capsys.readouterr().err.splitlines()
    total = int(first.split()[0])
    assert first == f"{total} runs: 2 loads, 2 seeds, 3 policies" and total > 2 * 2 * 3, "the bound takes several"
    cases = [(load, seed) for load in (2, 4) for seed in (1, 2)]
    assert lines == [
        f"load {load}, seed {seed} done: {total * number // 4} of {total} runs"
        for number, (load, seed) in enumerate(cases, start=1)
    ]


def test_results_name_the_commit(tmp_path, capsys):
    assert main([*TINY, "--load", "2", "--policies", "stock", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert report["versions"]["verl_war"] == package_version()


def test_acceptance_makes_engines_speculate(tmp_path, capsys):
    def ratios(*arguments):
        assert main([*TINY, "--load", "2", "--seeds", "1", "--out", str(tmp_path), *arguments]) == 0
        report = json.loads((tmp_path / "simulate.json").read_text())
        return {row["policy"]: row for row in report["summary"]}, report["acceptance"]

    rows, world = ratios("--policies", "war,war_scheduling_only,war_speculation_only", "--acceptance", "peaked")
    assert world["name"] == "peaked" and world["run_tokens"] == 15.0
    told = capsys.readouterr().out
    assert "1 seeds, acceptance peaked" in told and "without --acceptance" not in told
    assert rows["war"]["accepted_share"] > 0.2 and rows["war_speculation_only"]["ratio_mean"] > 1.05
    assert rows["stock"]["accepted_share"] == rows["war_scheduling_only"]["accepted_share"] == 0
    assert rows["ideal"]["ratio_mean"] > rows["war"]["ratio_mean"]
    off, _ = ratios("--policies", "war", "--acceptance", "peaked", "--war", "speculation.enabled=false")
    assert off["war"]["accepted_share"] == 0
    rows, world = ratios("--policies", "all")
    assert world is None
    assert not {"suffix_always", "war_speculation_only"} & set(rows)
    assert rows["war"]["accepted_share"] == 0


def test_a_later_step_is_told_and_differs(tmp_path, capsys):
    def runs(*arguments):
        names = ["--load", "24", "--policies", "war,margin,upper_bound", "--acceptance", "peaked"]
        assert main([*TINY, *names, "--seeds", "1", "--out", str(tmp_path), *arguments]) == 0
        report = json.loads((tmp_path / "simulate.json").read_text())
        return {run["policy"]: run for run in report["runs"]}, report["earlier_steps"]

    first, none = runs()
    later, two = runs("--earlier-steps", "2")
    assert (none, two) == (0, 2)
    assert ", after 2 steps" in capsys.readouterr().out
    assert {run["output_tokens"] for run in (*first.values(), *later.values())} == {first["war"]["output_tokens"]}
    assert later["war"]["makespan_s"] != first["war"]["makespan_s"]
    assert main([*TINY, "--load", "1", "--earlier-steps", "-1"]) == 2
    assert "--earlier-steps -1 must be between 0 and 1000" in capsys.readouterr().err
    trace = tmp_path / "work.jsonl"
    assert main([*TINY, "--load", "4", "--write-trace", str(trace)]) == 0
    assert main([*TINY, "--workload", str(trace), "--earlier-steps", "1"]) == 2
    assert "a trace is one step" in capsys.readouterr().err


def test_trace_and_its_hardware_from_files(tmp_path, capsys):
    trace, hardware = tmp_path / "work.jsonl", tmp_path / "mine.json"
    assert main([*TINY, "--load", "4", "--write-trace", str(trace)]) == 0
    assert len(read_trace(trace)) == 8
    hardware.write_text('{"base_s": 0.01, "per_token_s": 0.0005, "kv_capacity_tokens": 8192}')
    arguments = ["--workload", str(trace), "--hardware", str(hardware), "--seeds", "1", "--out", str(tmp_path / "o")]
    assert main([*TINY, *arguments]) == 0
    assert "mine, 2 replicas" in capsys.readouterr().out


def test_war_settings_reach_the_manager(tmp_path, capsys):
    def hits(*arguments):
        assert main([*TINY, "--load", "32", "--policies", "war", "--out", str(tmp_path), *arguments]) == 0
        report = json.loads((tmp_path / "simulate.json").read_text())
        return {run["policy"]: run["held_s"] for run in report["runs"] if run["seed"] == 1}

    holds = ("--war", "admission.wait_for_thrash=False")
    assert hits(*holds)["war"] > 0
    assert hits(*holds, "--war", "admission.enabled=false")["war"] == 0
    assert hits(*holds, "--war", "regime.enter_kv_share=90")["war"] == 0, (
        "a fleet that never counts as loaded holds nothing"
    )
    assert main([*TINY, "--policies", "war", "--war", "admission.frction=1", "--load", "4"]) == 2
    assert "admission.frction" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--load", "16,many"], "--load: 'many' is not a number"),
        (["--load", ""], "--load: '' is not a number"),
        (["--load", "0"], "--load 0 must be between"),
        (["--load", "4", "--write-trace", "."], "Is a directory"),
        (["--load", "4", "--write-trace", "no/such/trace.jsonl"], "No such file or directory"),
        (["--load", "2,4,2.0"], "--load: '2.0' is given twice"),
        (["--load", "nan"], "--load nan must be between"),
        (["--replicas", "0"], "--replicas 0 must be between 1 and 10000"),
        (["--seeds", "-1"], "--seeds -1 must be between"),
        (["--policies", "stok"], "'stok' is unknown (did you mean 'stock'?)"),
        (["--hardware", "a100"], "--hardware 'a100' is unknown; expected one of cpu_2core"),
        (["--workload", "heavy"], "--workload 'heavy' is unknown; expected one of default"),
        (["--workload", "none.jsonl"], "trace none.jsonl: cannot be read"),
        (["--workload", "none.jsonl", "--load", "4"], "--load 4 is for generated workloads"),
        (["--slow", "0"], "--slow: '0' is not INDEX:FACTOR"),
        (["--slow", "5:2"], "--slow INDEX 5 must be between 0 and 1"),
        (["--war", "typo.x=5"], "unknown key actor_rollout_ref.rollout.custom.war.typo; allowed keys: "),
        (["--war", "admision.enabled=true"], "custom.war.admision (did you mean 'admission'?); allowed keys: "),
        (["--war", "admission=1"], "--war 'admission=1' is not GROUP.KEY=VALUE"),
        (["--kv-capacity", "500"], "but a replica of cpu_2core holds 448"),
        (["--acceptance", "peakd"], "--acceptance 'peakd' is unknown (did you mean 'peaked'?); expected one of peaked"),
        (
            ["--policies", "suffix_always"],
            "--policies suffix_always is stock but for its drafts; say with --acceptance",
        ),
        (["--misstated-capacity", "0"], "--misstated-capacity 0 must be"),
    ],
)
def test_bad_options_are_explained(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", [(), ("below",), ("far", "below")])
def test_out_that_cannot_be_made_is_said_before_the_runs(tmp_path, monkeypatch, capsys, below):
    monkeypatch.setattr(command, "run_study", None)
    file = tmp_path / "file"
    file.write_text("")
    out = file.joinpath(*below)
    assert main([*TINY, "--load", "4", "--out", str(out)]) == 2
    assert f"--out {out}: {file} is a file; give the name of a directory" in capsys.readouterr().err


def test_out_that_may_not_be_written_to_is_said_before_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_study", None)
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)  # as for anybody but root
    assert main([*TINY, "--load", "4", "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} may not be written to" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_complete(tmp_path, monkeypatch, capsys):
    def stop_after(count):
        def runs(study):
            for number, result in enumerate(run_study(study)):
                if number == count:
                    raise KeyboardInterrupt
                yield result

        monkeypatch.setattr(command, "run_study", runs)
        return main([*TINY, "--load", "4", "--policies", "stock,margin", "--out", str(tmp_path / "out")])

    assert stop_after(1) == 130
    assert not (tmp_path / "out").exists()
    assert stop_after(3) == 130
    report = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert report["stopped"] is True
    assert [(run["seed"], run["policy"]) for run in report["runs"]] == [(1, "stock"), (1, "margin")]
    assert "stopped; the results are" in capsys.readouterr().err


def test_a_slow_replica_is_spared_although_there_is_room(tmp_path):
    arguments = ["--replicas", "4", "--load", "8", "--seeds", "1", "--slow", "0:10", "--out", str(tmp_path / "out")]
    assert main(["simulate", "--policies", "war", *arguments]) == 0
    summary = json.loads((tmp_path / "out" / "simulate.json").read_text())["summary"]
    (war,) = (row for row in summary if row["policy"] == "war")
    assert war["ratio_mean"] > 2.0
