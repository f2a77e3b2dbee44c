"""Commands of a comparison, and what is refused before anything starts."""

import argparse
import math
from pathlib import Path

import pytest

from verl_war.compare import command
from verl_war.compare.plan import ARMS, find_repo, hydra_value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "poetry"}, "--recipe='poetry' must be one of code_agent, search_agent"),
        ({"algorithm": "dpo"}, "--algorithm='dpo' must be one of grpo, ppo"),
        ({"machine": "tpu"}, "--machine='tpu' must be one of cpu"),
        ({"arms": ("stock", "magic")}, "--arms='magic' must be one of stock, war"),
        ({"arms": ("war", "war")}, "--arms=war,war must name at least one arm and none twice"),
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"repeats": 0}, "--repeat=0 must be at least 1"),
        ({"num_train": -1}, "--num-train=-1 must be at least 1"),
        ({"seed": -1}, "--seed=-1 must be at least 0"),
        ({"stall_s": math.nan}, "--stall-minutes=nan must be between 0 (no limit) and 1e+06"),
        ({"stall_s": -60.0}, "--stall-minutes=-1 must be between 0"),
        ({"stall_s": math.inf}, "--stall-minutes=inf must be between 0"),
        ({"overrides": ("data.train_batch_size",)}, "'data.train_batch_size' is not a Hydra override"),
        ({"overrides": ("trainer.total_training_steps=9",)}, "is set by the comparison itself; use --steps instead"),
        ({"overrides": ("rollout@actor_rollout_ref.rollout=war",)}, "use --arms instead"),
    ],
)
def test_bad_values_are_named(make_plan, changes, message):
    with pytest.raises(ValueError) as error:
        make_plan(**changes)
    assert message in str(error.value)


def test_arms_differ_in_nothing_but_the_rollout_and_their_directory(make_plan):
    plan = make_plan(overrides=("data.train_batch_size=4",))
    stock, war = plan.trials()
    commands = [
        {part.replace(str(trial.directory), "DIR").replace(f"_{trial.name}", "") for part in plan.command(trial)}
        for trial in (stock, war)
    ]
    assert commands[0] - commands[1] == set(ARMS["stock"])
    assert commands[1] - commands[0] == set(ARMS["war"])
    assert plan.command(war)[-1] == "data.train_batch_size=4"


def test_environment_keeps_the_runs_apart(make_plan, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    plan = make_plan()
    trial = plan.trials()[0]
    env = plan.environment(trial, 2, "id", Path("/tmp/war-x"))
    assert "RAY_ADDRESS" not in env
    assert env["RAY_TMPDIR"] == env["TMPDIR"] == "/tmp/war-x"
    assert env["VERL_FILE_LOGGER_PATH"] == str(trial.directory / "metrics" / "attempt-002.jsonl")
    assert env["TENSORBOARD_DIR"] == str(trial.directory / "tensorboard")
    assert env["PYTHONPATH"].split(":")[0] == str(plan.repo)


def test_users_data_files_replace_the_generated_ones(make_plan):
    plan = make_plan(overrides=("data.train_files=mine.parquet", "data.val_files=mine.parquet"))
    assert not plan.generates_data
    assert [part for part in plan.command(plan.trials()[0]) if "train_files" in part] == [
        "data.train_files=mine.parquet"
    ]


def test_clone_is_found_from_below(repo):
    assert find_repo(repo / "recipes" / "code_agent", "code_agent") == repo
    with pytest.raises(ValueError, match="no recipes/search_agent/config in .* run the command inside a clone"):
        find_repo(repo, "search_agent")


@pytest.mark.parametrize("path", ["/plain/path-1.0", "/with space/x=y,z", "/it's/[1]/{a}"])
def test_paths_survive_hydras_grammar(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"key={hydra_value(Path(path))}"])
    assert override.value() == path


def plan_of(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.plan_of(parser.parse_args(arguments), Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", ""], "--arms='' must be one of stock, war"),
        (["--memory-gb", "-1"], "--memory-gb=-1.0 must be between 0 and 1000000"),
        (["--memory-gb", "nan"], "--memory-gb=nan must be"),
        (["--memory-gb", "inf"], "--memory-gb=inf must be"),
        (["--stall-minutes", "nan"], "--stall-minutes=nan must be"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(ValueError) as error:
        plan_of(*arguments)
    assert message in str(error.value)


def test_zero_means_no_limit():
    plan = plan_of("--stall-minutes", "0", "--memory-gb", "0")
    assert plan.stall_s == plan.memory_bytes == 0


def test_same_command_gets_the_same_directory_and_another_one_another():
    names = {
        plan_of(*arguments).out.name
        for arguments in ([], [], ["--steps", "6"], ["--seed", "2"], ["a=b"], ["--num-train", "65"])
    }
    assert len(names) == 5
    assert "code_agent-grpo-cpu-5steps-seed1" in names
