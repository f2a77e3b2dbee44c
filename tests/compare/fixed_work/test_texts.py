"""Texts have the lengths of the trace and share what trajectories share; recorded work has its own text."""

import pytest

from tests.compare.fixed_work.helpers import TASKS, spec
from verl_war.compare.fixed_work.episodes import Task, Turn
from verl_war.compare.fixed_work.texts import (
    Conversation,
    EpisodeTexts,
    RandomTexts,
    RecordedTexts,
    conversations_of,
)
from verl_war.compare.fixed_work.workload import recorded

HEADER = [7, 8, 9]
SYSTEM = [1, 2, 3, 4]
RECORDED = RecordedTexts(
    [
        Conversation([*SYSTEM, 10, 11, *HEADER], [[12, 13, *HEADER], [14, *HEADER]]),
        Conversation([*SYSTEM, 20, 21, 22, *HEADER], [[23, *HEADER], [24, 25, 26, *HEADER]]),
    ]
)


@pytest.mark.parametrize("texts", [RECORDED, RandomTexts(vocab_size=50)])
def test_lengths_are_those_of_the_trace(texts):
    it = spec("g-0", prompt=100, tool=25)
    assert len(texts.prompt(it)) == 100
    assert [len(texts.tool_output(it, turn)) for turn in range(3)] == [25] * 3
    assert texts.tool_output(spec("g-0", tool=0), 0) == []


@pytest.mark.parametrize("texts", [RECORDED, RandomTexts(vocab_size=50)])
def test_all_share_the_system_prompt_and_siblings_the_whole_prompt(texts):
    one, sibling, other = spec("g-0"), spec("g-1"), spec("x-0", group="other group")
    assert texts.prompt(one) == texts.prompt(sibling) == texts.prompt(one)
    assert texts.prompt(one)[:40] == texts.prompt(other)[:40]
    assert texts.prompt(one) != texts.prompt(other)


def test_recorded_contexts_end_where_the_model_speaks():
    it = spec("g-0", prompt=60)
    assert RECORDED.prompt(it)[-3:] == HEADER
    assert RECORDED.tool_output(it, 1)[-3:] == HEADER
    assert RECORDED.prompt(it)[:8] == SYSTEM * 2


def test_recorded_work_says_exactly_what_was_recorded():
    texts = EpisodeTexts(TASKS)
    for it in recorded(TASKS, 20, seed=3):
        prompt = texts.prompt(it)
        assert len(prompt) == it.prompt_tokens
        assert [len(texts.tool_output(it, turn)) for turn in range(len(it.turns))] == [
            turn.tool_tokens for turn in it.turns
        ]
    first, again = spec("task0-0", turns=3), spec("task0r2-0", turns=3)
    assert texts.prompt(first) == texts.prompt(again) == [1, 2, 3, 10]
    assert texts.prompt(spec("task1-2")) == [1, 2, 3, 11, 12]
    assert [texts.tool_output(first, turn) for turn in range(3)] == [[20, 9], [21, 22, 9], []]
    assert texts.tool_output(again, 1) == [21, 22, 9]
    assert texts.tool_output(spec("task1-2"), 0) == [24, 9]


def test_traces_get_the_text_of_recorded_episodes_with_enough_of_it():
    assert conversations_of(TASKS) == [
        Conversation([1, 2, 3, 10], [[20, 9], [21, 22, 9]]),
        Conversation([1, 2, 3, 13], [[25, 9], [26, 27, 9]]),
    ]
    with pytest.raises(ValueError, match="no recorded episode has 2 tool outputs.*record more tasks"):
        conversations_of([Task([1], ((Turn(5, [2]), Turn(5, [])),))])
