"""The trajectories of a fixed-work comparison: generated for a machine of two cores, or a trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from verl_war.sim.trace import TrajectorySpec, read_trace
from verl_war.sim.workload import WorkloadShape, generate

SHAPE = WorkloadShape(
    system_tokens=160, task_tokens=(64, 320), turns_mean=8.0, output_mean=32.0, tool_tokens_mean=64.0,
    tool_s_mean=0.4, max_context_tokens=2048, start_spread_s=0.5, max_turns=20,
)  # fmt: skip
"""A step that two cores serve in half a minute: the recipes' prompts and tool outputs, turns that the demo model
generates in about a second, tools that take about as long."""

LOW_LOAD = 2
"""Trajectories per replica: the tail of a step."""

KV_SHARES = {"middle": 0.8, "high": 2.0}
"""Load by name -> contexts of all trajectories over the KV, as they are on average."""

SWEEP_FIRST = (1, 2, 4)
SWEEP_SHARES = (0.5, 0.8, 1.2, 2.0, 3.0)
"""`sweep`: few trajectories, where drafts count, then on through the KV's capacity."""


@functools.cache
def mean_context_tokens() -> float:
    """Context of a generated trajectory, mean over the trajectories of their turns' mean."""
    specs = generate(SHAPE, 512, seed=0)
    return fmean(fmean(contexts(spec)) for spec in specs)


def contexts(spec: TrajectorySpec) -> list[int]:
    """Prompt tokens of each turn."""
    lengths = [spec.prompt_tokens]
    for turn in spec.turns[:-1]:
        lengths.append(lengths[-1] + turn.output_tokens + turn.tool_tokens)
    return lengths


def parse_loads(text: str, kv_tokens: int) -> tuple[int, ...]:
    """Trajectories per replica for each word of `--load`.

    Raises:
        ValueError: A word is neither a load by name nor a whole number from 1 on.
    """
    loads: list[int] = []
    for word in text.split(","):
        if word == "sweep":
            loads += [*SWEEP_FIRST, *(_filling(share, kv_tokens) for share in SWEEP_SHARES)]
        elif word == "low":
            loads.append(LOW_LOAD)
        elif word in KV_SHARES:
            loads.append(_filling(KV_SHARES[word], kv_tokens))
        elif word.isdecimal() and int(word) > 0:
            loads.append(int(word))
        else:
            raise ValueError(
                f"--load: {word!r} is neither low, middle, high, sweep nor a number of trajectories per replica from "
                f"1 on; expected for instance sweep or 4,16"
            )
    return tuple(sorted(set(loads)))


def _filling(kv_share: float, kv_tokens: int) -> int:
    return max(1, round(kv_share * kv_tokens / mean_context_tokens()))


def generated(trajectories: int, seed: int) -> tuple[TrajectorySpec, ...]:
    """A step of so many trajectories."""
    return generate(SHAPE, trajectories, seed)


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
