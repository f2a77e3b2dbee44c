"""Recorded episodes: the file, and the work that is made of it."""

import json
import math
from statistics import fmean

import pytest

from tests.compare.fixed_work.helpers import ROOT, TASKS
from verl_war.compare.fixed_work import workload
from verl_war.compare.fixed_work.episodes import Turn, read_episodes
from verl_war.compare.fixed_work.plan import episodes_file
from verl_war.compare.plan import RECIPES

GOOD = {
    "format": 3,
    "recipe": "code_agent",
    "tasks": [
        {
            "prompt": [7, 8],
            "episodes": [[{"output_tokens": 3, "tool_output": [9]}, {"output_tokens": 4, "tool_output": []}]],
        }
    ],
}


def changed(**values):
    """The file with another first turn."""
    turns = [{**GOOD["tasks"][0]["episodes"][0][0], **values}, GOOD["tasks"][0]["episodes"][0][1]]
    return {**GOOD, "tasks": [{"prompt": [7, 8], "episodes": [turns]}]}


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "code_agent.json"
    path.write_text(json.dumps(GOOD))
    (task,) = read_episodes(path)
    assert task.prompt == [7, 8]
    assert task.episodes == ((Turn(3, [9]), Turn(4, [])),)


@pytest.mark.parametrize(
    "text,cause",
    [
        (None, "FileNotFoundError"),
        (json.dumps(GOOD)[:60], "JSONDecodeError"),
        ("[1]", "TypeError"),
        (json.dumps({**GOOD, "format": 1}), "format 1, expected 3"),
        (json.dumps({"format": 3}), "KeyError"),
        (json.dumps({**GOOD, "tasks": []}), "no task"),
        (json.dumps({**GOOD, "tasks": [{"prompt": [], "episodes": []}]}), "a task without prompt"),
        (json.dumps({**GOOD, "tasks": [{"prompt": [1], "episodes": [[]]}]}), "a task without prompt"),
        (json.dumps(changed(output_tokens=0)), "output_tokens=0"),
        (json.dumps(changed(tool_output="x")), "'x', expected a list of tokens"),
        (json.dumps({**GOOD, "tasks": [{"prompt": [1], "episodes": [[{"output_tokens": 3, "tool_output": [9]}]]}]}),
         "does not end with a generated turn"),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file_is_refused_with_a_remedy(tmp_path, text, cause):
    path = tmp_path / "code_agent.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="cannot be used") as error:
        read_episodes(path)
    assert str(path) in str(error.value) and cause in str(error.value)
    assert "python -m recipes.demo_model.record_episodes --recipe code_agent" in str(error.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_episodes(recipe):
    path = episodes_file(ROOT, recipe)
    assert path.stat().st_size < 2_000_000
    tasks = read_episodes(path)
    assert len(tasks) == 24
    assert all(1 <= len(task.episodes) <= 8 for task in tasks)
    assert fmean(len(episode) for task in tasks for episode in task.episodes) > 3
    assert 100 < workload.mean_context_tokens(tasks) < 2048


def test_siblings_follow_one_another_and_have_the_recorded_lengths():
    specs = workload.recorded(TASKS, 7, seed=4)
    names = [f"task{number}-{sample}" for number, task in enumerate(TASKS) for sample in range(len(task.episodes))]
    assert sorted(spec.trajectory_id for spec in specs) == names
    assert [spec.group_id for spec in specs] == [spec.trajectory_id.rpartition("-")[0] for spec in specs]
    changes = sum(before.group_id != after.group_id for before, after in zip(specs, specs[1:], strict=False))
    assert changes == 2
    long = next(spec for spec in specs if spec.trajectory_id == "task0-0")
    assert (long.system_tokens, long.prompt_tokens) == (3, 4)
    assert [(turn.output_tokens, turn.tool_tokens) for turn in long.turns] == [(5, 2), (6, 3), (7, 0)]
    assert long.final_tokens == 4 + 5 + 2 + 6 + 3 + 7


def test_work_depends_on_the_seed_alone():
    assert workload.recorded(TASKS, 12, seed=1) == workload.recorded(TASKS, 12, seed=1)
    assert workload.recorded(TASKS, 5, seed=1) == workload.recorded(TASKS, 12, seed=1)[:5]  # the last group is smaller
    orders = {tuple(spec.group_id for spec in workload.recorded(TASKS, 7, seed)) for seed in range(20)}
    assert len(orders) > 3


def test_tasks_come_again_only_after_all_others_and_by_another_name():
    specs = workload.recorded(TASKS, 21, seed=2)
    assert len({spec.trajectory_id for spec in specs}) == 21
    for round_number, mark in enumerate(("", "r2", "r3")):
        groups = {spec.group_id for spec in specs[7 * round_number : 7 * round_number + 7]}
        assert groups == {f"task{number}{mark}" for number in range(3)}
    once, again = (next(spec for spec in specs if spec.trajectory_id == name) for name in ("task1-2", "task1r2-2"))
    assert [turn.output_tokens for turn in once.turns] == [turn.output_tokens for turn in again.turns] == [1, 9]


def test_starts_and_tools_take_the_time_they_are_drawn_for():
    specs = workload.recorded(TASKS, 4000, seed=0)
    assert all(0 <= spec.start_s <= 0.5 for spec in specs)
    assert fmean(spec.start_s for spec in specs) == pytest.approx(0.25, abs=0.02)
    assert all(spec.turns[-1].tool_s == 0 for spec in specs)
    logs = [math.log(turn.tool_s) for spec in specs for turn in spec.turns[:-1]]
    assert math.exp(fmean(logs) + 0.5) == pytest.approx(0.4, rel=0.1)


def test_the_mean_context_is_that_of_all_recorded_episodes():
    contexts = [[4, 11, 20], [4], [5, 11], [5], [5, 8], [4, 11, 19], [4]]
    assert workload.mean_context_tokens(TASKS) == pytest.approx(fmean(map(fmean, contexts)))
