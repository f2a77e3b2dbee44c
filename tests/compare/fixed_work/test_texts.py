"""Texts have the lengths of the trace and share what trajectories share."""

import json

import pytest

from tests.compare.fixed_work.helpers import spec
from verl_war.compare.fixed_work.texts import Conversation, RandomTexts, RecordedTexts, read_texts

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


def test_a_file_of_texts_is_checked(tmp_path):
    path = tmp_path / "texts.json"
    good = {"format": 1, "conversations": [{"prompt": [1, 2], "tool_outputs": [[3], [4]]}]}
    path.write_text(json.dumps(good))
    assert len(read_texts(path).prompt(spec("g-0"))) == 100
    for bad in ({**good, "format": 2}, {**good, "conversations": []}, {"format": 1}, [1]):
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="cannot be used.*delete the file to record anew"):
            read_texts(path)
    path.write_text(json.dumps(good)[:20])
    with pytest.raises(ValueError, match="cannot be used"):
        read_texts(path)
