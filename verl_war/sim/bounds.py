"""What no schedule can beat: a lower bound of the makespan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from verl_war.sim.draft_world import DraftTexts
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.trace import TrajectorySpec


def ideal_makespan_s(
    hardware: HardwareProfile,
    replicas: int,
    trajectories: Sequence[TrajectorySpec],
    slowdown: Mapping[int, float] | None = None,
    texts: DraftTexts | None = None,
) -> float:
    """Lower bound of the makespan: the longest trajectory alone, or the fleet's whole work at full batches.

    Alone: every turn of a trajectory decodes at batch one on an idle replica, its tools take their time and only new
    tokens are prefilled. Work: every output token reads its context's KV and its share of the weights and of the
    fixed step cost, where a batch holds at most as many contexts as fit the KV; every token that is new to the fleet
    is computed once. Loads are taken to be perfectly even, and a slow replica contributes its share of speed.
    Where text can be drafted, every draft that would be accepted is found and costs what computing its tokens costs.

    Args:
        slowdown: Replica index -> how many times slower it is.
        texts: What can be drafted; None for engines without speculation.
    """
    slow = slowdown or {}
    speed = sum(1.0 / slow.get(index, 1.0) for index in range(replicas))
    fastest = min(slow.get(index, 1.0) for index in range(replicas))
    iterations = [_iterations(spec, key, texts) for key, spec in enumerate(trajectories)]
    alone = max(_alone_s(hardware, spec, fastest, its) for spec, its in zip(trajectories, iterations, strict=True))
    return max(alone, _work_s(hardware, trajectories, iterations) / speed)


def _iterations(spec: TrajectorySpec, key: int, texts: DraftTexts | None) -> list[int]:
    """Decode iterations of every turn. The first token comes with the prefill; the others one step each, or fewer."""
    if texts is None:
        return [turn.output_tokens - 1 for turn in spec.turns]
    return [texts.of(key, index).least_iterations() for index in range(len(spec.turns))]


def _alone_s(hardware: HardwareProfile, spec: TrajectorySpec, factor: float, iterations: Sequence[int]) -> float:
    seconds = spec.start_s
    context = spec.prompt_tokens
    for index, turn in enumerate(spec.turns):
        seconds += factor * (hardware.base_s + hardware.decode_steps_s(1, context, iterations[index]))
        if index + 1 < len(spec.turns):
            seconds += turn.tool_s
        context += turn.output_tokens + turn.tool_tokens
    return seconds


def _work_s(
    hardware: HardwareProfile, trajectories: Sequence[TrajectorySpec], iterations: Sequence[Sequence[int]]
) -> float:
    compute = memory = fixed = 0.0
    groups: dict[str, int] = {}
    for spec, turn_iterations in zip(trajectories, iterations, strict=True):
        groups[spec.group_id] = spec.prompt_tokens - spec.system_tokens
        context = spec.prompt_tokens
        for index, turn in enumerate(spec.turns):
            tokens, decodes = turn.output_tokens - 1, turn_iterations[index]
            # Sum over the turn of the contexts that its decode steps read.
            read = decodes * context + decodes * (decodes - 1) / 2
            steps = max(read / hardware.kv_capacity_tokens, decodes / hardware.max_num_seqs)
            memory += hardware.per_kv_token_s * read + hardware.weights_s * steps
            fixed += hardware.base_s * steps + hardware.per_request_s * decodes
            tool_tokens = turn.tool_tokens if index + 1 < len(spec.turns) else 0
            compute += hardware.per_token_s * (tool_tokens + (tokens if hardware.overlapped else tokens - decodes))
            compute += hardware.per_pair_s * tool_tokens * context
            context += turn.output_tokens + tool_tokens
    prompt = sum(groups.values()) + (trajectories[0].system_tokens if trajectories else 0)
    compute += hardware.per_token_s * prompt
    if hardware.overlapped:
        return fixed + max(compute, memory)
    return math.fsum((fixed, compute, memory))
