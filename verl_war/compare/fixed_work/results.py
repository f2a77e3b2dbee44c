"""What a run comes to, as plain values. Imports nothing of the systems, so that reading results takes no time."""

from __future__ import annotations

from dataclasses import dataclass, field

EarlierText = tuple[str, str, int, list[int], list[tuple[int, int]]]
"""Trajectory, group, tokens of its first prompt, all its tokens, and (context, generated) tokens of each turn."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn that was served; times in seconds since the run began.

    Attributes:
        asked_s: When its client asked for a replica.
        started_s: When it had one.
    """

    trajectory_id: str
    number: int
    replica_id: str
    asked_s: float
    started_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Replayed:
    """What one run came to.

    Attributes:
        makespan_s: Until the last trajectory ended.
        turns: In the order in which they ended.
        end_s: Trajectory -> when it ended.
        kv_demand_peak_tokens: Contexts of all live trajectories together, at most.
        preemptions, computed_tokens, engine_steps, drafted_tokens, accepted_tokens: Of all replicas' engines.
        busy_s: Replica -> seconds in engine iterations.
        peak_rss_bytes: Most memory of all replicas together.
        speculation: Sums of the engines' own counters of WAR's drafts; empty without.
        war: What WAR's router reports.
        texts: Replica of its last turn and text of each trajectory, if wanted.
    """

    makespan_s: float = 0.0
    turns: list[TurnRecord] = field(default_factory=list)
    end_s: dict[str, float] = field(default_factory=dict)
    kv_demand_peak_tokens: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    engine_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    router_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    speculation: dict[str, float] = field(default_factory=dict)
    war: dict[str, float] = field(default_factory=dict)
    texts: list[tuple[str, EarlierText]] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Sum of a field of the turns."""
        return sum(getattr(turn, name) for turn in self.turns)


class RunFailed(RuntimeError):
    """A run did not reach its end.

    Attributes:
        so_far: What was measured until then.
    """

    def __init__(self, message: str, so_far: Replayed) -> None:
        super().__init__(message)
        self.so_far = so_far
