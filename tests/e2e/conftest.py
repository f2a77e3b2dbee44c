"""Real training runs: stock verl's own command on prepared data, in a directory of their own."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_war.compare import processes

ROOT = Path(__file__).parents[2]
WAR = "rollout@actor_rollout_ref.rollout=war"
RUN_LIMIT_S = 600


@dataclass(frozen=True)
class Run:
    """A finished run: its metrics, one dict per step, and everything it printed."""

    steps: list[dict]
    console: str


@pytest.fixture(scope="session")
def data_dirs(tmp_path_factory):
    """Small datasets of both recipes."""
    dirs = {}
    for recipe in ("code_agent", "search_agent"):
        dirs[recipe] = tmp_path_factory.mktemp(recipe)
        command = [sys.executable, "-m", f"recipes.{recipe}.prepare_data", "--out", str(dirs[recipe]),
                   "--num-train", "16", "--num-val", "4", "--seed", "1"]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    return dirs


@pytest.fixture
def train(data_dirs, tmp_path):
    """`train(recipe, algorithm, *overrides)` runs two steps of four prompts and returns a `Run`.

    `meanwhile`, if given, is called with the run's id in a thread of its own while the run goes on.
    """

    def run(recipe, algorithm, *overrides, meanwhile=None):
        metrics = tmp_path / "metrics.jsonl"
        command = [
            sys.executable, "-m", "verl.trainer.main_ppo",
            "--config-path", str(ROOT / "recipes" / recipe / "config"), "--config-name", algorithm,
            f"data.train_files={data_dirs[recipe]}/train.parquet", f"data.val_files={data_dirs[recipe]}/val.parquet",
            "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=2", "trainer.val_before_train=False",
            f"trainer.default_local_dir={tmp_path}/checkpoints", "trainer.logger=[console,file]",
            *recipe_overrides(recipe, data_dirs[recipe]), *overrides,
        ]  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="war") as ray_dir:
            env = {"PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_PATH": str(metrics), "RAY_TMPDIR": ray_dir}
            if meanwhile is not None:
                env[processes.RUN_ID_ENV] = uuid.uuid4().hex
                threading.Thread(target=meanwhile, args=(env[processes.RUN_ID_ENV],), daemon=True).start()
            console = run_marked(command, tmp_path / "console.log", env)
        steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
        return Run(steps=steps, console=console)

    return run


def recipe_overrides(recipe, data_dir):
    # The search tools read the corpus that was made with the questions.
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={data_dir}/tools.yaml"
    return [tools] if recipe == "search_agent" else []


def run_marked(command, log_path, env):
    """Run to the end, fail with the log's tail, and leave no process and no shared memory behind."""
    since_s = time.time()
    try:
        with (
            log_path.open("w") as log,
            processes.tree(command, cwd=ROOT, env={**os.environ, **env}, stdout=log) as child,
        ):
            exit_code = child.wait(timeout=RUN_LIMIT_S)
    finally:
        processes.remove_shared_memory(since_s)  # killed engines and trainers leave theirs
    console = log_path.read_text(errors="replace")
    assert exit_code == 0, f"exit {exit_code} of {' '.join(command)}\n{console[-6000:]}"
    return console
