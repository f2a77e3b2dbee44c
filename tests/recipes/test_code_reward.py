"""Rewards from outcomes."""

import math

import pytest

from recipes.code_agent.reward import RewardConfig, compute_score, reward_of
from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import TestOutcome

TASK = Task(task_id="t", statement="s", files={"a": ""}, fail_to_pass=("f1", "f2"), pass_to_pass=("p1", "p2"))


@pytest.mark.parametrize(
    ("passed", "weight", "score", "solved", "fraction"),
    [
        ({"f1", "f2", "p1", "p2"}, 0.1, 1.0, 1.0, 1.0),
        ({"f1", "p1", "p2"}, 0.1, 0.05, 0.0, 0.75),
        ({"f1", "f2", "p1"}, 0.1, 0.0, 0.0, 0.75),
        ({"p1", "p2"}, 0.1, 0.0, 0.0, 0.5),
        ({"f1", "p1", "p2"}, 0.0, 0.0, 0.0, 0.75),
        (set(), 0.5, 0.0, 0.0, 0.0),
    ],
)
def test_rewards(passed, weight, score, solved, fraction):
    outcome = TestOutcome(text="", passed={name: name in passed for name in TASK.required_tests})
    reward = reward_of(TASK, outcome, RewardConfig(partial_weight=weight))
    assert math.isclose(reward.score, score)
    assert (reward.solved, reward.tests_passed) == (solved, fraction)


def test_tests_that_did_not_report_failed():
    assert reward_of(TASK, TestOutcome(text="", passed={"f1": True, "f2": True, "p1": True})).solved == 0.0


def test_verls_entry_point_hands_on_what_was_scored():
    info = {"score": 1.0, "acc": 1.0}
    assert compute_score("code_agent", "", None, {"reward_extra_info": info}) == info
    with pytest.raises(ValueError, match="set agent_name to code_agent"):
        compute_score("code_agent", "", None, {})
