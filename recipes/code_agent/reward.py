"""Reward of a trajectory from the outcome of its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import TestOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How outcomes become a number."""

    partial_weight: float = 0.1
    """Reward of an unsolved task whose failing tests would all pass but one of infinitely many: the fraction of them
    that passes is multiplied by this, provided that no other test was broken. Small, because a solved task must stay
    the aim; above 0, because a group without any solved task would otherwise teach nothing when a task has several
    failing tests. A task with one failing test gets 0 or 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.partial_weight < 1:
            raise ValueError(f"reward: partial_weight is {self.partial_weight}; expected a number from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A trajectory's reward and what it is made of; all numbers are in 0..1.

    Attributes:
        score: the reward.
        solved: 1.0 if all required tests pass, otherwise 0.0.
        tests_passed: fraction of the required tests that pass.
    """

    score: float
    solved: float
    tests_passed: float


def reward_of(task: Task, outcome: TestOutcome, config: RewardConfig = RewardConfig()) -> Reward:  # noqa: B008 - immutable
    """Return 1.0 if all FAIL_TO_PASS and PASS_TO_PASS tests pass, otherwise the partial reward."""
    num_fixed, num_kept = outcome.num_passed(task.fail_to_pass), outcome.num_passed(task.pass_to_pass)
    num_required = len(task.required_tests)
    solved = num_fixed + num_kept == num_required
    unbroken = num_kept == len(task.pass_to_pass)
    partial = config.partial_weight * num_fixed / len(task.fail_to_pass) if unbroken else 0.0
    return Reward(
        score=1.0 if solved else partial, solved=float(solved), tests_passed=(num_fixed + num_kept) / num_required
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **_kwargs: Any
) -> dict[str, Any]:
    """Entry point for verl's ``reward.custom_reward_function``: hand on what the agent loop has scored.

    verl asks for it only when a trajectory comes without a reward, which :class:`CodeAgentLoop` never returns. It
    matters for loops that wrap the code agent and drop the reward but keep its ``extra_fields``.

    Raises:
        ValueError: the trajectory was not scored: its text alone says nothing about the tests.
    """
    info = extra_info.get("reward_extra_info")
    if not isinstance(info, dict) or "score" not in info:
        raise ValueError(
            f"{data_source}: the trajectory carries no test outcome; set agent_name to code_agent, whose loop runs "
            "the tests while the files still exist"
        )
    return dict(info)
