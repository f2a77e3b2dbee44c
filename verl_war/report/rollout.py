"""What a journal says, event by event: replicas, trajectories, steps. Decides and believes nothing of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_war.core.cost_model import ReplicaPace
from verl_war.core.journal import JournalError
from verl_war.core.step_time import Window
from verl_war.core.types import ReplicaSnapshot, SpeculationReading
from verl_war.report.life import Life
from verl_war.report.steps import Step

COUNTERS = ("steps", "drafting_steps", "drafting_rows", "drafted_tokens", "accepted_tokens", "draft_s", "step_s")
"""Fields of `SpeculationReading` that only grow; as series over time they are called `spec_...`."""


@dataclass(slots=True)
class Seen:
    """A replica as the journal shows it.

    Attributes:
        inflight: Turns in flight.
        live: Live trajectories whose last turn was placed here.
        snapshot, speculation: The last ones; None before.
        before: The reading of speculation before the last one.
    """

    replica_id: str
    index: int
    in_pool: bool = True
    inflight: int = 0
    live: int = 0
    snapshot: ReplicaSnapshot | None = None
    speculation: SpeculationReading | None = None
    before: SpeculationReading | None = None
    pace: ReplicaPace | None = None

    def since_last(self) -> SpeculationReading | None:
        """Counters between the last two readings, with what is in force now; None before the second one."""
        new, old = self.speculation, self.before
        if new is None or old is None or new.steps < old.steps or new.drafted_tokens < old.drafted_tokens:
            return None
        grown = {name: max(0, getattr(new, name) - getattr(old, name)) for name in COUNTERS}
        grown["accepted_tokens"] = min(grown["accepted_tokens"], grown["drafted_tokens"])
        return replace(new, **grown)


class Rollout:
    """Follows a journal.

    Args:
        count: Called with name, replica and amount of everything that is added up.
        on_window: Called with a replica and what its engine did between two snapshots.
    """

    def __init__(
        self,
        count: Callable[[str, str, float], None] = lambda *_: None,
        on_window: Callable[[str, Window], None] = lambda *_: None,
    ) -> None:
        self._count = count
        self._on_window = on_window
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "step_begin": self._on_step_begin,
            "replica_up": self._on_replica_up,
            "replica_down": self._on_replica_down,
            "turn": self._on_turn,
            "turn_end": self._on_turn_end,
            "turn_abandoned": self._on_turn_abandoned,
            "trajectory_end": self._on_trajectory_end,
            "snapshot": self._on_snapshot,
            "speculation": self._on_speculation,
        }
        self._step_of: dict[str, Step] = {}
        self._trajectory_of: dict[str, str] = {}
        self._announced: Step | None = None
        self._current: dict[tuple[int, bool], Step] = {}
        self.now_s = 0.0
        self.events = 0
        self.turns = 0
        self.moves = 0
        self.failed_turns = 0
        self.trajectories = 0
        self.lost_replicas = 0
        self.held_s = 0.0
        self.holds = 0
        self.held: dict[str, float] = {}
        """Session of each turn that is held -> since when."""
        self.replicas: dict[str, Seen] = {}
        self.lives: dict[str, Life] = {}
        self.steps: list[Step] = []

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take in an event.

        Raises:
            JournalError: It is damaged.
        """
        try:
            self.now_s = max(self.now_s, record.get("at_s", self.now_s))
            handler = self._handlers.get(record["event"])
            if handler is not None:
                handler(record)
            for start in record.get("starts", ()):
                self._start(start)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise JournalError(f"damaged event ({type(error).__name__}: {error})") from error
        self.events += 1

    def on_rule(self, rule: str) -> None:
        """The rollout that was announced last is decided by this rule."""
        if self._announced is not None:
            self._announced.rule = rule

    def _on_step_begin(self, record: Mapping[str, Any]) -> None:
        # Whether it is a validation pass is known only when its first turn comes.
        self._announced = Step(record["policy_step"], False, self.now_s, announced=record["num_trajectories"])

    def _on_replica_up(self, record: Mapping[str, Any]) -> None:
        self._seen(record["replica_id"]).in_pool = True

    def _on_replica_down(self, record: Mapping[str, Any]) -> None:
        self._seen(record["replica_id"]).in_pool = False
        self.lost_replicas += record["is_lost"]

    def _on_turn(self, record: Mapping[str, Any]) -> None:
        turn = record["turn"]
        if record.get("error"):
            return
        life = self._life(turn)
        self._trajectory_of[turn["session_id"]] = life.trajectory_id
        life.ask(turn["session_id"], turn["prompt_tokens"], self.now_s)
        self.held[turn["session_id"]] = self.now_s

    def _on_turn_end(self, record: Mapping[str, Any]) -> None:
        life, replica_id, result = self.lives.get(record["trajectory_id"]), record["replica_id"], record["result"]
        tokens, cached = result["completion_tokens"], result["num_cached_tokens"]
        if life is None:
            return
        prompt_tokens = life.end_turn(record["session_id"], replica_id, tokens, cached, self.now_s)
        if prompt_tokens is None:
            return
        self._seen(replica_id).inflight -= 1
        self.failed_turns += result["failed"]
        self._count("completion_tokens", replica_id, tokens)
        if cached is not None and not (result["failed"] or life.validate):
            self._count("prompt_tokens", replica_id, prompt_tokens)
            self._count("cached_tokens", replica_id, cached)

    def _on_turn_abandoned(self, record: Mapping[str, Any]) -> None:
        session_id = record["session_id"]
        self.held.pop(session_id, None)
        life = self.lives.get(self._trajectory_of.get(session_id, ""))
        if life is not None:
            life.give_up(session_id, self.now_s)

    def _on_trajectory_end(self, record: Mapping[str, Any]) -> None:
        life = self.lives.pop(record["trajectory_id"], None)
        if life is None:
            return
        for session_id in life.sessions:
            self._trajectory_of.pop(session_id, None)
            self.held.pop(session_id, None)
        for replica_id in life.end(record["failed"], self.now_s):
            self._seen(replica_id).inflight -= 1
        if life.home:
            self._seen(life.home).live -= 1
        self.trajectories += 1
        self._count("trajectories", "", 1)
        self._step_of.pop(life.trajectory_id).add(life)

    def _on_snapshot(self, record: Mapping[str, Any]) -> None:
        seen, snapshot = self._seen(record["replica_id"]), ReplicaSnapshot(**record["snapshot"])
        if seen.pace is None:
            seen.pace = ReplicaPace()
        window = seen.pace.window(snapshot, self.now_s)
        if window is not None:
            self._on_window(seen.replica_id, window)
            assert seen.snapshot is not None
            self._count("preemptions", seen.replica_id, max(0, snapshot.preemptions - seen.snapshot.preemptions))
            self._count("computed_tokens", seen.replica_id, max(0.0, window.tokens))
        seen.snapshot = snapshot

    def _on_speculation(self, record: Mapping[str, Any]) -> None:
        seen = self._seen(record["replica_id"])
        seen.before, seen.speculation = seen.speculation, SpeculationReading(**record["reading"])
        grown = seen.since_last()
        if grown is not None:
            for name in COUNTERS:
                self._count(f"spec_{name}", seen.replica_id, getattr(grown, name))

    def _start(self, start: Mapping[str, Any]) -> None:
        life, replica_id = self.lives[start["trajectory_id"]], start["replica_id"]
        home, moves = life.home, life.moves
        self.held.pop(start["session_id"], None)
        held_s = life.start(start["session_id"], replica_id, self.now_s)
        seen = self._seen(replica_id)
        seen.inflight += 1
        if home != replica_id:
            seen.live += 1
            if home:
                self._seen(home).live -= 1
        self.turns += 1
        self.moves += life.moves - moves
        self._count("moves", replica_id, life.moves - moves)
        if held_s > 0:
            self.held_s += held_s
            self.holds += 1

    def _seen(self, replica_id: str) -> Seen:
        seen = self.replicas.get(replica_id)
        if seen is None:
            seen = self.replicas[replica_id] = Seen(replica_id, len(self.replicas))
        return seen

    def _life(self, turn: Mapping[str, Any]) -> Life:
        trajectory_id = turn["trajectory_id"]
        life = self.lives.get(trajectory_id)
        if life is None:
            life = self.lives[trajectory_id] = Life(trajectory_id, turn["validate"], self.now_s, self.now_s)
            step = self._step_of[trajectory_id] = self._step(turn["policy_step"], turn["validate"])
            step.begun += 1
        return life

    def _step(self, number: int, validate: bool) -> Step:
        """The rollout that a new trajectory belongs to."""
        announced = self._announced
        if announced is not None and number in (announced.number, -1):
            self._announced = None
            announced.validate = validate
            return self._begin(announced)
        if number == -1 and self.steps and self.steps[-1].validate == validate:
            return self.steps[-1]
        current = self._current.get((number, validate))
        return current if current is not None else self._begin(Step(number, validate, self.now_s))

    def _begin(self, step: Step) -> Step:
        self._current[step.number, step.validate] = step
        self.steps.append(step)
        return step
