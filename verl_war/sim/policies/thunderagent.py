"""Program-aware pausing and resuming after ThunderAgent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult
from verl_war.sim.policies.base import Placed, PolicyContext, Start

POLL_S = 5.0
"""Interval of ThunderAgent's scheduler."""

BUFFER_TOKENS = 100
"""Tokens kept for the growth of each program."""


@dataclass(slots=True)
class Program:
    """A trajectory. `turn` is the one it waits to start; `replica_id` is None while it is paused."""

    tokens: int
    replica_id: str | None = None
    turn: Turn | None = None
    running: bool = False
    marked: bool = False
    turns: int = 0

    @property
    def need(self) -> int:
        """KV tokens to keep for it."""
        return self.tokens + BUFFER_TOKENS


class ThunderAgentLike:
    """Pauses trajectories when a replica's live contexts outgrow its KV, and resumes them where there is room.

    Need of a replica = tokens of its active programs, the shared system prompt once, + 100 per program. A new program
    starts at once only if none waits and it fits somewhere (least tokens first). Every 5 s: resume waiting programs in
    the order begun, new, in their tool, each smallest first, as many as the free capacity of all replicas holds, the
    largest of them first onto the replica with the most room; then, on replicas over capacity, pause the smallest
    program in a tool call, and when there is none mark the smallest running one, which pauses when its turn ends.

    Source: ThunderAgent-org/ThunderAgent, ThunderAgent/scheduler/router.py, mode `tr`.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._capacity = context.hardware.kv_capacity_tokens
        self._shared = min((spec.system_tokens for spec in context.trajectories), default=0)
        self._replicas: list[str] = []
        self._programs: dict[str, Program] = {}
        self._next_poll_s = POLL_S

    def remaining(self, replica_id: str) -> int:
        """Tokens that still fit on a replica; below zero when it is over capacity."""
        active = [program for program in self._programs.values() if program.replica_id == replica_id]
        shared = max(0, len(active) - 1) * self._shared
        leaving = sum(program.tokens for program in active if program.marked)
        return self._capacity - sum(program.need for program in active) + shared + leaving

    def on_replica_up(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self._replicas.append(replica_id)
        return ()

    def on_replica_down(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self._replicas.remove(replica_id)
        for program in self._programs.values():
            if program.replica_id == replica_id:
                program.replica_id = None
        return ()

    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> Sequence[Start]:
        return ()

    def on_weights_updated(self, now_s: float) -> None:
        """Nothing is kept beyond a step."""

    def on_turn(self, turn: Turn, now_s: float) -> Sequence[Start]:
        program = self._programs.setdefault(turn.trajectory_id, Program(turn.prompt_tokens))
        program.tokens = turn.prompt_tokens
        program.turns += 1
        program.turn = turn
        if program.turns == 1 and program.replica_id is None:
            program.replica_id = self._place_new(program)
        return self._start(program) if program.replica_id is not None else ()

    def _place_new(self, program: Program) -> str | None:
        if any(other.replica_id is None for other in self._programs.values() if other is not program):
            return None
        room = {replica_id: self.remaining(replica_id) for replica_id in self._replicas}
        best = max(room, key=room.__getitem__)
        return best if room[best] >= program.need else None

    def _start(self, program: Program) -> Sequence[Start]:
        turn = program.turn
        assert turn is not None and program.replica_id is not None
        program.turn = None
        program.running = True
        return (Placed(turn.trajectory_id, turn.session_id, program.replica_id, turn.priority),)

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> Sequence[Start]:
        program = self._programs[trajectory_id]
        program.running = False
        program.tokens += result.completion_tokens
        if program.marked:
            program.marked = False
            program.replica_id = None
        return ()

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> Sequence[Start]:
        self._programs.pop(trajectory_id, None)
        return ()

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[Start]:
        return ()

    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> Sequence[Start]:
        return ()

    def on_tick(self, now_s: float) -> Sequence[Start]:
        if now_s < self._next_poll_s:
            return ()
        self._next_poll_s = now_s + POLL_S
        starts = self._resume()
        for replica_id in self._replicas:
            self._pause(replica_id)
        return starts

    def _resume(self) -> list[Start]:
        room = {replica_id: self.remaining(replica_id) for replica_id in self._replicas}
        room = {replica_id: tokens for replica_id, tokens in room.items() if tokens > BUFFER_TOKENS}
        total = sum(room.values())
        waiting = [program for program in self._programs.values() if program.replica_id is None]
        waiting.sort(key=lambda program: (self._rank(program), program.tokens))
        chosen: list[Program] = []
        for program in waiting:
            if program.need <= total:
                total -= program.need
                chosen.append(program)
        starts: list[Start] = []
        for program in sorted(chosen, key=lambda program: -program.tokens):
            best = max(room, key=room.__getitem__)
            if program.need > room[best]:
                continue
            room[best] -= program.need
            program.replica_id = best
            if program.turn is not None:
                starts.extend(self._start(program))
        return starts

    @staticmethod
    def _rank(program: Program) -> int:
        if program.turns == 1:
            return 1
        return 0 if program.turn is not None else 2

    def _pause(self, replica_id: str) -> None:
        over = -self.remaining(replica_id)
        if over <= 0:
            return
        active = [program for program in self._programs.values() if program.replica_id == replica_id]
        active.sort(key=lambda program: program.tokens)
        for program in active:
            if over > 0 and not program.running and not program.marked:
                program.replica_id = None
                over -= program.need - self._shared
        for program in active:
            if over > 0 and program.running and not program.marked:
                program.marked = True
                over -= program.tokens
