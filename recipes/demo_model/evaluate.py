"""Play episodes of a recipe with a policy in closed loop: verl's own agent loop, the real tools and the real reward.

Only the inference engine differs from a training run: transformers instead of vLLM, so no server has to start::

    python -m recipes.demo_model.evaluate --recipe code_agent --episodes 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipes.code_agent import generate as code_tasks
from recipes.code_agent.actions import TOOLS_PATH as CODE_TOOLS_PATH
from recipes.code_agent.agent_loop import CodeAgentLoop
from recipes.code_agent.tasks import prompt_messages as code_prompt
from recipes.demo_model.policy import BatchingPolicy
from recipes.search_agent import generate as search_tasks
from recipes.search_agent.corpus import write_corpus
from recipes.search_agent.demonstrations import TOOLS_YAML as SEARCH_TOOLS_PATH
from recipes.search_agent.prompt import prompt_messages as search_prompt
from recipes.search_agent.reward import compute_score as search_score

logger = logging.getLogger(__name__)

CHECKPOINT_PATH = Path(__file__).with_name("checkpoint")
RECIPES = ("code_agent", "search_agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of an episode; the defaults are those of the code agent's ``cpu`` configuration."""

    prompt_tokens: int = 768
    response_tokens: int = 1280
    assistant_turns: int = 10
    tool_response_chars: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the episodes were like; means are over episodes unless said otherwise."""

    recipe: str
    episodes: int
    solve_rate: float
    mean_reward: float
    assistant_turns: float
    trajectory_tokens: float
    """Prompt and response."""
    generated_tokens: float
    token_entropy: float
    """Mean over generated tokens of the policy's entropy, nats."""
    tool_call_validity: float
    """Fraction of the turns with a tool call whose call is JSON, names a tool and has its required arguments."""
    cut_off: float
    """Fraction of episodes that ended at a limit instead of with an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What the agent loop made of a task, and what it was worth."""

    output: AgentLoopOutput
    reward: float


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: str,
    *,
    num_episodes: int,
    seed: int,
    temperature: float = 1.0,
    limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008 - immutable
) -> Report:
    """Play one episode for each of ``num_episodes`` generated tasks and summarise them.

    Args:
        model: the policy.
        tokenizer: its tokenizer with the chat template.
        recipe: one of ``RECIPES``.
        num_episodes: all of them are played at the same time.
        seed: of the tasks and of the sampling.
        temperature: above 0.
        limits: when an episode is cut off.

    Raises:
        ValueError: the recipe is unknown or a number is out of range.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}, expected at least 1")
    policy = BatchingPolicy(model, tokenizer, temperature=temperature, seed=seed)
    episodes, tools = play(policy, recipe, num_tasks=num_episodes, seed=seed, limits=limits)
    required = {tool.name: tool.tool_schema.function.parameters.required for tool in tools}
    return _summarise(recipe, episodes, policy, tokenizer, required, limits)


def play(
    policy: BatchingPolicy,
    recipe: str,
    *,
    num_tasks: int,
    samples: int = 1,
    at_once: int | None = None,
    seed: int,
    limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008 - immutable
) -> tuple[list[Episode], list[Any]]:
    """Play every generated task ``samples`` times.

    Args:
        policy: who plays.
        recipe: one of ``RECIPES``.
        num_tasks: how many are generated.
        samples: episodes of each task; they follow one another in the result.
        at_once: how many episodes are played at the same time; all by default.
        seed: of the tasks.
        limits: when an episode is cut off.

    Returns:
        The episodes and the recipe's tools.

    Raises:
        ValueError: the recipe is unknown.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}, expected one of {', '.join(RECIPES)}")
    with tempfile.TemporaryDirectory() as directory:
        tasks, tools_path = _tasks(recipe, num_tasks, seed, Path(directory))
        with contextlib.redirect_stdout(sys.stderr):  # verl prints every tool that it loads
            tools = load_all_tools(str(tools_path), None)
        rows = [row for row in tasks for _ in range(samples)]
        return asyncio.run(_play_all(policy, recipe, rows, tools, limits, at_once or len(rows))), tools


def _tasks(recipe: str, count: int, seed: int, directory: Path) -> tuple[list[dict[str, Any]], Path]:
    """Return dataset rows and the tool declaration."""
    if recipe == "code_agent":
        tasks = [generated.task for generated in code_tasks.generate_many(count, seed)]
        rows = [{"raw_prompt": code_prompt(task), "extra_info": {"task": task.to_json()}} for task in tasks]
        return rows, CODE_TOOLS_PATH
    documents, questions = search_tasks.generate(search_tasks.SIZES["demo"], count, (2,), seed)
    write_corpus(directory / "corpus.jsonl", documents)
    declared = OmegaConf.load(SEARCH_TOOLS_PATH)
    for tool in declared.tools:
        tool.config.corpus_path = str(directory / "corpus.jsonl")
    OmegaConf.save(declared, directory / "tools.yaml")
    rows = [{"raw_prompt": search_prompt(question.text), "answer": question.answer} for question in questions]
    return rows, directory / "tools.yaml"


