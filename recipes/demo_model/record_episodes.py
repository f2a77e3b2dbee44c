"""Record episodes of a recipe, several of each task as GRPO samples them, for replays of fixed work::

    python -m recipes.demo_model.record_episodes --recipe code_agent --out recipes/demo_model/episodes/code_agent.json

The demo policy plays in closed loop with the real tools, see `recipes.demo_model.evaluate`. Kept of an episode are its
prompt, how many tokens it generated in each turn, and what the tools said after it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from recipes.demo_model.evaluate import CHECKPOINT_PATH, RECIPES, play
from recipes.demo_model.policy import BatchingPolicy
from verl_war.compare.fixed_work.episodes import FORMAT

TEMPERATURE = 1.0
"""As in training: it decides how long and how different the samples of a task are."""

TASKS_AT_ONCE = 3
"""A batch lasts as long as its longest turn, and its memory should stay in the processor's cache."""


def turns_of(output: AgentLoopOutput, end_id: int) -> list[dict[str, Any]]:
    """The turns of an episode: how many tokens were generated, then what the tool said; nothing after the last turn.

    The end token `end_id` counts as the beginning of what the tool said: a replay, which forces the length of what is
    generated, keeps it from being sampled, and puts it where it belongs.
    """
    marked = zip(output.response_mask, output.response_ids, strict=True)
    turns: list[dict[str, Any]] = []
    for is_generated, run in groupby(marked, lambda pair: bool(pair[0])):
        token_ids = [token_id for _, token_id in run]
        if is_generated:
            has_end = len(token_ids) > 1 and token_ids[-1] == end_id
            turns.append({"output_tokens": len(token_ids) - has_end, "tool_output": [end_id] * has_end})
        elif turns:
            turns[-1]["tool_output"] += token_ids
    if turns:
        turns[-1]["tool_output"] = []
    return turns


def tasks_of(outputs: Sequence[AgentLoopOutput], samples: int, end_id: int) -> tuple[list[dict[str, Any]], int]:
    """Prompts with their episodes, and how many episodes were left out because nothing was generated in them.

    Args:
        outputs: The episodes, those of a task one after another.
        samples: Episodes of each task.
        end_id: Ends a turn.
    """
    tasks = []
    for first in range(0, len(outputs), samples):
        episodes = [turns for output in outputs[first : first + samples] if (turns := turns_of(output, end_id))]
        if episodes:
            tasks.append({"prompt": list(outputs[first].prompt_ids), "episodes": episodes})
    return tasks, len(outputs) - sum(len(task["episodes"]) for task in tasks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8, help="episodes of each task (8)")
    parser.add_argument("--seed", type=int, default=5, help="of the tasks and of the sampling (5)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_PATH, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_PATH)
    policy = BatchingPolicy(model, tokenizer, temperature=TEMPERATURE, seed=options.seed)
    episodes, _ = play(
        policy, options.recipe, num_tasks=options.tasks, samples=options.samples,
        at_once=TASKS_AT_ONCE * options.samples, seed=options.seed,
    )  # fmt: skip
    tasks, left_out = tasks_of([episode.output for episode in episodes], options.samples, tokenizer.eos_token_id)
    facts = {"format": FORMAT, "recipe": options.recipe, "seed": options.seed, "samples": options.samples}
    facts |= {"temperature": TEMPERATURE}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts | {"tasks": tasks}, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{options.out}: {len(tasks)} tasks, {left_out} episodes without a generated token left out\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
