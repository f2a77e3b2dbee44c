"""A scheduler that knows every turn to come: an upper bound of what any real one can reach."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult
from verl_war.sim.policies.base import Placed, PolicyContext, Start
from verl_war.sim.trace import TrajectorySpec

SCAN_LIMIT = 24
"""Waiting trajectories that are tried for admission at once; those behind them wait for the next event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One clairvoyant schedule.

    Attributes:
        fraction: Share of the KV capacity that the working set may fill.
        longest_first: Admit those with the most remaining seconds first; otherwise those with the least.
        horizon_turns: Turns over which a replica's step time is charged when it is chosen.
        backfill: Admit smaller ones past one that does not fit.
        planned: Spread all trajectories over the replicas beforehand, longest first to the least work, and stay there.
    """

    fraction: float
    longest_first: bool = True
    horizon_turns: int = 3
    backfill: bool = True
    planned: bool = False


class _Trajectory:
    __slots__ = (
        "spec",
        "index",
        "context",
        "home",
        "admitted",
        "turn",
        "running",
        "remaining_s",
        "footprint",
        "rank",
    )

    def __init__(self, spec: TrajectorySpec, remaining_s: list[float]) -> None:
        self.spec = spec
        self.index = 0
        self.context = spec.prompt_tokens
        self.home: _Replica | None = None
        self.admitted = False
        self.turn: Turn | None = None
        self.running = False
        self.remaining_s = remaining_s
        self.footprint = 0
        self.rank: tuple[float, str] = (0.0, "")

    def own_tokens(self) -> int:
        """KV of its own after the next turn and tool; the prompt is counted with the group."""
        turn = self.spec.turns[min(self.index, len(self.spec.turns) - 1)]
        return self.context - self.spec.prompt_tokens + turn.output_tokens + turn.tool_tokens


class _Replica:
    def __init__(self, name: str, slowdown: float) -> None:
        self.name = name
        self.members: set[str] = set()
        self.groups: dict[str, int] = {}
        self.working = 0
        self.running = 0
        self.running_kv = 0
        self.slowdown = slowdown


class Clairvoyant:
    """Admits by exact KV fit, places by the price of recomputing and of the replica's step time, and pauses the
    trajectory that matters least for the makespan. Knows all remaining turns, tokens and tool times.

    `upper_bound` is the best makespan of several such strategies: the best clairvoyant schedule that was found, not a
    proof that no better one exists. `ideal_makespan_s` is the proof: nothing can be faster than that.
    """

    def __init__(self, context: PolicyContext, strategy: Strategy) -> None:
        self._hardware = context.hardware
        self._strategy = strategy
        self._slowdown = context.slowdown
        self._rng = random.Random(context.seed)
        capacity = context.hardware.kv_capacity_tokens
        self._limit = int(strategy.fraction * capacity)
        # Step time of a replica whose KV is three quarters full: turns tokens into seconds for the order.
        self._token_s = context.hardware.step_s(1, capacity * 3 // 4)
        self._replicas: dict[str, _Replica] = {}
        self._trajectories = {
            spec.trajectory_id: _Trajectory(spec, self._remaining(spec)) for spec in context.trajectories
        }
        self._plan: dict[str, str] = {}
        self._waiting: list[tuple[tuple[float, str], _Trajectory]] = []

    def _remaining(self, spec: TrajectorySpec) -> list[float]:
        seconds = [0.0]
        for turn in reversed(spec.turns):
            seconds.append(seconds[-1] + turn.output_tokens * self._token_s + turn.tool_s)
        return seconds[::-1]

    # ---- events ------------------------------------------------------------------------------------

    def on_replica_up(self, replica_id: str, now_s: float) -> Sequence[Start]:
        slowdown = self._slowdown.get(len(self._replicas), 1.0)
        self._replicas[replica_id] = _Replica(replica_id, slowdown)
        return ()

    def on_replica_down(self, replica_id: str, now_s: float) -> Sequence[Start]:
        replica = self._replicas.pop(replica_id)
        for name in list(replica.members):
            self._leave(self._trajectories[name])
        return ()

    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> Sequence[Start]:
        if self._strategy.planned:
            work = [(0.0, name) for name in self._replicas]
            for trajectory in sorted(self._trajectories.values(), key=lambda item: -item.remaining_s[0]):
                seconds, name = heapq.heappop(work)
                self._plan[trajectory.spec.trajectory_id] = name
                seconds += trajectory.remaining_s[0] * self._replicas[name].slowdown
                heapq.heappush(work, (seconds, name))
        return ()

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[Start]:
        return ()

    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> Sequence[Start]:
        return ()

    def on_tick(self, now_s: float) -> Sequence[Start]:
        return self._drain()

    def on_weights_updated(self, now_s: float) -> None:
        """Nothing is kept beyond a step."""

    def on_turn(self, turn: Turn, now_s: float) -> Sequence[Start]:
        trajectory = self._trajectories[turn.trajectory_id]
        trajectory.turn = turn
        if trajectory.admitted:
            return self._begin(trajectory, self._maybe_move(trajectory))
        sign = -1.0 if self._strategy.longest_first else 1.0
        trajectory.rank = (sign * trajectory.remaining_s[trajectory.index], turn.trajectory_id)
        bisect.insort(self._waiting, (trajectory.rank, trajectory), key=lambda entry: entry[0])
        return self._drain()

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> Sequence[Start]:
        trajectory = self._trajectories[trajectory_id]
        trajectory.running = False
        replica = self._replicas.get(replica_id)
        if replica is None or result.failed:
            return ()
        replica.running -= 1
        replica.running_kv -= trajectory.context
        turn = trajectory.spec.turns[trajectory.index]
        trajectory.context += turn.output_tokens + turn.tool_tokens
        trajectory.index += 1
        if trajectory.index < len(trajectory.spec.turns):
            own = trajectory.own_tokens()
            replica.working += own - trajectory.footprint
            trajectory.footprint = own
            self._pause(replica)
        return self._drain()

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> Sequence[Start]:
        trajectory = self._trajectories[trajectory_id]
        if trajectory.admitted:
            self._leave(trajectory)
        return self._drain()

    # ---- decisions ---------------------------------------------------------------------------------

    def _pause(self, replica: _Replica) -> None:
        """Over capacity: those in a tool call leave, the ones with the least (or most) remaining seconds first."""
        while replica.working > self._hardware.kv_capacity_tokens * max(self._strategy.fraction, 0.97):
            idle = [self._trajectories[name] for name in replica.members if not self._trajectories[name].running]
            if not idle:
                return
            choose = min if self._strategy.longest_first else max
            self._leave(choose(idle, key=lambda item: (item.remaining_s[item.index], item.spec.trajectory_id)))

    def _drain(self) -> list[Start]:
        starts: list[Start] = []
        kept: list[tuple[tuple[float, str], _Trajectory]] = []
        tried = 0
        while self._waiting and tried < SCAN_LIMIT:
            entry = self._waiting.pop(0)
            trajectory = entry[1]
            replica = self._fitting(trajectory)
            if replica is None:
                kept.append(entry)
                tried += 1
                if not self._strategy.backfill:
                    break
                continue
            self._join(trajectory, replica)
            starts.extend(self._begin(trajectory, replica))
        self._waiting[:0] = kept
        return starts

    def _fitting(self, trajectory: _Trajectory) -> _Replica | None:
        best: _Replica | None = None
        best_price = 0.0
        for replica in self._candidates(trajectory):
            if replica.members and replica.working + self._added(trajectory, replica) > self._limit:
                continue
            price = self._price(trajectory, replica) + 1e-6 * self._rng.random()
            if best is None or price < best_price:
                best, best_price = replica, price
        return best

    def _candidates(self, trajectory: _Trajectory) -> Iterable[_Replica]:
        planned = self._replicas.get(self._plan.get(trajectory.spec.trajectory_id, ""))
        return self._replicas.values() if planned is None else (planned,)

    def _maybe_move(self, trajectory: _Trajectory) -> _Replica:
        home = trajectory.home
        assert home is not None
        if self._strategy.planned:
            return home
        price = self._price(trajectory, home)
        for replica in self._replicas.values():
            if replica is home or replica.working + self._added(trajectory, replica) > 0.8 * self._limit:
                continue
            if self._price(trajectory, replica) < 0.8 * price - 0.5:
                self._leave(trajectory)
                self._join(trajectory, replica)
                return replica
        return home

    def _price(self, trajectory: _Trajectory, replica: _Replica) -> float:
        """Seconds: what must be prefilled there, and the coming turns at the replica's step time."""
        spec = trajectory.spec
        if trajectory.home is replica:
            uncached = spec.turns[trajectory.index - 1].tool_tokens if trajectory.index else spec.prompt_tokens
        else:
            uncached = trajectory.context
        if spec.group_id in replica.groups and trajectory.home is not replica:
            uncached -= spec.prompt_tokens
        turns = spec.turns[trajectory.index : trajectory.index + self._strategy.horizon_turns]
        outputs = sum(turn.output_tokens for turn in turns)
        step_s = self._hardware.step_s(replica.running + 1, replica.running_kv + trajectory.context)
        return replica.slowdown * (uncached * self._hardware.per_token_s * 2 + outputs * step_s)

    def _added(self, trajectory: _Trajectory, replica: _Replica) -> int:
        shared = 0 if trajectory.spec.group_id in replica.groups else trajectory.spec.prompt_tokens
        return trajectory.own_tokens() + shared

    def _join(self, trajectory: _Trajectory, replica: _Replica) -> None:
        replica.working += self._added(trajectory, replica)
        group = trajectory.spec.group_id
        replica.groups[group] = replica.groups.get(group, 0) + 1
        replica.members.add(trajectory.spec.trajectory_id)
        trajectory.footprint = trajectory.own_tokens()
        trajectory.home = replica
        trajectory.admitted = True

    def _leave(self, trajectory: _Trajectory) -> None:
        replica = trajectory.home
        assert replica is not None
        replica.members.discard(trajectory.spec.trajectory_id)
        replica.working -= trajectory.footprint
        group = trajectory.spec.group_id
        replica.groups[group] -= 1
        if not replica.groups[group]:
            del replica.groups[group]
            replica.working -= trajectory.spec.prompt_tokens
        trajectory.admitted = False

    def _begin(self, trajectory: _Trajectory, replica: _Replica) -> Sequence[Start]:
        turn = trajectory.turn
        assert turn is not None
        trajectory.turn = None
        trajectory.running = True
        replica.running += 1
        replica.running_kv += trajectory.context
        return (Placed(turn.trajectory_id, turn.session_id, replica.name),)
