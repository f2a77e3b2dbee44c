"""What the simulator asks of a policy, and a base class for the simple ones."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.trace import TrajectorySpec


class Start(Protocol):
    """A turn that may start now. `verl_war.core.types.Placement` is one."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def replica_id(self) -> str: ...
    @property
    def priority(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """The start that the policies of this package return."""

    trajectory_id: str
    session_id: str
    replica_id: str
    priority: int = 0


class Policy(Protocol):
    """Events in, starts out; `WorkloadManager` has the same methods. A turn whose start is not returned is held."""

    def on_replica_up(self, replica_id: str, now_s: float) -> Sequence[Start]: ...
    def on_replica_down(self, replica_id: str, now_s: float) -> Sequence[Start]: ...
    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> Sequence[Start]: ...
    def on_turn(self, turn: Turn, now_s: float) -> Sequence[Start]: ...
    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> Sequence[Start]: ...
    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> Sequence[Start]: ...
    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[Start]: ...
    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> Sequence[Start]: ...
    def on_tick(self, now_s: float) -> Sequence[Start]: ...
    def on_weights_updated(self, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is built from.

    Attributes:
        trajectories: The work to come. Only clairvoyant policies may look at it.
        slowdown: Replica index -> how many times slower it is. Likewise.
        war_settings: Settings of `custom.war` to try, by group, over those of the arm.
    """

    hardware: HardwareProfile
    replicas: int
    seed: int
    trajectories: tuple[TrajectorySpec, ...]
    slowdown: Mapping[int, float] = field(default_factory=dict)
    war_settings: Mapping[str, Any] = field(default_factory=dict)


class RoutingPolicy(ABC):
    """Places every turn at once and holds none. Keeps what most rules need.

    Attributes:
        home: Replica of the last turn of each live trajectory.
        inflight: Turns now running or queued on each replica of the pool.
        live: Live trajectories, also those in a tool call, by the replica of their last turn.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.rng = random.Random(context.seed)
        self.home: dict[str, str] = {}
        self.inflight: dict[str, int] = {}
        self.live: dict[str, int] = {}

    @abstractmethod
    def choose(self, turn: Turn, now_s: float) -> str:
        """Return the replica that serves the turn."""

    def begun(self, turn: Turn, replica_id: str) -> None:
        """Note a placed turn; for rules that keep more."""
        del turn, replica_id

    def ended(self, trajectory_id: str, replica_id: str, result: TurnResult) -> None:
        """Note a turn's end; for rules that keep more."""
        del trajectory_id, replica_id, result

    def fewest(self, counts: dict[str, int]) -> str:
        """The replica with the least count, ties at random."""
        least = min(counts.values())
        return self.rng.choice([replica_id for replica_id, count in counts.items() if count == least])

    def on_replica_up(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self.inflight[replica_id] = 0
        self.live[replica_id] = 0
        return ()

    def on_replica_down(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self.inflight.pop(replica_id, None)
        self.live.pop(replica_id, None)
        self.home = {key: home for key, home in self.home.items() if home != replica_id}
        return ()

    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> Sequence[Start]:
        return ()

    def on_turn(self, turn: Turn, now_s: float) -> Sequence[Start]:
        return (self.start(turn, self.choose(turn, now_s)),)

    def start(self, turn: Turn, replica_id: str) -> Start:
        """Take a turn that starts there into account."""
        home = self.home.get(turn.trajectory_id)
        if home != replica_id:
            if home is not None:
                self.live[home] -= 1
            self.live[replica_id] += 1
            self.home[turn.trajectory_id] = replica_id
        self.inflight[replica_id] += 1
        self.begun(turn, replica_id)
        return Placed(turn.trajectory_id, turn.session_id, replica_id, turn.priority)

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> Sequence[Start]:
        if replica_id in self.inflight:
            self.inflight[replica_id] -= 1
        self.ended(trajectory_id, replica_id, result)
        return ()

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> Sequence[Start]:
        home = self.home.pop(trajectory_id, None)
        if home is not None:
            self.live[home] -= 1
        return ()

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[Start]:
        return ()

    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> Sequence[Start]:
        return ()

    def on_tick(self, now_s: float) -> Sequence[Start]:
        return ()

    def on_weights_updated(self, now_s: float) -> None:
        """A step is over, and the engines cleared their caches: nothing to do for a rule that keeps no view of them."""
        return
