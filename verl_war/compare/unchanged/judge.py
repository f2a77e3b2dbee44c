"""Whether RL is unchanged: what is compared, and what counts as no change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl_war.compare.unchanged.trajectories import QUANTITIES, Trajectories
from verl_war.compare.unchanged.two_samples import (
    MAX_EXACT_GROUPS,
    Floats,
    Groups,
    Labels,
    TwoSample,
    compare,
    every_swap,
    holm,
    paired_interval,
    swapped_groups,
    within_groups,
)

ALPHA = 0.05
"""Chance of a false alarm in the whole family of tests, and one minus the confidence of intervals."""

MIN_SEEDS = 3
"""Below, an interval would only repeat the extremes."""

RESAMPLES = 5000

LOG_PROB_TOLERANCE = 1e-3
"""Difference of the arms' mean distances taken for none: it changes a ratio of policies by 0.1%, PPO clips at 20%."""

LOG_PROB_TOLERANCE_SHARE = 0.1
"""The same in parts of the base's distance, for engines of low precision, where that is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What is asked of a comparison.

    Attributes:
        margin: Differences of the final mean reward up to this one count as none.
        final_steps: The last steps, over which the final reward is the mean.
        permutations: Drawn for each test.
        seed: Of permutations and resamples.

    Raises:
        ValueError: A value is not what it may be; states name, value and expectation.
    """

    margin: float = 0.1
    final_steps: int = 2
    permutations: int = 9999
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise ValueError(f"--margin={self.margin} must be above 0")
        if self.final_steps < 1:
            raise ValueError(f"--final-steps={self.final_steps} must be at least 1")
        if self.permutations < 999:
            raise ValueError(f"--permutations={self.permutations} must be at least 999, or no p-value could be small")


def judge(studies: Sequence[Trajectories], criteria: Criteria) -> dict[str, Any]:
    """All findings of all comparisons. Tests of the same scope are one family for the correction.

    Raises:
        ValueError: There are fewer steps than ``final_steps``.
    """
    rng = np.random.default_rng(criteria.seed)
    results = [_judge_one(study, criteria, rng) for study in studies]
    for scope in ("first_step", "all_steps"):
        rows = [row for result in results for row in result[scope]]
        tests = [(row, name) for row in rows for name in ("difference", "ks")]
        for (row, name), adjusted in zip(tests, holm([row[f"p_{name}"] for row, name in tests]), strict=True):
            row[f"holm_{name}"] = adjusted
    first_tests = 2 * sum(len(result["first_step"]) for result in results)
    for result in results:
        same: bool | None = all(
            row[f"holm_{name}"] >= ALPHA for row in result["first_step"] for name in ("difference", "ks")
        )
        if first_tests * max(row["smallest_p"] for row in result["first_step"]) >= ALPHA:
            same = None  # whatever was sampled, no test could have said otherwise
        result["verdict"] = {
            "same_distribution_at_step_1": same,
            "same_final_reward": result["final_reward"]["same"],
            "same_log_prob_agreement": result["log_probs"]["within_tolerance"],
        }
    runs = [differences for study in studies for differences in _final_differences(study, criteria)]
    pooled = _reward_difference(runs, criteria, rng)
    return {
        "criteria": asdict(criteria) | {"alpha": ALPHA},
        "studies": results,
        "final_reward": pooled,
        "unchanged": pooled["same"] is True and all(_is_unchanged(result["verdict"]) for result in results),
    }


def _is_unchanged(verdict: dict[str, bool | None]) -> bool:
    """Whether nothing speaks against it. A few runs alone seldom tell of the reward; for that all runs are pooled."""
    sampling = verdict["same_distribution_at_step_1"] is True and verdict["same_log_prob_agreement"] is True
    return sampling and verdict["same_final_reward"] is not False


def _judge_one(study: Trajectories, criteria: Criteria, rng: np.random.Generator) -> dict[str, Any]:
    if criteria.final_steps > study.steps:
        raise ValueError(f"--final-steps={criteria.final_steps} must be at most the {study.steps} steps of a run")
    base, other = study.arms
    return {
        "title": study.title,
        "arms": [base, other],
        "seeds": study.seeds,
        "steps": study.steps,
        "trajectories": {base: int((~study.treated).sum()), other: int(study.treated.sum())},
        "curves": {arm: _curve(study, study.treated == (arm == other)) for arm in study.arms},
        "first_step": _first_step(study, criteria, rng),
        "all_steps": _all_steps(study, criteria, rng),
        "final_reward": _final_means(study, criteria)
        | _reward_difference(_final_differences(study, criteria), criteria, rng),
        "log_probs": _log_probs(study),
    }


def _curve(study: Trajectories, of_arm: Labels) -> dict[str, list[float]]:
    """Seed -> mean reward of each step."""
    steps = range(1, study.steps + 1)
    return {
        str(seed): [
            _mean(study.values["reward"][of_arm & (study.seed == seed) & (study.step == step)]) for step in steps
        ]
        for seed in study.seeds
    }


