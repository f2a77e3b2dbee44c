"""Generated rollout steps: GRPO groups of multi-turn agentic trajectories with heavy tails."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from verl_war.sim.trace import TrajectorySpec, TurnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """Distributions of a step. Means and sigmas are those of lognormal variables.

    With the defaults, the contexts of all trajectories on `h100_8b` peak at a third of its KV at 16 trajectories per
    replica, at all of it at 48 and at 2.7 times at 128. In most prompts more than half is common to all trajectories,
    as it is for agents with long descriptions of their tools.

    Attributes:
        group_size: Samples per prompt (GRPO's n).
        system_tokens: Beginning of the prompt that all trajectories share.
        task_tokens: Range of the rest of the prompt, shared by a group, uniform.
        turns_mean: Turns of a trajectory, before the context's limit cuts the longest.
        turns_group_sigma: Spread of the turns between groups.
        turns_sibling_sigma: Spread of the turns within a group.
        max_turns: Limit of the agent loop.
        max_context_tokens: A trajectory ends with the turn that would exceed it.
        start_spread_s: Trajectories start within so many seconds: sandboxes do not all come up at once.
    """

    group_size: int = 8
    system_tokens: int = 2304
    task_tokens: tuple[int, int] = (512, 3584)
    turns_mean: float = 20.0
    turns_group_sigma: float = 0.5
    turns_sibling_sigma: float = 0.4
    max_turns: int = 100
    max_context_tokens: int = 32_768
    output_mean: float = 240.0
    output_sigma: float = 0.7
    tool_tokens_mean: float = 600.0
    tool_tokens_sigma: float = 0.9
    tool_s_mean: float = 3.0
    tool_s_sigma: float = 1.0
    start_spread_s: float = 2.0


SHAPES: dict[str, WorkloadShape] = {
    "default": WorkloadShape(),
    "fast_tools": WorkloadShape(tool_s_mean=0.3),
    "one_slow": WorkloadShape(),
    # Contexts that thrash the small KV cache of the CPU profile: a tenth of the default's lengths.
    "small": WorkloadShape(
        system_tokens=128,
        task_tokens=(64, 256),
        turns_mean=8.0,
        output_mean=24.0,
        tool_tokens_mean=48.0,
        tool_s_mean=0.5,
        max_context_tokens=4096,
        start_spread_s=0.5,
    ),  # fmt: skip
}
"""Workloads by name. `one_slow` is `default` on a fleet whose first replica takes twice as long."""

SLOW_FACTOR = 2.0
"""How much slower the slow replica of `one_slow` is."""


def generate(shape: WorkloadShape, trajectories: int, seed: int) -> tuple[TrajectorySpec, ...]:
    """Draw a step of so many trajectories, siblings one after another as verl repeats its prompts.

    The last group is smaller when the number is not a multiple of the group's size.
    """
    rng = random.Random(seed)
    specs: list[TrajectorySpec] = []
    for group in range(math.ceil(trajectories / shape.group_size)):
        prompt_tokens = shape.system_tokens + rng.randint(*shape.task_tokens)
        group_factor = rng.gauss(0.0, shape.turns_group_sigma)
        for sibling in range(shape.group_size):
            specs.append(_trajectory(shape, rng, group, sibling, prompt_tokens, group_factor))
    return tuple(specs[:trajectories])


def _trajectory(
    shape: WorkloadShape, rng: random.Random, group: int, sibling: int, prompt_tokens: int, group_factor: float
) -> TrajectorySpec:
    sigma_squared = shape.turns_group_sigma**2 + shape.turns_sibling_sigma**2
    factor = group_factor + rng.gauss(0.0, shape.turns_sibling_sigma) - sigma_squared / 2
    count = min(max(1, round(shape.turns_mean * math.exp(factor))), shape.max_turns)
    start_s = rng.uniform(0.0, shape.start_spread_s)
    turns: list[TurnSpec] = []
    context = prompt_tokens
    for _ in range(count):
        output = _tokens(rng, shape.output_mean, shape.output_sigma)
        tool = _tokens(rng, shape.tool_tokens_mean, shape.tool_tokens_sigma)
        tool_s = _lognormal(rng, shape.tool_s_mean, shape.tool_s_sigma)
        if turns and context + output > shape.max_context_tokens:
            break
        turns.append(TurnSpec(output, round(tool_s, 4), tool))
        context += output + tool
    return TrajectorySpec(
        trajectory_id=f"g{group}-{sibling}",
        group_id=f"g{group}",
        system_tokens=shape.system_tokens,
        prompt_tokens=prompt_tokens,
        start_s=round(start_s, 4),
        turns=tuple(turns),
    )


def _tokens(rng: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(_lognormal(rng, mean, sigma)))


def _lognormal(rng: random.Random, mean: float, sigma: float) -> float:
    """A lognormal number of this mean; sigma is of its logarithm."""
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
