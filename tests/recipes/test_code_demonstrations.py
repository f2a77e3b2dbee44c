"""Demonstrations: replayable, noisy to a measured degree, short."""

import json

import pytest

from recipes.code_agent.actions import perform, tool_schemas
from recipes.code_agent.demonstrations import Noise, demonstrations
from recipes.code_agent.generate import generate
from recipes.code_agent.testing import InProcessTests
from recipes.code_agent.workspace import Workspace

NUM_TRACES = 400


@pytest.fixture(scope="module")
def traces():
    return list(demonstrations(NUM_TRACES, seed=3))


def _num_chars(trace):
    return sum(len(m["content"]) + len(json.dumps(m.get("tool_calls", ""))) for m in trace["messages"])


def test_the_same_seed_gives_the_same_traces(traces):
    assert list(demonstrations(5, seed=3)) == traces[:5]


def test_solve_rate_leaves_room_to_learn_and_to_lose(traces):
    assert 0.55 <= sum(trace["solved"] for trace in traces) / NUM_TRACES <= 0.74


def test_without_noise_everything_is_solved():
    perfect = Noise(skip_first_run=0, wrong_file=0, give_up_early=0, wrong_quote=0, wrong_fix=0, skip_check=0)
    assert all(trace["solved"] for trace in demonstrations(40, seed=5, noise=perfect))


def test_solved_traces_are_short(traces):
    solved = [trace for trace in traces if trace["solved"]]
    turns = [sum(message["role"] == "assistant" for message in trace["messages"]) for trace in solved]
    assert 4.5 <= sum(turns) / len(turns) <= 6.5
    assert sum(map(_num_chars, solved)) / len(solved) / 4 < 500
    assert max(map(_num_chars, solved)) / 4 < 1000


def test_tool_results_are_what_the_tools_say(traces):
    for index, trace in enumerate(traces[:30]):
        with Workspace(generate(-4, index).task, InProcessTests()) as workspace:
            for message, reply in zip(trace["messages"], trace["messages"][1:], strict=False):
                for call in message.get("tool_calls", []):
                    function = call["function"]
                    assert reply["content"] == perform(workspace, function["name"], function["arguments"])


def test_messages_have_the_form_that_verl_renders(traces):
    for trace in traces[:50]:
        roles = [message["role"] for message in trace["messages"]]
        assert roles[:2] == ["system", "user"] and roles[-1] == "assistant"
        assert roles[2:-1] == ["assistant", "tool"] * ((len(roles) - 3) // 2)
        assert trace["tools"] == tool_schemas()
        json.dumps(trace)


def test_every_kind_of_error_is_shown(traces):
    text = json.dumps(traces)
    for sign in ("search text not found", "I could not fix it.", "Fixed.", "FAIL "):
        assert sign in text
    assert any(not t["solved"] and t["messages"][-1]["content"] == "Fixed." for t in traces)


@pytest.mark.parametrize("wrong", [{"wrong_fix": 1.5}, {"give_up": -0.1}, {"max_attempts": 0}])
def test_impossible_noise_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Noise(**wrong)