def _first_step(study: Trajectories, criteria: Criteria, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Before the first update all runs have the same policy, so labels may be permuted within seed and prompt."""
    first = study.step == 1
    labels, groups = study.treated[first], _renumbered(study.group[first])
    values = {name: column[first] for name, column in study.values.items()}
    tests = compare(values, labels, groups, within_groups(labels, groups, criteria.permutations, rng), False)
    smallest = max(1 / (criteria.permutations + 1), 2 / _labellings(labels, groups))
    return [_row(name, values[name], labels, test) | {"smallest_p": smallest} for name, test in tests.items()]


def _labellings(labels: Labels, groups: Groups) -> int:
    """In how many ways the arms could have been given out within the groups."""
    sizes, treated = np.bincount(groups), np.bincount(groups, weights=labels).astype(int)
    return math.prod(math.comb(int(size), int(count)) for size, count in zip(sizes, treated, strict=True))


def _all_steps(study: Trajectories, criteria: Criteria, rng: np.random.Generator) -> list[dict[str, Any]]:
    """All trajectories of a seed and prompt change the arm together, and, beside it, all those of a seed.

    The first is sensitive but takes prompts of one run for independent, though they share the policy that it happened
    to learn. The second is exact, and so blunt that its smallest possible p-value is stated.
    """
    labels, groups, runs = study.treated, study.group, _renumbered(study.seed)
    tests = compare(study.values, labels, groups, swapped_groups(labels, groups, criteria.permutations, rng), False)
    is_exact = len(study.seeds) <= MAX_EXACT_GROUPS
    swaps = every_swap(labels, runs) if is_exact else swapped_groups(labels, runs, criteria.permutations, rng)
    of_runs = compare(study.values, labels, runs, swaps, is_exact)
    # Swapping all runs gives the same absolute values as swapping none.
    smallest = 2 / 2 ** len(study.seeds) if is_exact else 1 / (criteria.permutations + 1)
    return [
        _row(name, study.values[name], labels, test)
        | {
            "p_difference_runs": of_runs[name].p_difference,
            "p_ks_runs": of_runs[name].p_ks,
            "smallest_p_runs": smallest,
        }
        for name, test in tests.items()
    ]


def _row(name: str, values: Floats, labels: Labels, test: TwoSample) -> dict[str, Any]:
    means = {"base_mean": _mean(values[~labels]), "other_mean": _mean(values[labels])}
    return {"quantity": QUANTITIES[name]} | means | asdict(test)


def _final_means(study: Trajectories, criteria: Criteria) -> dict[str, float]:
    late = study.step > study.steps - criteria.final_steps
    reward = study.values["reward"]
    return {"base_mean": _mean(reward[late & ~study.treated]), "other_mean": _mean(reward[late & study.treated])}


def _final_differences(study: Trajectories, criteria: Criteria) -> list[Floats]:
    """For each seed, the difference of the arms' final rewards by prompt."""
    late = study.step > study.steps - criteria.final_steps
    of_seeds = [late & (study.seed == seed) for seed in study.seeds]
    return [
        _paired(study.values["reward"][rows], study.treated[rows], _renumbered(study.prompt[rows])) for rows in of_seeds
    ]


def _reward_difference(runs: Sequence[Floats], criteria: Criteria, rng: np.random.Generator) -> dict[str, Any]:
    """Mean difference over runs, its interval, and whether that says that the rewards are the same.

    `same` is True when the interval lies within the margin, False when it lies on one side of 0 and not within the
    margin, and None when it tells neither, or there are too few runs for one.
    """
    interval = paired_interval(runs, RESAMPLES, 1 - ALPHA, rng) if len(runs) >= MIN_SEEDS else None
    same = None
    if interval is not None and max(map(abs, interval)) <= criteria.margin:
        same = True
    elif interval is not None and (interval[0] > 0 or interval[1] < 0):
        same = False
    return {
        "difference": float(np.mean([each.mean() for each in runs])),
        "difference_per_seed": [float(each.mean()) for each in runs],
        "interval": interval,
        "is_one_sided": interval is not None and bool(interval[0] > 0 or interval[1] < 0),
        "same": same,
    }


def _paired(values: Floats, labels: Labels, prompts: Groups) -> Floats:
    """Per prompt, mean of the second arm minus mean of the first."""
    treated = np.bincount(prompts, weights=values * labels) / np.bincount(prompts, weights=labels)
    base = np.bincount(prompts, weights=values * ~labels) / np.bincount(prompts, weights=~labels)
    return np.asarray(treated - base)


def _log_probs(study: Trajectories) -> dict[str, Any]:
    """Distance between log-probs of rollout and actor: mean over all generated tokens, and the largest.

    Trajectories whose distance is not finite are counted; any of them, in either arm, is outside of every tolerance.
    """
    distance = study.log_probs["log_prob_diff_mean"]
    result: dict[str, Any] = {}
    for arm, of_arm in zip(study.arms, (~study.treated, study.treated), strict=True):
        rows = np.isfinite(distance) & of_arm
        broken = int((np.isinf(distance) & of_arm).sum())
        if not rows.any() and not broken:
            return {"arms": {}, "within_tolerance": None}
        mean = largest = math.inf
        if rows.any():
            mean = float(np.average(distance[rows], weights=study.values["generated_tokens"][rows]))
            largest = float(study.log_probs["log_prob_diff_max"][rows].max())
        result[arm] = {"mean": mean, "max": largest, "not_finite": broken}
    base, other = (result[arm]["mean"] for arm in study.arms)
    tolerance = max(LOG_PROB_TOLERANCE, LOG_PROB_TOLERANCE_SHARE * base)
    is_finite = not any(found["not_finite"] for found in result.values())
    within = is_finite and abs(other - base) <= tolerance
    return {"arms": result, "tolerance": tolerance, "within_tolerance": within}


def _renumbered(ids: Groups) -> Groups:
    """The same groups, numbered from 0 without gaps."""
    return np.unique(ids, return_inverse=True)[1].reshape(-1)


def _mean(values: Floats) -> float:
    return float(values.mean())
