"""Recorded episodes of a recipe: groups of samples of the same task, which the demo policy played with the real tools.

`recipes.demo_model.record_episodes` writes the file:

    {"format": 3, "recipe": "code_agent", "seed": 5, "samples": 8, "temperature": 1.0,
     "tasks": [{"prompt": [7, 8], "episodes": [[{"output_tokens": 21, "tool_output": [9]}, ...], ...]}, ...]}

An episode is its turns; after the last one no tool says anything. The token that ends a turn is the first of
`tool_output`, not one of `output_tokens`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 3
"""Of the file. 1 held conversations without lengths of turns, 2 counted the end of a turn as generated."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How many tokens were generated, and the tokens that the tool then said."""

    output_tokens: int
    tool_output: list[int]


Episode = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the episodes that were sampled for it."""

    prompt: list[int]
    episodes: tuple[Episode, ...]


def group_name(task: int, round_number: int) -> str:
    """Of the samples of a task in a step: `task17`, or `task17r2` when all tasks were used once before."""
    return f"task{task}" if round_number == 1 else f"task{task}r{round_number}"


def find_episode(tasks: Sequence[Task], trajectory_id: str) -> tuple[Task, Episode]:
    """The recorded episode behind a trajectory's name: group and number of the sample, as in `task17r2-3`."""
    found = re.fullmatch(r"task(\d+)(?:r\d+)?-(\d+)", trajectory_id)
    assert found, f"{trajectory_id!r} names no recorded episode"
    task = tasks[int(found[1])]
    return task, task.episodes[int(found[2])]


def read_episodes(path: Path) -> tuple[Task, ...]:
    """Read a file of recorded episodes.

    Raises:
        ValueError: It is missing, damaged or of another format.
    """
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}, expected {FORMAT}")
        tasks = tuple(_task(item) for item in raw["tasks"])
        if not tasks:
            raise ValueError("no task")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"recorded episodes {path}: cannot be used ({error!r}); get the file back with git, or record it anew: "
            f"python -m recipes.demo_model.record_episodes --recipe {path.stem} --out {path}"
        ) from error
    return tasks


def _task(raw: dict[str, Any]) -> Task:
    task = Task(_tokens(raw["prompt"]), tuple(tuple(map(_turn, episode)) for episode in raw["episodes"]))
    if not task.prompt or not task.episodes or not all(task.episodes):
        raise ValueError("a task without prompt, episodes or turns")
    if any(episode[-1].tool_output for episode in task.episodes):
        raise ValueError("an episode that does not end with a generated turn")
    return task


def _turn(raw: dict[str, Any]) -> Turn:
    output_tokens = raw["output_tokens"]
    if type(output_tokens) is not int or output_tokens < 1:
        raise ValueError(f"output_tokens={output_tokens!r}, expected an integer from 1 on")
    return Turn(output_tokens, _tokens(raw["tool_output"]))


def _tokens(raw: Any) -> list[int]:
    if type(raw) is not list or not all(type(token) is int for token in raw):
        raise ValueError(f"{raw!r:.40}, expected a list of tokens")
    return raw