async def _play_all(
    policy: BatchingPolicy,
    recipe: str,
    rows: list[dict[str, Any]],
    tools: list[Any],
    limits: EpisodeLimits,
    at_once: int,
) -> list[Episode]:
    config = loop_config(**asdict(limits))
    kind = CodeAgentLoop if recipe == "code_agent" else ToolAgentLoop
    loops = [
        kind(
            trainer_config=DictConfigWrap(config),
            server_manager=policy,
            tokenizer=policy.tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type=policy.model.config.model_type,
            tools=ToolListWrap(tools),
        )
        for _ in rows
    ]
    pairs = list(zip(loops, rows, strict=True))
    episodes: list[Episode] = []
    for first in range(0, len(pairs), at_once):
        batch = pairs[first : first + at_once]
        async with policy.serving(len(batch)):
            episodes += await asyncio.gather(*(_play(policy, *pair) for pair in batch))
        logger.info("%d of %d episodes played", len(episodes), len(pairs))
    return episodes


async def _play(policy: BatchingPolicy, loop: ToolAgentLoop, row: dict[str, Any]) -> Episode:
    try:
        output = await loop.run({"temperature": policy.temperature}, **row)
    finally:
        policy.leave()
    if output.reward_score is not None:
        return Episode(output=output, reward=output.reward_score)
    text = policy.tokenizer.decode(output.response_ids, skip_special_tokens=True)
    return Episode(output=output, reward=search_score("search_agent", text, row["answer"])["score"])


def loop_config(
    *, prompt_tokens: int, response_tokens: int, assistant_turns: int, tool_response_chars: int
) -> DictConfig:
    """Return the keys of verl's configuration that an agent loop reads."""
    multi_turn = {
        "format": "hermes",
        "max_user_turns": None,
        "max_assistant_turns": assistant_turns,
        "max_parallel_calls": 1,
        "max_tool_response_length": tool_response_chars,
        "tool_response_truncate_side": "middle",
    }
    rollout = {
        "prompt_length": prompt_tokens,
        "response_length": response_tokens,
        "full_determinism": False,
        "multi_turn": multi_turn,
    }
    return OmegaConf.create({"data": {}, "actor_rollout_ref": {"rollout": rollout}})


def _summarise(
    recipe: str,
    episodes: list[Episode],
    policy: BatchingPolicy,
    tokenizer: PreTrainedTokenizerBase,
    required: dict[str, list[str]],
    limits: EpisodeLimits,
) -> Report:
    turns = [list(_assistant_turns(episode.output, tokenizer)) for episode in episodes]
    calls = [turn for episode_turns in turns for turn in episode_turns if "<tool_call>" in turn]
    outputs = [episode.output for episode in episodes]
    cut_off = [
        "<tool_call>" in episode_turns[-1] or len(output.response_ids) >= limits.response_tokens
        for episode_turns, output in zip(turns, outputs, strict=True)
    ]
    return Report(
        recipe=recipe,
        episodes=len(episodes),
        solve_rate=statistics.mean(episode.reward >= 1.0 for episode in episodes),
        mean_reward=statistics.mean(episode.reward for episode in episodes),
        assistant_turns=statistics.mean(map(len, turns)),
        trajectory_tokens=statistics.mean(len(output.prompt_ids) + len(output.response_ids) for output in outputs),
        generated_tokens=statistics.mean(sum(output.response_mask) for output in outputs),
        token_entropy=policy.mean_entropy(),
        tool_call_validity=statistics.mean(is_valid_call(call, required) for call in calls) if calls else 0.0,
        cut_off=statistics.mean(cut_off),
    )


def _assistant_turns(output: AgentLoopOutput, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    turns: list[list[int]] = []
    previous = 0
    for token_id, flag in zip(output.response_ids, output.response_mask, strict=True):
        if flag and not previous:
            turns.append([])
        if flag:
            turns[-1].append(token_id)
        previous = flag
    return [tokenizer.decode(turn) for turn in turns]


def is_valid_call(turn: str, required: dict[str, list[str]]) -> bool:
    """Tell whether a turn's tool call is well formed.

    Args:
        turn: decoded text of an assistant turn that has a ``<tool_call>``.
        required: for each tool the names of its required arguments.
    """
    text = turn.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(call, dict) or call.get("name") not in required or not isinstance(call.get("arguments"), dict):
        return False
    return set(required[call["name"]]) <= call["arguments"].keys()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="evaluate", description="Play episodes of the recipes with a policy.")
    parser.add_argument("--model", type=Path, default=CHECKPOINT_PATH, help="checkpoint directory")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for recipe in options.recipe or RECIPES:
        report = evaluate(
            model,
            tokenizer,
            recipe,
            num_episodes=options.episodes,
            seed=options.seed,
            temperature=options.temperature,
        )
        sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
