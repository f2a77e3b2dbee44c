"""The tools under verl: declared in YAML, called through verl's own tool agent loop, never fatal to a trajectory."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
import yaml

from recipes.search_agent.corpus import Document, write_corpus
from recipes.search_agent.demonstrations import TOOLS_YAML, tool_schemas

pytestmark = pytest.mark.upstream


@pytest.fixture
def tools_yaml(tmp_path):
    """Return a function that writes tools.yaml for a small corpus, with changed options."""
    write_corpus(tmp_path / "corpus.jsonl", [Document(doc_id="d1", title="Oakford", text="Oakford is a town.")])

    def write(**options):
        declared = yaml.safe_load(TOOLS_YAML.read_text())
        for tool in declared["tools"]:
            tool["config"] = tool["config"] | {"corpus_path": str(tmp_path / "corpus.jsonl")} | options
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump(declared))
        return str(path)

    return write


def load(path):
    from verl.tools.tool_registry import load_all_tools

    return {tool.name: tool for tool in load_all_tools(path, None)}


def call(tools, name, arguments):
    """Call a tool as verl's loop does with what the model wrote, and return the text for the model."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import FunctionCall

    loop = SimpleNamespace(tools=tools, max_tool_response_length=10_000, tool_response_truncate_side="middle")
    response, reward, _ = asyncio.run(
        ToolAgentLoop._call_tool(loop, FunctionCall(name=name, arguments=arguments), {}, SimpleNamespace())
    )
    assert reward == 0.0
    return response.text


def test_verl_shows_the_model_the_schemas_that_demonstrations_use(tools_yaml):
    tools = load(tools_yaml())
    shown = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools.values()]
    assert json.dumps(shown) == json.dumps(tool_schemas())
    assert len(json.dumps(shown)) < 500, "every prompt of a tiny model carries the schemas"


def test_calls_through_verls_loop(tools_yaml):
    tools = load(tools_yaml())
    assert call(tools, "search", '{"query": "Oakford"}') == "Oakford [d1] Oakford is a town."
    assert call(tools, "open", '{"doc_id": "d1"}') == "Oakford\nOakford is a town."


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search", '{"query": ""}', "Error: search needs a query"),
        ("search", "[1]", "Error: search needs a query"),
        ("search", "null", "Error: search needs a query"),
        ("search", '{"query": "x', "Invalid JSON in arguments"),
        ("open", '{"doc_id": "nope"}', "Error: there is no document 'nope'"),
        ("open", '{"doc_id": {"a": 1}}', "Error: open needs a doc_id"),
        ("close", "{}", "Unknown function 'close'"),
    ],
)
def test_bad_calls_get_a_text(tools_yaml, name, arguments, message):
    assert call(load(tools_yaml()), name, arguments).startswith(message)


def test_call_that_takes_too_long_ends_at_its_deadline(tools_yaml, monkeypatch):
    from recipes.search_agent import tools as module

    monkeypatch.setattr(module.SearchTool, "answer", staticmethod(lambda *arguments: time.sleep(2)))
    tools = load(tools_yaml(timeout_s=0.05))
    start_s = time.monotonic()
    assert call(tools, "search", '{"query": "Oakford"}') == "Error: search took longer than 0.05 s; try again."
    assert time.monotonic() - start_s < 1.8


def test_a_slow_call_does_not_hold_up_the_event_loop(tools_yaml, monkeypatch):
    from recipes.search_agent import tools as module

    monkeypatch.setattr(module.SearchTool, "answer", staticmethod(lambda *arguments: time.sleep(0.3) or "slow"))
    tools = load(tools_yaml())

    async def both():
        slow = asyncio.create_task(tools["search"].execute("1", {"query": "x"}))
        fast = await tools["open"].execute("2", {"doc_id": "d1"})
        assert not slow.done()
        return fast[0].text, (await slow)[0].text

    assert asyncio.run(both()) == ("Oakford\nOakford is a town.", "slow")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus_path": "???"}, "corpus_path is '\\?\\?\\?'; expected the path of a corpus"),
        ({"corpus_path": "/no/such/file"}, "corpus_path is '/no/such/file'; expected a JSONL file"),
        ({"corpus": "x"}, "unknown key 'corpus'"),
        ({"top_k": -3}, "top_k is -3"),
    ],
)
def test_wrong_configuration_stops_the_run_at_its_start(tools_yaml, options, message):
    with pytest.raises(ValueError, match=message):
        load(tools_yaml(**options))


def test_malformed_corpus_stops_the_run_at_its_start(tools_yaml, tmp_path):
    path = tools_yaml()
    (tmp_path / "corpus.jsonl").write_text('{"id": "d1", "title": "Oakford"}\n')
    with pytest.raises(ValueError, match="line 1: field 'text' is missing"):
        load(path)
