"""The demo policy: its tokenizer and chat template, training data, build and committed checkpoint."""

import asyncio
import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

from recipes.code_agent.demonstrations import demonstrations as code_demonstrations
from recipes.demo_model.build import BuildConfig, Progress, build, save
from recipes.demo_model.copying import copy_exercises
from recipes.demo_model.evaluate import CHECKPOINT_PATH, RECIPES, evaluate, is_valid_call, loop_config
from recipes.demo_model.tokenizer import MARKUP_TOKENS, TURN_END, TURN_START, train_tokenizer
from recipes.demo_model.traces import IGNORED, TokenSequence, batches, collate, render
from recipes.demo_model.training import ModelSize, Schedule, new_model
from recipes.search_agent.demonstrations import demonstrations as search_demonstrations
from scripts.build_demo_model import main as build_main

pytestmark = pytest.mark.upstream

MAX_SHIPPED_BYTES = 5_000_000
DEMONSTRATIONS = {"code_agent": code_demonstrations, "search_agent": search_demonstrations}
TINY = BuildConfig(
    num_traces=12,
    num_held_out=2,
    size=ModelSize(hidden_size=64, head_dim=32, num_layers=3, intermediate_size=64),
    schedule=Schedule(num_steps=4, num_copy_steps=2, tokens_per_batch=2048),
)


@pytest.fixture(scope="module")
def tokenizer():
    return hf_tokenizer(str(CHECKPOINT_PATH))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT_PATH, dtype=torch.float32)


class _Recorded:
    """Answers like verl's LLM client and tools with what a demonstration holds."""

    def __init__(self, turns, results):
        self.turns, self.results = iter(turns), iter(results)

    async def generate(self, **_kwargs):
        return TokenOutput(token_ids=next(self.turns))


class _RecordedLoop(ToolAgentLoop):
    """verl's loop whose tools return recorded results; ``calls`` are the calls that verl understood."""

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        self.calls.append((tool_call.name, json.loads(tool_call.arguments)))
        return ToolResponse(text=next(self.server_manager.results)), 0.0, {}


def _generated_turns(sequence):
    for flag, pairs in itertools.groupby(
        zip(sequence.token_ids, sequence.is_generated, strict=True), lambda pair: pair[1]
    ):
        if flag:
            yield [token_id for token_id, _ in pairs]


async def _replay(tokenizer, trace):
    """Return what verl's loop makes of a demonstration, and the calls."""
    messages = trace["messages"]
    turns = list(_generated_turns(render(tokenizer, trace)))
    results = [message["content"] for message in messages if message["role"] == "tool"]
    tools = [BaseTool({}, OpenAIFunctionToolSchema.model_validate(schema)) for schema in trace["tools"]]
    config = loop_config(prompt_tokens=4096, response_tokens=4096, assistant_turns=50, tool_response_chars=10_000)
    loop = _RecordedLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=_Recorded(turns, results),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(OmegaConf.create({})),
        hf_model_type=AutoConfig.from_pretrained(CHECKPOINT_PATH).model_type,
        tools=ToolListWrap(tools),
    )
    loop.calls = []
    start = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return await loop.run({}, raw_prompt=messages[:start]), loop.calls


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_sequences_are_what_verl_builds(tokenizer, recipe):
    num_turns = []
    for trace in DEMONSTRATIONS[recipe](12, seed=5):
        sequence = render(tokenizer, trace)
        output, calls = asyncio.run(_replay(tokenizer, trace))
        num_prompt = len(output.prompt_ids)
        assert output.prompt_ids + output.response_ids == sequence.token_ids
        assert [bool(flag) for flag in output.response_mask] == sequence.is_generated[num_prompt:]
        assert not any(sequence.is_generated[:num_prompt])
        expected = [call["function"] for message in trace["messages"] for call in message.get("tool_calls", [])]
        assert calls == [(function["name"], function["arguments"]) for function in expected]
        num_turns.append(output.num_turns)
    assert max(num_turns) > 5


def test_every_generated_turn_ends_with_the_end_of_the_turn(tokenizer):
    trace = next(code_demonstrations(1, seed=5))
    turns = list(_generated_turns(render(tokenizer, trace)))
    assert len(turns) == sum(message["role"] == "assistant" for message in trace["messages"])
    assert all(turn[-1] == tokenizer.eos_token_id and turn.count(tokenizer.eos_token_id) == 1 for turn in turns)


