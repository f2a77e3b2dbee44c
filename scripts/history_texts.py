"""Trajectories to measure draft indices with: sampled from the demo policy, or made up in any amount."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode. `is_generated[i]`: the model wrote `tokens[i]`; the others are prompt and tool outputs."""

    group: int
    step: int
    tokens: np.ndarray
    is_generated: np.ndarray

    def turns(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of every generated stretch."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.is_generated.astype(np.int8), [0]])))
        yield from ((int(begin), int(end)) for begin, end in edges.reshape(-1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Trajectories in the order of their steps, and the policy that they come from."""

    trajectories: list[Trajectory]
    entropy_nats: float
    temperature: float
    vocab_size: int


def from_demo_policy(*, tasks: int, steps: int, temperature: float, seed: int) -> Sample:
    """Groups of 8 episodes of each task of both recipes, with the real tools; every step repeats the same tasks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.tools.tool_registry import load_all_tools

    from recipes.demo_model import evaluate as demo
    from recipes.demo_model.policy import BatchingPolicy

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo.CHECKPOINT_PATH, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo.CHECKPOINT_PATH)
    policy = BatchingPolicy(model, tokenizer, temperature=temperature, seed=seed)
    trajectories = []
    for number, recipe in enumerate(demo.RECIPES):
        with tempfile.TemporaryDirectory() as directory:
            rows, tools_path = demo._tasks(recipe, tasks, seed, Path(directory))
            with contextlib.redirect_stdout(sys.stderr):
                tools = load_all_tools(str(tools_path), None)
            for step in range(steps):
                repeated = [dict(row) for row in rows for _ in range(GROUP_SIZE)]
                episodes = asyncio.run(demo._play_all(policy, recipe, repeated, tools, demo.EpisodeLimits()))
                for index, episode in enumerate(episodes):
                    output = episode.output
                    mask = [0] * len(output.prompt_ids) + list(output.response_mask)
                    trajectories.append(
                        Trajectory(
                            group=number * tasks + index // GROUP_SIZE,
                            step=step,
                            tokens=np.array([*output.prompt_ids, *output.response_ids], np.int32),
                            is_generated=np.array(mask, bool),
                        )
                    )
    trajectories.sort(key=lambda trajectory: trajectory.step)
    return Sample(
        trajectories=trajectories,
        entropy_nats=policy.mean_entropy(),
        temperature=temperature,
        vocab_size=model.config.vocab_size,
    )


def made_up(*, tokens: int, seed: int, vocab_size: int = 150_000) -> list[Trajectory]:
    """Groups of 8 over 4 steps: turns that quote the prompt, the tool outputs and each other, with fresh text between.

    About 60% of the generated tokens continue something that was there before; the rest is Zipf-distributed.
    """
    rng, words = random.Random(seed), np.random.default_rng(seed)
    out: list[Trajectory] = []
    total, group = 0, 0
    while total < tokens:
        prompt = _words(words, 400, vocab_size)
        shared = [_words(words, 200, vocab_size) for _ in range(6)]  # what every attempt at this task comes to say
        for step in range(4):
            for _ in range(GROUP_SIZE):
                trajectory = _attempt(rng, words, group, step, prompt, shared, vocab_size)
                out.append(trajectory)
                total += len(trajectory.tokens)
        group += 1
    out.sort(key=lambda trajectory: trajectory.step)
    return out


def _attempt(
    rng: random.Random,
    words: np.random.Generator,
    group: int,
    step: int,
    prompt: np.ndarray,
    shared: list[np.ndarray],
    vocab_size: int,
) -> Trajectory:
    pieces, generated = [prompt], [np.zeros(len(prompt), bool)]
    for _ in range(rng.randint(3, 6)):
        turn = []
        for _ in range(rng.randint(4, 8)):
            source = rng.choice([*shared, prompt, pieces[-1]])
            begin = rng.randrange(max(1, len(source) - 20))
            turn.append(source[begin : begin + rng.randint(10, 60)])
            turn.append(_words(words, rng.randint(1, 30), vocab_size))
        for piece, mine in ((np.concatenate(turn), True), (_words(words, rng.randint(30, 150), vocab_size), False)):
            pieces.append(piece)
            generated.append(np.full(len(piece), mine))
    return Trajectory(group=group, step=step, tokens=np.concatenate(pieces), is_generated=np.concatenate(generated))


def _words(words: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    return (words.zipf(1.2, count) % vocab_size).astype(np.int32)
