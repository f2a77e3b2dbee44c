"""Trajectories to measure draft indices with: of the scripted coding agents, or made up in any amount."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DEMO_MODEL_PATH = Path(__file__).parents[1] / "recipes" / "demo_model" / "checkpoint"
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


def from_scripted_agents(*, tasks: int, steps: int, replaced: float, seed: int) -> list[Trajectory]:
    """Groups of 8 attempts at generated coding tasks, with the real tools; every step repeats the same tasks.

    These are the agents that the demo policy learned from; it predicts their unseen text with 0.09 nats per token.

    Args:
        tasks: Groups.
        steps: Policy steps; nothing but chance tells them apart.
        replaced: Share of the generated tokens replaced at random, as a policy of higher entropy would.
        seed: Of everything.
    """
    from transformers import AutoTokenizer

    from recipes.code_agent.demonstrations import Noise, _ScriptedAgent, tool_schemas
    from recipes.code_agent.generate import generate
    from recipes.code_agent.testing import InProcessTests
    from recipes.code_agent.workspace import Workspace
    from recipes.demo_model.traces import render

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    words = np.random.default_rng(seed)
    out = []
    for step in range(steps):
        for task in range(tasks):
            generated = generate(-1 - seed, task)
            for attempt in range(GROUP_SIZE):
                rng = random.Random(f"history/{seed}/{task}/{step}/{attempt}")
                with Workspace(generated.task, InProcessTests()) as workspace:
                    agent = _ScriptedAgent(generated, workspace, rng, Noise())
                    agent.play()
                sequence = render(tokenizer, {"messages": agent.messages, "tools": tool_schemas()})
                tokens, mask = np.array(sequence.token_ids, np.int32), np.array(sequence.is_generated, bool)
                changed = mask & (words.random(len(tokens)) < replaced)
                tokens[changed] = words.permutation(tokens[mask])[: changed.sum()]
                out.append(Trajectory(group=task, step=step, tokens=tokens, is_generated=mask))
    return out


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
