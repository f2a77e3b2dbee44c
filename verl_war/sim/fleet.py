"""The replicas of a simulation, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_war.sim.draft_world import DraftTexts
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.speculation import Drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The replicas of a simulation.

    Attributes:
        host_tokens: Capacity of each replica's host tier; 0 for none.
        by_priority: vLLM's `scheduling_policy=priority`.
        slowdown: Replica index -> how many times slower it is.
        down_at_s: Replica index -> when it dies.
        misstated_capacity: Reported KV capacity over the true one, to try controllers out.
        texts: What drafts find; None where nothing drafts.
        new_drafter: Makes the drafter of a replica, which needs `texts`; None, or one that makes None, for engines
            without speculation.
    """

    hardware: HardwareProfile
    replicas: int
    host_tokens: int = 0
    by_priority: bool = False
    slowdown: Mapping[int, float] = field(default_factory=dict)
    down_at_s: Mapping[int, float] = field(default_factory=dict)
    misstated_capacity: float = 1.0
    texts: DraftTexts | None = None
    new_drafter: Callable[[], Drafter | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one simulated step came to.

    Attributes:
        makespan_s: Until the last trajectory ended; `t50_s` and so on until that share had.
        turns, output_tokens, prompt_tokens: The work, equal in all arms.
        prefill_tokens: Prompt tokens computed, recomputation after preemption included.
        cached_tokens: Prompt tokens found in a prefix cache when their turn was first scheduled.
        hit_rate: Cached over prompt tokens.
        held_s: Sum over turns of the time between asking and starting.
        moves: Turns on another replica than the trajectory's last.
        kv_demand_mean, kv_demand_peak: Contexts of all live trajectories over the fleet's KV capacity, averaged
            over the makespan and at most.
        busy_share: Share of the makespan that each replica was in engine steps.
        engine_steps: Steps of all replicas.
        drafted_tokens, accepted_tokens: Draft tokens verified, and of these accepted.
        regime_switches: Changes of the replicas' speculation between drafting and not.
    """

    makespan_s: float
    t50_s: float
    t90_s: float
    t99_s: float
    turns: int
    output_tokens: int
    prompt_tokens: int
    prefill_tokens: int
    cached_tokens: int
    hit_rate: float
    preemptions: int
    held_s: float
    held_turns: int
    moves: int
    failed_turns: int
    kv_demand_mean: float
    kv_demand_peak: float
    busy_share: tuple[float, ...]
    engine_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    regime_switches: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
