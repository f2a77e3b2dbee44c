"""The recorder: what it keeps of an agent loop's output."""

from types import SimpleNamespace

import pytest

from recipes.demo_model.record_episodes import tasks_of, turns_of

pytestmark = pytest.mark.upstream


def output(mask, prompt=(1, 2)):
    """An episode whose response is 100, 101, ..."""
    return SimpleNamespace(
        prompt_ids=list(prompt), response_ids=list(range(100, 100 + len(mask))), response_mask=list(mask)
    )


@pytest.mark.parametrize(
    "mask,turns",
    [
        ([1, 1, 1], [(3, [])]),
        ([1, 1, 0, 0, 0, 1], [(2, [102, 103, 104]), (1, [])]),
        ([1, 0, 1, 1, 0], [(1, [101]), (2, [])]),  # the limit came before the last tool's output was answered
        ([0, 1, 1], [(2, [])]),
        ([0, 0], []),
        ([], []),
    ],
)
def test_a_response_is_split_into_turns_and_what_tools_said(mask, turns):
    expected = [{"output_tokens": tokens, "tool_output": tool} for tokens, tool in turns]
    assert turns_of(output(mask), end_id=0) == expected


def test_samples_are_kept_with_their_task_and_empty_ones_counted():
    played = [
        output([1]),
        output([]),
        output([1, 1], (3,)),
        output([1, 0, 1], (3,)),
        output([], (4,)),
        output([], (4,)),
    ]
    tasks, left_out = tasks_of(played, samples=2, end_id=0)
    assert left_out == 3
    assert [(task["prompt"], len(task["episodes"])) for task in tasks] == [([1, 2], 1), ([3], 2)]


def test_the_end_of_a_turn_belongs_to_what_follows_it():
    episode = output([1, 1, 1, 0, 1, 0, 1, 1])
    episode.response_ids[2] = episode.response_ids[4] = episode.response_ids[7] = 9
    assert turns_of(episode, end_id=9) == [
        {"output_tokens": 2, "tool_output": [9, 103]},
        {"output_tokens": 1, "tool_output": [105]},  # of one token alone nothing would be left to generate
        {"output_tokens": 1, "tool_output": []},
    ]
