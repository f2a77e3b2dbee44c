"""Scripted traces: real tool results, short, right about as often as wrong, and always right without carelessness."""

import json

import pytest

from recipes.search_agent.demonstrations import Carelessness, demonstrations, tool_schemas
from recipes.search_agent.reward import compute_score

CAREFUL = Carelessness(wrong_query=0.0, wrong_result=0.0, misreads=0.0, stops_early=0.0)


@pytest.fixture(scope="module")
def traces():
    return list(demonstrations(400, seed=0))


def calls(trace):
    return [call["function"] for message in trace["messages"] for call in message.get("tool_calls", [])]


def test_traces_are_chats_in_which_each_call_has_its_result(traces):
    assert len(traces) == 400
    for trace in traces:
        roles = [message["role"] for message in trace["messages"]]
        num_calls = len(calls(trace))
        assert roles == ["system", "user", *["assistant", "tool"] * num_calls, "assistant"]
        assert [call["name"] for call in calls(trace)] == ["search", "open"] * (num_calls // 2)
        assert trace["tools"] == tool_schemas()


def test_tool_results_are_real_and_never_errors(traces):
    for trace in traces:
        results = [message["content"] for message in trace["messages"] if message["role"] == "tool"]
        for call, result, before in zip(calls(trace), results, ["", *results], strict=False):
            assert result and not result.startswith(("Error", "No results"))
            if call["name"] == "open":
                assert f"[{call['arguments']['doc_id']}]" in before, "opens what the search before it has found"


def test_everything_the_searcher_writes_can_be_copied_from_what_it_has_read(traces):
    for trace in traces:
        seen = ""
        for message in trace["messages"]:
            if message["role"] == "assistant":
                written = message["content"].removeprefix("<answer>").removesuffix("</answer>")
                for call in message.get("tool_calls", []):
                    (written,) = call["function"]["arguments"].values()
                assert written in seen
            seen += message["content"] + "\n"


def test_good_behaviour_is_a_substantial_share_but_not_all(traces):
    share = sum(trace["correct"] for trace in traces) / len(traces)
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_careful_searcher_is_always_right_in_two_calls_a_hop(hops):
    for trace in demonstrations(40, seed=1, hops=hops, carelessness=CAREFUL):
        assert trace["correct"] and len(calls(trace)) == 2 * hops


def test_correct_agrees_with_the_reward(traces):
    answers = {trace["messages"][1]["content"]: trace for trace in demonstrations(400, seed=0, carelessness=CAREFUL)}
    for trace in traces[:25]:
        truth = answers[trace["messages"][1]["content"]]["messages"][-1]["content"]
        given = trace["messages"][-1]["content"]
        scored = compute_score("search_agent", given, truth.removeprefix("<answer>").removesuffix("</answer>"))
        assert scored["score"] == trace["correct"] and scored["answered"] == 1.0


@pytest.mark.parametrize(
    ("mistake", "sign"),
    [
        (
            "wrong_query",
            lambda trace: calls(trace)[0]["arguments"]["query"] not in trace["messages"][1]["content"][-30:],
        ),
        ("stops_early", lambda trace: len(calls(trace)) == 2),
        ("misreads", lambda trace: not trace["correct"]),
        ("wrong_result", lambda trace: not trace["correct"]),
    ],
)
def test_each_mistake_shows(mistake, sign):
    careless = Carelessness(
        **{name: 0.0 for name in ("wrong_query", "wrong_result", "misreads", "stops_early")} | {mistake: 1.0}
    )
    careful = list(demonstrations(25, seed=2, carelessness=CAREFUL))
    traces = list(demonstrations(25, seed=2, carelessness=careless))
    assert traces != careful and any(map(sign, traces)) and not any(map(sign, careful))


def test_successful_traces_fit_a_tiny_model(traces):
    for trace in traces:
        num_turns = sum(message["role"] == "assistant" for message in trace["messages"])
        assert num_turns <= 7
        # JSON is wordier than any chat template.
        assert len(json.dumps(trace["messages"]) + json.dumps(trace["tools"])) < 3_600


def test_same_seed_same_traces_and_another_seed_others(traces):
    assert list(demonstrations(30, seed=0)) == traces[:25] + list(demonstrations(30, seed=0))[25:]
    assert list(demonstrations(25, seed=1)) != traces[:25]


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_carelessness_is_a_probability(value):
    with pytest.raises(ValueError, match=f"misreads is {value}; expected a probability"):
        Carelessness(misreads=value)