def test_template_groups_tool_results_and_separates_several_calls(tokenizer):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"n": n}}} for n in (1, 2)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": "Both.", "tool_calls": calls},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\ngo<|im_end|>\n"
        '<|im_start|>assistant\nBoth.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"n": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    ["", "\n\n\n  x", "Ünïcødé 日本 🙂", 'a "quoted\\n" \\ {"b": ["c"]}', "\tdef f(x):\r\n    return x[-1]", " " * 40],
)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_markup_is_one_token_each_and_survives_the_tool_parser(tokenizer):
    for token in (TURN_START, TURN_END, *MARKUP_TOKENS):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    ids = tokenizer.encode("".join(MARKUP_TOKENS), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKUP_TOKENS)
    assert tokenizer.encode("\n\n", add_special_tokens=False) == 2 * tokenizer.encode("\n", add_special_tokens=False)


def test_quoted_code_has_the_tokens_of_the_file(tokenizer):
    line = "return [a + b for a, b in zip(left, right)]"
    in_file = tokenizer.encode(f"\n{line}\n", add_special_tokens=False)[1:-1]
    in_call = tokenizer.encode(json.dumps({"search": line, "replace": "x"}), add_special_tokens=False)
    assert any(in_call[i : i + len(in_file)] == in_file for i in range(len(in_call)))


def test_tokenizer_refuses_a_vocabulary_below_its_bytes():
    with pytest.raises(ValueError, match="vocab_size is 100, expected at least 263"):
        train_tokenizer(["a"], vocab_size=100, max_context_tokens=10)


def test_labels_are_the_next_tokens_that_the_model_wrote():
    first = TokenSequence(token_ids=[5, 6, 7, 8], is_generated=[False, True, True, False])
    second = TokenSequence(token_ids=[9, 4], is_generated=[False, True])
    batch = collate([first, second], pad_id=0)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, IGNORED, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    assert batch.context_labels.tolist() == [[IGNORED, IGNORED, 8, IGNORED], [IGNORED] * 4]


def test_batches_stay_below_their_size_and_use_every_sequence_once_per_pass():
    sequences = [TokenSequence(token_ids=[n] * (3 + n), is_generated=[True] * (3 + n)) for n in range(20)]
    seen = []
    for batch in batches(sequences, tokens_per_batch=40, pad_id=99, seed=1):
        assert batch.token_ids.numel() <= 40
        seen += [row[0].item() for row in batch.token_ids]
        if len(seen) >= len(sequences):
            break
    assert sorted(seen) == list(range(20))


def test_copy_exercises_label_only_what_came_before():
    batch = next(copy_exercises(vocab_size=10_000, tokens_per_batch=512, seed=0))
    assert batch.token_ids.shape == (4, 128)
    rows, columns = (batch.labels != IGNORED).nonzero(as_tuple=True)
    assert len(rows) > 100
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        ids = batch.token_ids[row].tolist()
        assert batch.labels[row, column] == ids[column + 1]
        pairs = list(itertools.pairwise(ids[: column + 1]))
        assert (ids[column], ids[column + 1]) in pairs


def test_untrained_model_already_prefers_the_right_copy(tokenizer):
    """A model without the wiring gives a repeated token no better odds than any other."""
    batch = next(copy_exercises(vocab_size=len(tokenizer), tokens_per_batch=2048, seed=0))
    chosen = batch.labels != IGNORED
    with torch.no_grad():
        logits = new_model(tokenizer, ModelSize(), seed=0)(input_ids=batch.token_ids).logits[chosen]
    is_worse = logits < logits.gather(1, batch.labels[chosen][:, None])
    assert is_worse.float().mean() > 0.8


