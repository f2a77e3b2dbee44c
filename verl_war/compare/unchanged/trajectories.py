"""The trajectories that the two arms of a finished live comparison sampled."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTITIES: dict[str, str] = {"reward": "reward", "generated_tokens": "generated tokens", "turns": "turns"}
"""What two samples are compared in -> name for people."""

LOG_PROB_KEYS = ("log_prob_diff_mean", "log_prob_diff_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """All trajectories of a comparison, a row each.

    Attributes:
        title: Recipe and algorithm.
        arms: The base, and what is compared with it.
        steps: Training steps of every run.
        treated: Whether the row is of the second arm.
        seed: Of the run.
        step: Training step.
        prompt: Number of the prompt, the same in both arms.
        values: Keys of :data:`QUANTITIES` -> value.
        log_probs: Keys of :data:`LOG_PROB_KEYS` -> distance of rollout and actor; not-a-number where none was logged,
            infinite where what was logged is not finite.
    """

    title: str
    arms: tuple[str, str]
    steps: int
    treated: npt.NDArray[np.bool_]
    seed: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    prompt: npt.NDArray[np.int64]
    values: dict[str, npt.NDArray[np.float64]]
    log_probs: dict[str, npt.NDArray[np.float64]]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, each in both arms."""
        return sorted(set(self.seed.tolist()))

    @property
    def group(self) -> npt.NDArray[np.int64]:
        """Rows of the same seed and prompt have the same number, 0 and up."""
        pairs = np.stack([self.seed, self.prompt], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def read_trajectories(directory: Path) -> Trajectories:
    """Read what `verl-war compare` left in ``directory``.

    Raises:
        ValueError: The comparison is not finished or has not both arms for every seed, a step is missing, a file is
            damaged, or the arms were given different prompts.
    """
    report = _read_report(directory)
    plan = report["plan"]
    arms, trials = _paired_trials(directory, plan, report["trials"])
    rows: list[dict[str, Any]] = []
    for trial in trials:
        for step in range(1, plan["steps"] + 1):
            found = list(_read_step(directory / trial["name"] / "trajectories" / "numbers" / f"{step}.jsonl"))
            rows += [line | {"step": step, "seed": trial["seed"], "treated": trial["arm"] == arms[1]} for line in found]
    _require_same_prompts(directory, arms, rows)
    numbers = {digest: number for number, digest in enumerate(sorted({row["prompt"] for row in rows}))}
    return Trajectories(
        title=f"{plan['recipe']}, {plan['algorithm']}",
        arms=arms,
        steps=plan["steps"],
        treated=np.array([row["treated"] for row in rows], dtype=bool),
        seed=np.array([row["seed"] for row in rows]),
        step=np.array([row["step"] for row in rows]),
        prompt=np.array([numbers[row["prompt"]] for row in rows]),
        values={key: np.array([row[key] for row in rows], dtype=float) for key in QUANTITIES},
        log_probs={key: np.array([row.get(key, np.nan) for row in rows], dtype=float) for key in LOG_PROB_KEYS},
    )


def _read_report(directory: Path) -> dict[str, Any]:
    path = directory / "report.json"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; expected the directory of a finished `verl-war compare --mode live`: repeat that "
            "command, it goes on where it stopped"
        )
    try:
        report = json.loads(path.read_text())
        if not all(key in report["plan"] for key in ("recipe", "algorithm", "steps", "arms")) or not report["trials"]:
            raise KeyError("plan")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of `verl-war compare --mode live`; repeat that command") from error
    return report


def _paired_trials(
    directory: Path, plan: dict[str, Any], trials: list[dict[str, Any]]
) -> tuple[tuple[str, str], list[dict[str, Any]]]:
    """The two arms and their runs, after a look whether each seed was trained with both."""
    if len(plan["arms"]) != 2:
        raise ValueError(
            f"{directory}: arms={','.join(plan['arms'])}, expected two of them to compare; repeat `verl-war compare` "
            "with --arms stock,war"
        )
    base, other = plan["arms"]
    for seed in sorted({trial["seed"] for trial in trials}):
        found = sorted(trial["arm"] for trial in trials if trial["seed"] == seed)
        if found != sorted(plan["arms"]):
            raise ValueError(
                f"{directory}: seed {seed} has runs of {found}, expected one of {base} and one of {other}; repeat "
                "`verl-war compare` with both arms"
            )
    return (base, other), trials


def _read_step(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise ValueError(
            f"{path} does not exist, expected the trajectories of that step; runs made before verl_war wrote them "
            "have none: repeat the comparison with --fresh"
        )
    lines = path.read_text().splitlines()
    if not lines:
        raise ValueError(f"{path} is empty, expected a line per trajectory; repeat the comparison with --fresh")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            distances = {key: float(row[key]) for key in LOG_PROB_KEYS if key in row}
            yield {
                "prompt": str(row["prompt"]),
                **{key: float(row[key]) for key in QUANTITIES},
                **{key: value if math.isfinite(value) else math.inf for key, value in distances.items()},
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: expected the numbers of a trajectory, found {line[:80]!r}; repeat the comparison "
                "with --fresh"
            ) from error


def _require_same_prompts(directory: Path, arms: tuple[str, str], rows: list[dict[str, Any]]) -> None:
    """Arms that were given other prompts differ for that reason alone. How often each was sampled may differ."""
    given = Counter((row["seed"], row["step"], row["prompt"], row["treated"]) for row in rows)
    for seed, step, prompt, treated in given:
        if (seed, step, prompt, not treated) not in given:
            raise ValueError(
                f"{directory}: in step {step} of seed {seed} only {arms[treated]} was given prompt {prompt}, expected "
                "the same prompts in both arms; sample without filters that depend on the trajectories"
            )
