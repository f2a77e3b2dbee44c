"""The comparison for GPUs, as far as it goes without one: what its scripts call, and what verl makes of it."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from verl_war.compare.command import add_arguments, plan_of

ROOT = Path(__file__).parents[2]
GPU = ROOT / "recipes" / "baseline_comparison" / "gpu"


def called(script, tmp_path, *arguments):
    """The arguments with which a script calls `verl-war`; its tasks are there already."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "verl-war").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (commands / "verl-war").chmod(0o755)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.parquet").touch()
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "DATA": str(tmp_path / "tasks")}
    run = subprocess.run(
        [str(GPU / script), *arguments], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout.splitlines()


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("script", "nodes", "replicas"), [("one_node.sh", 1, 8), ("two_nodes.sh", 2, 4)], ids=["one node", "two nodes"]
)
def test_both_arms_compose(script, nodes, replicas, tmp_path):
    import verl  # noqa: F401  (its plugin registers the search path and the resolver)
    from hydra import compose, initialize_config_dir

    from verl_war.integration.verl.settings import check_launch

    command, *arguments = called(script, tmp_path, "--steps", "7", f"actor_rollout_ref.model.path={tmp_path}")
    assert command == "compare"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plan = plan_of(parser.parse_args(arguments), ROOT)
    assert (plan.steps, plan.repeats, plan.generates_data, plan.arms) == (7, 2, False, ("stock", "war"))
    for trial in plan.trials():
        words = plan.command(trial)
        overrides = [word for word in words[words.index("--config-name") + 2 :] if not word.startswith("hydra.")]
        with initialize_config_dir(str(ROOT / "recipes" / "code_agent" / "config"), version_base=None):
            config = compose(plan.algorithm, overrides=overrides)
        assert config.trainer.nnodes == nodes and config.trainer.n_gpus_per_node == 8
        assert nodes * 8 // config.actor_rollout_ref.rollout.tensor_model_parallel_size == replicas
        assert config.data.train_files == str(tmp_path / "tasks" / "train.parquet")
        settings = check_launch(config)
        assert (settings is None) == (trial.arm == "stock")
        address = config.ray_kwargs.ray_init.get("address")
        assert address == (None if nodes == 1 else "auto")


@pytest.mark.parametrize("script", ["one_node.sh", "two_nodes.sh"])
def test_help_says_how_to_start(script):
    run = subprocess.run([str(GPU / script), "--help"], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.startswith("Stock verl against WAR on") and script in run.stdout


def test_overrides_may_stand_before_options(monkeypatch):
    from verl_war import cli
    from verl_war.compare import command

    seen = []
    monkeypatch.setattr(command, "run", lambda options: seen.append(options) or 0)
    assert cli.main(["compare", "a=b", "--steps", "50", "+c=d", "~e"]) == 0
    assert seen[0].overrides == ["a=b", "+c=d", "~e"] and seen[0].steps == 50
    for words in (["compare", "a=b", "--stepps", "50"], ["top", "run", "a=b"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2


def test_a_missing_machine_is_named():
    run = subprocess.run([str(GPU / "compare.sh")], capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode != 0 and "MACHINE is gpu_8b or gpu_32b" in run.stderr