@pytest.mark.parametrize(
    ("turn", "valid"),
    [
        ('<tool_call>\n{"name": "open", "arguments": {"doc_id": "d1"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "open", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "shut", "arguments": {"doc_id": "d1"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "open", "arguments": "d1"}\n</tool_call>', False),
        ('<tool_call>\n{"name": "open", "arguments": {"doc_id": "d1"}\n</tool_call>', False),
        ("<tool_call>\n[1]\n</tool_call>", False),
    ],
)
def test_tool_call_validity(turn, valid):
    assert is_valid_call(turn, {"open": ["doc_id"]}) is valid


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelSize(hidden_size=100), "hidden_size is 100, expected a multiple of head_dim 64"),
        (lambda: ModelSize(num_layers=0), "num_layers is 0, expected at least 1"),
        (lambda: Schedule(num_steps=0), "num_steps is 0, expected more than 0"),
        (lambda: Schedule(context_fraction=2), "context_fraction is 2, expected 0 to 1"),
        (lambda: BuildConfig(num_traces=100), "num_traces is 100, expected more than num_held_out 100"),
    ],
)
def test_configuration_errors_name_the_value_and_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_build_is_reproducible_and_its_checkpoint_loads(tmp_path):
    results = [build(TINY, Progress()) for _ in range(2)]
    weights = [result.model.state_dict() for result in results]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    save(results[0], TINY, "a command", tmp_path)
    record = json.loads((tmp_path / "BUILD.json").read_text())
    assert record["command"] == "a command" and record["metrics"]["traces_trained_on"] == 20
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    # transformers swaps the tokenizer of some model types for its own, which cuts this text in other places.
    text = '<|im_start|>user\n{"name": "open", "arguments": {"x": "return [a + b]"}}<|im_end|>'
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == results[0].tokenizer.encode(text)


def test_script_refuses_bad_options_without_touching_the_output(tmp_path, caplog):
    assert build_main(["--out", str(tmp_path / "out"), "--steps", "0"]) == 1
    assert "num_steps is 0" in caplog.text
    assert not (tmp_path / "out").exists()


LEAST_VALIDITY = {"code_agent": 0.95, "search_agent": 0.8}
"""Names in search_agent's calls are the hardest to copy; a call that is broken off there has no valid JSON."""

LEAST_SOLVE_RATE = {"code_agent": 0.15, "search_agent": 0.05}
"""RL needs groups with successes and failures: at 5%, a third of the groups of 8 has a success."""


def test_checkpoint_is_small_and_says_where_it_comes_from():
    files = [path for path in Path(CHECKPOINT_PATH).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_SHIPPED_BYTES
    record = json.loads((CHECKPOINT_PATH / "BUILD.json").read_text())
    assert {"command", "seed", "versions", "metrics", "episodes"} <= record.keys()
    assert record["size"] == dataclasses.asdict(ModelSize())
    for recipe in RECIPES:
        episodes = record["episodes"][recipe]
        assert episodes["tool_call_validity"] > LEAST_VALIDITY[recipe]
        assert episodes["assistant_turns"] > 3
        assert LEAST_SOLVE_RATE[recipe] <= episodes["solve_rate"] <= 0.6


def test_checkpoint_fits_its_tokenizer_and_ends_turns(model, tokenizer):
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 4096
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_checkpoint_loads_as_a_critic():
    critic = AutoModelForTokenClassification.from_pretrained(CHECKPOINT_PATH, num_labels=1, attn_implementation="sdpa")
    assert critic(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)


def test_policy_really_uses_the_tools(model, tokenizer):
    report = evaluate(model, tokenizer, "search_agent", num_episodes=8, seed=3)
    # Which episode samples next depends on time, so the seed does not fix the report: 3 standard errors below 82% of
    # 35 calls.
    assert report.tool_call_validity > 0.6
    assert report.assistant_turns > 2.5
    assert 0 < report.token_entropy < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "chess"}, "recipe is 'chess', expected one of code_agent, search_agent"),
        ({"num_episodes": 0}, "num_episodes is 0"),
        ({"temperature": 0.0}, "temperature is 0.0, expected more than 0"),
    ],
)
def test_evaluate_refuses_bad_arguments(model, tokenizer, changes, message):
    arguments = {"recipe": "search_agent", "num_episodes": 1, "seed": 0} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate(model, tokenizer, **arguments)


@pytest.mark.e2e
def test_vllm_serves_the_checkpoint(tokenizer, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    trace = next(code_demonstrations(1, seed=5))
    prompt = tokenizer.apply_chat_template(
        trace["messages"][:2], tools=trace["tools"], add_generation_prompt=True, return_dict=True
    )
    llm = LLM(str(CHECKPOINT_PATH), dtype="float32", max_model_len=2048, enforce_eager=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt["input_ids"]}] * 8, SamplingParams(temperature=1.0, max_tokens=128, seed=1)
    )
    turns = [tokenizer.decode(output.outputs[0].token_ids) for output in outputs]
    required = {tool["function"]["name"]: tool["function"]["parameters"].get("required", []) for tool in trace["tools"]}
    assert sum(is_valid_call(turn, required) for turn in turns) >= 6
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
