"""What a comparison consists of: its trials, their commands, and where everything goes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_war.compare.processes import RUN_ID_ENV

RECIPES = ("code_agent", "search_agent")
ALGORITHMS = ("grpo", "ppo")

ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("rollout@actor_rollout_ref.rollout=rollout", "actor_rollout_ref.rollout.name=vllm"),
    "war": ("rollout@actor_rollout_ref.rollout=war",),
}
"""Name of an arm -> the overrides that set it apart. Everything else is the same for all arms."""

DATA_FILES: dict[str, dict[str, str]] = {
    "code_agent": {},
    "search_agent": {"actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml"},
}
"""Recipe -> key -> file that its data preparation writes beside the two parquet files."""

OWNED_KEYS: dict[str, str] = {
    "machine": "--machine",
    "rollout@actor_rollout_ref.rollout": "--arms",
    "trainer.total_training_steps": "--steps",
    "trainer.default_local_dir": "--out",
    "trainer.rollout_data_dir": "--out",
    "trainer.resume_mode": "--fresh",
    "trainer.logger": "--out",
    "data.seed": "--seed",
    "actor_rollout_ref.rollout.seed": "--seed",
}
"""Keys that the comparison sets itself -> the option that a user has for them."""

SAVES_PER_RUN = 5
"""An interrupted trial repeats at most a fifth of its steps, and short ones one step."""

CHECKPOINTS_KEPT = 2
"""verl deletes the oldest checkpoint before it writes the next one: with one, an interruption could leave none."""

MOST_STALL_S = 60 * 1_000_000.0
"""Two years: no limit, but a number."""

_PLAIN_VALUE = re.compile(r"[\w./:@%+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One training run: one arm, once.

    Attributes:
        arm: Key of :data:`ARMS`.
        repeat: 1 for the first run of the arm.
        seed: The same for all arms of one repeat.
        directory: Console output, metrics, checkpoints and state of this trial.
    """

    arm: str
    repeat: int
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        """Short name for people; also the name of the directory."""
        return self.directory.name

    @property
    def console_log(self) -> Path:
        """Everything that the training printed, all attempts after one another."""
        return self.directory / "console.log"

    @property
    def metrics_directory(self) -> Path:
        """One file per attempt: verl's file logger empties the file that it is given."""
        return self.directory / "metrics"

    @property
    def checkpoints(self) -> Path:
        """verl's own checkpoints."""
        return self.directory / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """Text and numbers of all trajectories, a file per step; a step that is repeated replaces its file."""
        return self.directory / "trajectories"

    @property
    def tensorboard(self) -> Path:
        """Event files of verl's TensorBoard logger."""
        return self.directory / "tensorboard"

    def metrics_file(self, attempt: int) -> Path:
        """Where verl's file logger writes during the given attempt (1, 2, ...)."""
        return self.metrics_directory / f"attempt-{attempt:03d}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A comparison as the user asked for it.

    Attributes:
        recipe: Directory below ``recipes/``.
        algorithm: ``grpo`` or ``ppo``.
        steps: Training steps of every trial.
        machine: Value of the recipe's configuration group ``machine``.
        seed: Seed of the first repeat and of the data; repeat r uses ``seed + r - 1``.
        arms: Keys of :data:`ARMS`; the first one is the base of all ratios.
        repeats: Trials of each arm.
        num_train: Generated training tasks.
        num_val: Generated validation tasks.
        overrides: Hydra overrides of the user, for all arms.
        memory_bytes: Free memory that a trial needs to start.
        stall_s: A trial without a new step for that long has failed; 0 for no limit.
        out: Directory of the comparison.
        repo: Root of the clone that holds the recipes.

    Raises:
        ValueError: A value is not what it may be; states name, value and expectation.
    """

    recipe: str
    algorithm: str
    steps: int
    machine: str
    seed: int
    arms: tuple[str, ...]
    repeats: int
    num_train: int
    num_val: int
    overrides: tuple[str, ...]
    memory_bytes: int
    stall_s: float
    out: Path
    repo: Path

    def __post_init__(self) -> None:
        _require_one_of("--recipe", self.recipe, RECIPES)
        _require_one_of("--algorithm", self.algorithm, ALGORITHMS)
        _require_one_of("--machine", self.machine, self._machines())
        for arm in self.arms:
            _require_one_of("--arms", arm, tuple(ARMS))
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise ValueError(f"--arms={','.join(self.arms)} must name at least one arm and none twice")
        counts = {
            "--steps": self.steps,
            "--repeat": self.repeats,
            "--num-train": self.num_train,
            "--num-val": self.num_val,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed={self.seed} must be at least 0 and less than 2**31")
        if not 0 <= self.stall_s <= MOST_STALL_S:
            raise ValueError(
                f"--stall-minutes={self.stall_s / 60:g} must be between 0 (no limit) and {MOST_STALL_S / 60:g}"
            )
        for override in self.overrides:
            _check_override(override)

    def _machines(self) -> tuple[str, ...]:
        folder = self.repo / "recipes" / self.recipe / "config" / "machine"
        return tuple(sorted(path.stem for path in folder.glob("*.yaml")))

    @property
    def is_cpu(self) -> bool:
        """Whether the trials run without accelerator."""
        return self.machine == "cpu"

    @property
    def data_directory(self) -> Path:
        """Generated tasks, the same for all trials."""
        return self.out / "data"

    @property
    def generates_data(self) -> bool:
        """Whether the tasks are generated; a user who names data files brings them along."""
        return not any(override.lstrip("+").startswith("data.train_files=") for override in self.overrides)

    def identity(self) -> dict[str, Any]:
        """What must not change between two runs in the same directory. Arms and repeats may be added."""
        names = ("recipe", "algorithm", "steps", "machine", "seed", "num_train", "num_val")
        return {name: getattr(self, name) for name in names} | {"overrides": list(self.overrides)}

    def trials(self) -> list[Trial]:
        """All trials in the order in which they run: arms alternate, and every other repeat swaps them."""
        return [
            Trial(arm=arm, repeat=repeat, seed=self.seed + repeat - 1, directory=self._directory(arm, repeat))
            for repeat in range(1, self.repeats + 1)
            for arm in (self.arms if repeat % 2 else self.arms[::-1])
        ]

    def _directory(self, arm: str, repeat: int) -> Path:
        return self.out / (arm if repeat == 1 else f"{arm}-{repeat}")

    def data_command(self) -> list[str]:
        """The command that generates the tasks."""
        options = {"out": self.data_directory, "num-train": self.num_train, "num-val": self.num_val, "seed": self.seed}
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", f"recipes.{self.recipe}.prepare_data", *arguments]

    def command(self, trial: Trial) -> list[str]:
        """The training command of ``trial``. The user's overrides come last, so they win."""
        return [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *("--config-path", str(self.repo / "recipes" / self.recipe / "config")),
            *("--config-name", self.algorithm),
            f"machine={self.machine}",
            *ARMS[trial.arm],
            *(f"{key}={hydra_value(value)}" for key, value in self._settings(trial).items()),
            *self.overrides,
        ]

    def _settings(self, trial: Trial) -> dict[str, Any]:
        files = {"data.train_files": "train.parquet", "data.val_files": "val.parquet"} | DATA_FILES[self.recipe]
        data = {key: self.data_directory / name for key, name in files.items()} if self.generates_data else {}
        return data | {
            "data.seed": trial.seed,
            "actor_rollout_ref.rollout.seed": trial.seed,
            "actor_rollout_ref.actor.data_loader_seed": trial.seed,
            "critic.data_loader_seed": trial.seed,
            "trainer.total_training_steps": self.steps,
            # An epoch has at least one step.
            "trainer.total_epochs": self.steps,
            "trainer.logger": "[console,file,tensorboard]",
            "trainer.experiment_name": f"{self.recipe}_{self.algorithm}_{trial.name}",
            "trainer.default_local_dir": trial.checkpoints,
            "trainer.rollout_data_dir": trial.trajectories,
            "trainer.resume_mode": "auto",
            "trainer.save_freq": -(-self.steps // SAVES_PER_RUN),
            "trainer.max_actor_ckpt_to_keep": CHECKPOINTS_KEPT,
            "trainer.max_critic_ckpt_to_keep": CHECKPOINTS_KEPT,
            "hydra.run.dir": trial.directory / "hydra",
        }

    def environment(self, trial: Trial, attempt: int, run_id: str, scratch: Path) -> dict[str, str]:
        """The environment of ``trial``.

        Args:
            trial: What is going to run.
            attempt: 1 for the first start of the trial.
            run_id: Unique name of this start; marks its processes.
            scratch: Directory for Ray, sockets and temporary files; short, because socket paths are limited.
        """
        return self.base_environment(run_id, scratch) | {
            "VERL_FILE_LOGGER_PATH": str(trial.metrics_file(attempt)),
            "TENSORBOARD_DIR": str(trial.tensorboard),
        }

    def base_environment(self, run_id: str, scratch: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment that all subprocesses of a comparison share."""
        return base_environment(self.repo, run_id, scratch, self.is_cpu, inherited)


def base_environment(
    repo: Path, run_id: str, scratch: Path, is_cpu: bool, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a comparison's subprocesses.

    Args:
        repo: The clone that they run in.
        run_id: Unique name of this start; marks its processes.
        scratch: Directory for Ray, sockets and temporary files; short, because socket paths are limited.
        is_cpu: Whether they run without accelerator.
        inherited: What is kept where nothing else is said.
    """
    environment = {
        # Reporting of usage is the user's decision; here it would only slow a machine without network down.
        **{"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"},
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(repo), inherited.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": str(scratch),
        RUN_ID_ENV: run_id,
    }
    if is_cpu:
        # The demo model is a local directory, and the Ray of somebody else must stay untouched.
        environment.pop("RAY_ADDRESS", None)
        environment |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return environment


def hydra_value(value: Any) -> str:
    """``value`` as Hydra's override grammar wants it; text with special characters is quoted."""
    text = str(value)
    if not isinstance(value, Path) or _PLAIN_VALUE.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def find_repo(start: Path, recipe: str) -> Path:
    """The clone that ``start`` lies in.

    Raises:
        ValueError: There is no such recipe in ``start`` or above it.
    """
    for folder in (start, *start.parents):
        if (folder / "recipes" / recipe / "config").is_dir():
            return folder
    raise ValueError(
        f"no recipes/{recipe}/config in {start} or above; recipes are part of the repository, not of the installed "
        f"package: run the command inside a clone, with --recipe one of {', '.join(RECIPES)}"
    )


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _check_override(override: str) -> None:
    key, equals, _ = override.partition("=")
    if not equals and not override.startswith("~"):
        raise ValueError(f"{override!r} is not a Hydra override; expected key=value, +key=value or ~key")
    if key.lstrip("+~") in OWNED_KEYS:
        option = OWNED_KEYS[key.lstrip("+~")]
        raise ValueError(f"{override!r}: this key is set by the comparison itself; use {option} instead")
