"""The trajectories of a fixed-work comparison: recorded episodes of a recipe, or a trace."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import fmean

from verl_war.compare.fixed_work.episodes import Episode, Task, group_name
from verl_war.compare.fixed_work.texts import common_prefix
from verl_war.sim.trace import TrajectorySpec, TurnSpec, read_trace

TOOL_S_MEAN, TOOL_S_SIGMA = 0.4, 1.0
"""Of the lognormal seconds that a tool takes: about as long as the demo model generates a turn on two cores."""

START_SPREAD_S = 0.5
"""Trajectories start within so many seconds: sandboxes do not all come up at once."""

MOST_LOAD = 10_000
"""Trajectories per replica: hours of a run with the demo model; all of a step's are in memory before it begins."""

LOW_LOAD = 2
"""Trajectories per replica: the tail of a step."""

KV_SHARES = {"middle": 0.8, "high": 2.0}
"""Load by name -> contexts of all trajectories over the KV, as they are on average."""

SWEEP_FIRST = (1, 2, 4)
SWEEP_SHARES = (0.5, 0.8, 1.2, 2.0, 3.0)
"""`sweep`: few trajectories, where drafts count, then on through the KV's capacity."""


def mean_context_tokens(tasks: Sequence[Task]) -> float:
    """Context of a recorded trajectory, mean over the trajectories of their turns' mean."""
    episodes = sum(len(task.episodes) for task in tasks)
    return fmean(fmean(contexts(spec)) for spec in recorded(tasks, episodes, seed=0))


def contexts(spec: TrajectorySpec) -> list[int]:
    """Prompt tokens of each turn."""
    lengths = [spec.prompt_tokens]
    for turn in spec.turns[:-1]:
        lengths.append(lengths[-1] + turn.output_tokens + turn.tool_tokens)
    return lengths


def parse_loads(text: str, kv_tokens: int, context_tokens: float) -> tuple[int, ...]:
    """Trajectories per replica for each word of `--load`.

    Args:
        text: The option.
        kv_tokens: KV of a replica.
        context_tokens: Mean context of a trajectory, for the loads by name.

    Raises:
        ValueError: A word is neither a load by name nor a whole number from 1 on, or a load is too high.
    """

    def filling(kv_share: float) -> int:
        return max(1, round(kv_share * kv_tokens / context_tokens))

    loads: list[int] = []
    for word in text.split(","):
        if word == "sweep":
            loads += [*SWEEP_FIRST, *(filling(share) for share in SWEEP_SHARES)]
        elif word == "low":
            loads.append(LOW_LOAD)
        elif word in KV_SHARES:
            loads.append(filling(KV_SHARES[word]))
        elif word.isdecimal() and int(word) > 0:
            loads.append(int(word))
        else:
            raise ValueError(
                f"--load: {word!r} is neither low, middle, high, sweep nor a number of trajectories per replica from "
                f"1 on; expected for instance sweep or 4,16"
            )
    if max(loads) > MOST_LOAD:
        raise ValueError(
            f"--load={text} is {max(loads)} trajectories per replica (--kv-tokens={kv_tokens}); it must be at most "
            f"{MOST_LOAD}"
        )
    return tuple(sorted(set(loads)))


def recorded(tasks: Sequence[Task], trajectories: int, seed: int) -> tuple[TrajectorySpec, ...]:
    """A step of so many trajectories, siblings one after another as verl repeats its prompts.

    Tasks come in an order of the seed, each once before any comes again. The last group is smaller when the number
    ends within it. Starts and the seconds of tools are drawn.
    """
    return tuple(islice(_endless(tasks, random.Random(seed)), trajectories))


def _endless(tasks: Sequence[Task], rng: random.Random) -> Iterator[TrajectorySpec]:
    system_tokens = len(common_prefix([task.prompt for task in tasks]))
    for round_number in count(1):
        for number in rng.sample(range(len(tasks)), len(tasks)):
            group, task = group_name(number, round_number), tasks[number]
            for sample, episode in enumerate(task.episodes):
                yield TrajectorySpec(
                    trajectory_id=f"{group}-{sample}",
                    group_id=group,
                    system_tokens=system_tokens,
                    prompt_tokens=len(task.prompt),
                    start_s=round(rng.uniform(0.0, START_SPREAD_S), 4),
                    turns=_turns(episode, rng),
                )


def _turns(episode: Episode, rng: random.Random) -> tuple[TurnSpec, ...]:
    mu = math.log(TOOL_S_MEAN) - TOOL_S_SIGMA**2 / 2
    *called, last = episode
    turns = [
        TurnSpec(turn.output_tokens, round(rng.lognormvariate(mu, TOOL_S_SIGMA), 4), len(turn.tool_output))
        for turn in called
    ]
    return (*turns, TurnSpec(last.output_tokens))


def from_trace(path: Path) -> tuple[TrajectorySpec, ...]:
    """The trajectories of a file.

    Raises:
        ValueError: It cannot be read, or a line is damaged.
    """
    return read_trace(path)


def scaled(specs: Sequence[TrajectorySpec], clock_scale: float) -> tuple[TrajectorySpec, ...]:
    """The same work with tools and starts that take `clock_scale` times as long."""

    def scale(spec: TrajectorySpec) -> TrajectorySpec:
        turns = tuple(dataclasses.replace(turn, tool_s=turn.tool_s * clock_scale) for turn in spec.turns)
        return dataclasses.replace(spec, start_s=spec.start_s * clock_scale, turns=turns)

    return tuple(map(scale, specs))


def check_fits(specs: Sequence[TrajectorySpec], kv_tokens: int) -> None:
    """Every trajectory fits in a replica's KV alone.

    Raises:
        ValueError: One does not: no router could serve it.
    """
    longest = max(specs, key=lambda spec: spec.final_tokens)
    if longest.final_tokens > kv_tokens:
        raise ValueError(
            f"trajectory {longest.trajectory_id} grows to {longest.final_tokens} tokens and a replica has KV for "
            f"--kv-tokens={kv_tokens}; raise it or leave the trajectory out"
        )
