"""Prompts and tool outputs of a recipe's scripted agent, as tokens of a model, for replays of fixed work.

python -m recipes.demo_model.record_texts --recipe code_agent --out texts.json
"""

from __future__ import annotations

import argparse
import importlib
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from recipes.demo_model.traces import render
from verl_war.compare.fixed_work.texts import FORMAT

CHECKPOINT = Path(__file__).parent / "checkpoint"
MIN_TOOL_OUTPUTS = 2


def record(tokenizer: Any, recipe: str, conversations: int, seed: int) -> list[dict[str, Any]]:
    """So many conversations in which a tool said something at least twice.

    Raises:
        RuntimeError: The recipe's agent has not enough of them.
    """
    demonstrations = importlib.import_module(f"recipes.{recipe}.demonstrations").demonstrations
    found = []
    for trace in demonstrations(4 * conversations, seed):
        sequence = render(tokenizer, trace)
        marked = zip(sequence.is_generated, sequence.token_ids, strict=True)
        prompt, *tools = [
            [token for _, token in run] for generated, run in groupby(marked, lambda pair: pair[0]) if not generated
        ]
        if len(tools) >= MIN_TOOL_OUTPUTS:
            found.append({"prompt": prompt, "tool_outputs": tools})
        if len(found) == conversations:
            return found
    raise RuntimeError(f"{recipe}: {len(found)} conversations with tool outputs found, {conversations} wanted")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--model", default=str(CHECKPOINT), help="directory with the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    conversations = record(tokenizer, options.recipe, options.conversations, options.seed)
    facts = {"format": FORMAT, "recipe": options.recipe, "seed": options.seed}
    options.out.write_text(json.dumps(facts | {"conversations": conversations}) + "\n")


if __name__ == "__main__":
    main()
