"""A made-up world around a `WorkloadManager`: plays lists of numbers as events, and keeps accounts of its own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from verl_war.core.config import AdmissionConfig, RegimeConfig, SchedulingConfig, WarConfig
from verl_war.core.journal import EVENTS, RecordingManager, as_record, header
from verl_war.core.step_stats import metric_names
from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult

TTL_S, MARGIN_S, MAX_HOLD_S, DWELL_S = 60.0, 10.0, 40.0, 10.0
ROUNDING_S = 1e-6
ON = {
    "scheduling": SchedulingConfig(enabled=True, move_min_saving_s=0.0, move_min_saving_share=0.0, move_min_turns=1),
    "admission": AdmissionConfig(enabled=True, wait_for_thrash=False, max_hold_s=MAX_HOLD_S),
    "regime": RegimeConfig(enter_kv_share=0.5, leave_kv_share=0.3, dwell_s=DWELL_S),
}
WITH_TTL = AdmissionConfig(
    enabled=True, wait_for_thrash=False, max_hold_s=MAX_HOLD_S, trajectory_ttl_s=TTL_S, deadline_margin_s=MARGIN_S
)
ALWAYS = RegimeConfig(enter_kv_share=0.0, leave_kv_share=0.0)
CONFIGS = {
    "off": WarConfig(seed=1),
    "scheduling": WarConfig(seed=1, scheduling=ON["scheduling"], regime=ON["regime"]),
    "admission": WarConfig(seed=1, admission=ON["admission"], regime=ON["regime"]),
    "all": WarConfig(seed=1, **ON),
    "all, waiting for thrash": WarConfig(
        seed=1, **{**ON, "regime": ALWAYS, "admission": AdmissionConfig(enabled=True, max_hold_s=MAX_HOLD_S)}
    ),
    "all, always loaded": WarConfig(seed=1, **{**ON, "regime": ALWAYS, "admission": WITH_TTL}),
}

REPLICAS, TRAJECTORIES = 3, 10
CAPACITIES = (3_000, 3_000, 1_000, 20_000, 0)
PROMPTS = (300, 700, 1_500, 1, 6_000)
STEPS_S = (0.0, 0.1, 1.0, 5.0, 50.0, -0.5, -100.0)
KINDS = (
    *("turn",) * 10,
    *("end",) * 7,
    *("finish",) * 3,
    *("snapshot",) * 3,
    *("tick",) * 2,
    *("up", "down", "lost", "abandon", "missing", "speculation", "weights", "step", "forget", "stray", "report"),
)
"""Kinds of events, as often as they come."""

Event = tuple[int, int, int, int]
"""Number of its kind, two numbers that the kind makes something of, number of the time since the event before."""


@dataclass
class Running:
    session_id: str
    replica_id: str


@dataclass
class Held:
    trajectory: int
    due_s: float
    deadline_s: float


@dataclass
class World:
    """Plays events, and asserts after each that the manager's accounts are those of the world."""

    config: WarConfig
    now_s: float = 1_000.0
    pool: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    """In flight by replica of the pool, as stock verl counts: from zero after each time that it is added."""
    known: list[str] = field(default_factory=list)
    live: dict[int, list[Running]] = field(default_factory=dict)
    sessions: dict[str, float] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    turns_asked: int = 0
    turns_placed: int = 0
    holds_given_up: int = 0

    def __post_init__(self):
        self.records = [header(self.config, False)]
        self.manager = RecordingManager(self.config, False, lambda entry: self.records.append(as_record(entry)))
        self.happened = []
        for name, event in EVENTS.items():
            setattr(self.manager, event.method, self.noting(name, getattr(self.manager, event.method)))
        self.fleet = self.manager._fleet
        self.load = self.manager._scheduler.load if self.manager._scheduler is not None else None
        self.regime = self.load.regime if self.load is not None else "low"
        self.changed_s = -math.inf

    def play(self, events):
        for kind, first, second, step in events:
            self.now_s += STEPS_S[step % len(STEPS_S)]
            name = KINDS[kind % len(KINDS)]
            getattr(self, name)(first, second)
            self.check(ticked=name == "tick")

    def noting(self, name, method):
        """The method, whose calls are noted."""

        def call(*arguments, **keywords):
            self.happened.append(name)
            return method(*arguments, **keywords)

        return call

    def journal(self):
        """The events as they are written to a file, every one that happened."""
        assert [record["event"] for record in self.records[1:]] == self.happened
        return [json.dumps(record) for record in self.records]

    # -- events -------------------------------------------------------------------------------------------------------

    def up(self, first, second):
        name = f"r{first % REPLICAS}"
        if name not in self.pool:
            self.pool.append(name)
        self.requests[name] = 0
        if name not in self.known:
            self.known.append(name)
        self.take(self.manager.on_replica_up(name, self.now_s))

    def down(self, first, second, is_lost=False):
        name = f"r{first % REPLICAS}"
        if name in self.pool:
            self.pool.remove(name)
            del self.requests[name]
        self.take(self.manager.on_replica_down(name, self.now_s, is_lost))

    def lost(self, first, second):
        self.down(first, second, is_lost=True)

    def turn(self, first, second):
        number = first % TRAJECTORIES
        session = f"s{number}" if first % 7 else f"helper{number}"
        tokens = PROMPTS[second % len(PROMPTS)] + second % 100
        turn = Turn(session_id=session, trajectory_id=f"t{number}", group_id=f"g{number // 3}" if number else "",
                    prompt_tokens=tokens, block_hashes=tuple(range(tokens // 64)), priority=second % 2,
                    validate=number == TRAJECTORIES - 1)  # fmt: skip
        expected = ValueError if session in self.held else RuntimeError if not self.pool else None
        try:
            placements = self.manager.on_turn(turn, self.now_s)
        except (ValueError, RuntimeError) as error:
            assert type(error) is expected, error
            return
        assert expected is None
        self.turns_asked += 1
        self.live.setdefault(number, [])
        begin_s = self.sessions.setdefault(session, self.now_s)
        # The queue is looked at in the order of asking: where the clock went back, one waits for those before it.
        due_s = max([self.now_s + MAX_HOLD_S, *(held.due_s for held in self.held.values())])
        self.held[session] = Held(number, due_s, begin_s + TTL_S - MARGIN_S)
        self.take(placements)

    def end(self, first, second):
        running = [(number, turn) for number, turns in self.live.items() for turn in turns]
        if not running:
            return
        number, turn = running[first % len(running)]
        self.live[number].remove(turn)
        self.release(turn)
        results = (
            TurnResult(completion_tokens=second % 500, num_cached_tokens=second % 200),
            TurnResult(completion_tokens=second % 50),
            TurnResult(completion_tokens=3, aborted=True),
            TurnResult(failed=True),
        )
        result = results[0 if second % 3 else second % len(results)]
        self.take(self.manager.on_turn_end(f"t{number}", turn.session_id, turn.replica_id, result, self.now_s))

    def finish(self, first, second):
        number = first % TRAJECTORIES
        for turn in self.live.pop(number, ()):
            self.release(turn)
        for session in (f"s{number}", f"helper{number}"):
            self.sessions.pop(session, None)
            self.holds_given_up += self.held.pop(session, None) is not None
        self.take(self.manager.on_trajectory_end(f"t{number}", bool(second % 2), self.now_s))

    def abandon(self, first, second):
        session = f"s{first % TRAJECTORIES}"
        self.holds_given_up += self.held.pop(session, None) is not None
        self.take(self.manager.on_turn_abandoned(session, self.now_s))

    def snapshot(self, first, second):
        if not self.known:
            return
        name = self.known[first % len(self.known)]
        steps = self.counters[name] = 0 if second % 19 == 18 else self.counters.get(name, 0) + second % 40
        busy_s = (0.02 * steps, 0.2 * steps, 0.0)[first % 3 if second % 5 == 0 else 0]
        reading = ReplicaSnapshot(
            running_requests=second % 4, waiting_requests=0, kv_usage=0.5, kv_usage_peak=1.0,
            kv_capacity_tokens=CAPACITIES[second % len(CAPACITIES)], preemptions=steps // 8, engine_steps=steps,
            computed_tokens=30 * steps, kv_token_steps=500.0 * steps, busy_s=busy_s,
        )  # fmt: skip
        self.take(self.manager.on_snapshot(name, reading, self.now_s))

    def missing(self, first, second):
        if self.known:
            name = self.known[first % len(self.known)]
            self.take(self.manager.on_snapshot_missing(name, self.now_s, bool(second % 2)))

    def speculation(self, first, second):
        if self.known:
            reading = SpeculationReading(
                steps=second, drafting_steps=second, drafting_rows=second, drafted_tokens=4 * second,
                accepted_tokens=3 * second, draft_s=0.1, step_s=1.0, regime="low" if second % 2 else "high",
                budget_tokens=second % 9, expected_gain=0.5,
            )  # fmt: skip
            self.take(self.manager.on_speculation(self.known[first % len(self.known)], reading, self.now_s))

    def tick(self, first, second):
        self.take(self.manager.on_tick(self.now_s))

    def weights(self, first, second):
        self.manager.on_weights_updated(self.now_s)
        # Trajectories that asked for nothing in some updates are forgotten, and begin anew.
        self.sessions = {name: begin_s for name, begin_s in self.sessions.items() if name in self.fleet.conversations}

    def step(self, first, second):
        self.take(self.manager.on_step_begin(first % 5, second % 40, self.now_s, 1 + first % 4))

    def forget(self, first, second):
        self.manager.forget_sessions()

    def stray(self, first, second):
        """Ends that nobody waits for: of a turn that never ran, and of one that ran elsewhere."""
        name = f"t{first % TRAJECTORIES}"
        self.take(self.manager.on_turn_end(name, "nobody", "r0", TurnResult(), self.now_s))
        self.take(self.manager.on_turn_end(name, f"s{first % TRAJECTORIES}", "nowhere", TurnResult(), self.now_s))

    def report(self, first, second):
        report = self.manager.report()
        names = set(metric_names(len(self.known)))
        of_the_fleet = {name for name in names if not name.startswith("war/replica/")}
        in_pool = {f"war/replica/{self.fleet.replicas[name].index}/slowness" for name in self.pool}
        assert of_the_fleet | in_pool <= set(report) <= names
        assert all(math.isfinite(value) for value in report.values()), report

    # -- accounts -----------------------------------------------------------------------------------------------------

    def take(self, placements):
        """Turns that start now: each was asked for, and did not start before."""
        for placement in placements:
            held = self.held.pop(placement.session_id)
            assert placement.trajectory_id == f"t{held.trajectory}" and placement.replica_id in self.pool
            assert placement.held_s >= 0 and all(math.isfinite(price) for price in placement.price_s.values())
            self.live[held.trajectory].append(Running(placement.session_id, placement.replica_id))
            self.requests[placement.replica_id] += 1
            self.turns_placed += 1

    def release(self, turn):
        """A turn is over; one of before its replica came back was not counted since."""
        if self.requests.get(turn.replica_id, 0) > 0:
            self.requests[turn.replica_id] -= 1

    def check(self, ticked):
        running = [turn.replica_id for turns in self.live.values() for turn in turns]
        assert {name: replica.inflight for name, replica in self.fleet.replicas.items()} == {
            name: running.count(name) for name in self.known
        }
        assert self.manager.inflight == self.requests
        assert self.turns_asked == self.turns_placed + len(self.held) + self.holds_given_up
        assert self.manager.held_turns == len(self.held)
        self.check_working_sets()
        if self.load is not None:
            self.check_regime()
        if ticked and self.pool:
            assert all(held.due_s > self.now_s - ROUNDING_S for held in self.held.values()), "held beyond the bound"
            if self.config.admission.trajectory_ttl_s is not None:
                deadlines_s = [held.deadline_s for held in self.held.values()]
                assert all(deadline_s > self.now_s - ROUNDING_S for deadline_s in deadlines_s), "its sandbox is gone"

    def check_working_sets(self):
        admitted = 0
        for replica in self.fleet.replicas.values():
            members = list(replica.admitted.values())
            admitted += len(members)
            assert not members or replica.in_pool
            assert replica.kv_tokens == sum(member.context_tokens for member in members)
            groups = [member.group_id for member in members]
            assert {group: count for group, (count, _) in replica.group_prompts.items()} == {
                group: groups.count(group) for group in groups if group
            }
            prompts = sum(tokens for _, tokens in replica.group_prompts.values())
            needs = prompts + sum(member.need_tokens for member in members) + replica.common_tokens * bool(members)
            assert math.isclose(replica.working_set_tokens, needs, abs_tol=1e-3)
        assert self.fleet.admitted == admitted
        assert self.fleet.inflight == sum(len(turns) for turns in self.live.values())

    def check_regime(self):
        if self.load.regime != self.regime:
            self.regime = self.load.regime
            assert self.regime == "high" or self.now_s - self.changed_s >= DWELL_S, "the regime flaps"
            self.changed_s = self.now_s

    def wind_up(self):
        """Everything comes to its end, and nothing is left."""
        self.up(0, 0)
        while self.held or any(self.live.values()):
            while any(self.live.values()):
                self.end(0, 1)
                self.check(ticked=False)
            self.now_s = max([self.now_s, *(held.due_s + ROUNDING_S for held in self.held.values())])
            self.tick(0, 0)
            self.check(ticked=True)
        for number in range(TRAJECTORIES):
            self.finish(number, 0)
        self.report(0, 0)
        assert not (self.manager._trajectories or self.fleet.conversations or self.fleet.admitted)
        assert not self.manager._cache_view._contexts
        assert not any(replica.working_set_tokens for replica in self.fleet.replicas.values())
