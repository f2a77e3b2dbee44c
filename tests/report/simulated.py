"""Journals of simulated rollouts, with readings of speculation that follow the load."""

import dataclasses
import json

from verl_war.core.config import parse_war_config
from verl_war.core.journal import RecordingManager, as_record, header
from verl_war.core.types import SpeculationReading
from verl_war.sim.hardware import PROFILES
from verl_war.sim.simulator import Fleet, Simulator
from verl_war.sim.workload import SHAPES, generate

STEP_GAP_S = 20.0
"""What training takes between two simulated rollouts."""

SETTINGS = {
    "scheduling": {"enabled": True},
    "admission": {"enabled": True, "wait_for_thrash": False},
    "regime": {"enter_kv_share": 0.0, "leave_kv_share": 0.0},
    "speculation": {"enabled": True},
    "seed": 3,
}


class _Shifted:
    """Hands a simulated rollout's events to a manager that lives on, later and with names of its own."""

    def __init__(self, manager, step, offset_s, speculation):
        self._manager, self._step, self._offset_s, self._speculation = manager, step, offset_s, speculation

    def _name(self, name):
        return f"{self._step}-{name}"

    def _back(self, placements):
        strip = lambda name: name.partition("-")[2]  # noqa: E731
        return [dataclasses.replace(it, session_id=strip(it.session_id), trajectory_id=strip(it.trajectory_id))
                for it in placements]  # fmt: skip

    def on_replica_up(self, replica_id, now_s):
        return self._back(self._manager.on_replica_up(replica_id, now_s + self._offset_s))

    def on_replica_down(self, replica_id, now_s):
        return self._back(self._manager.on_replica_down(replica_id, now_s + self._offset_s, is_lost=True))

    def on_step_begin(self, policy_step, num_trajectories, now_s, group_size=1):
        del policy_step
        now_s += self._offset_s
        return self._back(self._manager.on_step_begin(self._step, num_trajectories, now_s, group_size))

    def on_turn(self, turn, now_s):
        turn = dataclasses.replace(
            turn, session_id=self._name(turn.session_id), trajectory_id=self._name(turn.trajectory_id),
            group_id=self._name(turn.group_id), policy_step=self._step,
        )  # fmt: skip
        return self._back(self._manager.on_turn(turn, now_s + self._offset_s))

    def on_turn_end(self, trajectory_id, session_id, replica_id, result, now_s):
        names = self._name(trajectory_id), self._name(session_id)
        return self._back(self._manager.on_turn_end(*names, replica_id, result, now_s + self._offset_s))

    def on_trajectory_end(self, trajectory_id, failed, now_s):
        return self._back(self._manager.on_trajectory_end(self._name(trajectory_id), failed, now_s + self._offset_s))

    def on_snapshot(self, replica_id, snapshot, now_s):
        now_s += self._offset_s
        reading = self._speculation(replica_id, snapshot)
        started = self._manager.on_speculation(replica_id, reading, now_s)
        return self._back([*started, *self._manager.on_snapshot(replica_id, snapshot, now_s)])

    def on_tick(self, now_s):
        self.now_s = now_s + self._offset_s
        return self._back(self._manager.on_tick(self.now_s))


class _Speculation:
    """Invented counters: drafts while at most `most` requests run, accepted less the more there are."""

    def __init__(self, most=12):
        self._most = most
        self._last = {}

    def __call__(self, replica_id, snapshot):
        steps, counts = self._last.get(replica_id, (0, [0, 0, 0, 0]))
        grown = max(0, snapshot.engine_steps - steps)
        rows = snapshot.running_requests
        is_low = 0 < rows <= self._most
        budget = max(2, 24 // rows) if is_low else 0
        if is_low:
            drafted = grown * rows * budget
            counts = [counts[0] + grown, counts[1] + grown * rows, counts[2] + drafted,
                      counts[3] + int(drafted * (0.75 - 0.03 * rows))]  # fmt: skip
        self._last[replica_id] = snapshot.engine_steps, counts
        return SpeculationReading(
            steps=snapshot.engine_steps, drafting_steps=counts[0], drafting_rows=counts[1], drafted_tokens=counts[2],
            accepted_tokens=counts[3], draft_s=2e-5 * snapshot.engine_steps, step_s=snapshot.busy_s,
            regime="low" if is_low else "high", budget_tokens=budget, expected_gain=1.2 / rows if is_low else 0.0,
        )  # fmt: skip


def simulate(path, *, replicas=4, load=24, steps=2, settings=None, hardware="h100_8b", workload="default", **fleet):
    """Write the journal of so many simulated steps."""
    config = parse_war_config(settings or SETTINGS)
    now_s = 100.0
    with path.open("w") as file:
        file.write(json.dumps(header(config, False)) + "\n")
        manager = RecordingManager(config, False, lambda entry: file.write(json.dumps(as_record(entry)) + "\n"))
        fleet = Fleet(hardware=PROFILES[hardware], replicas=replicas, **fleet)
        speculation = _Speculation()
        for step in range(1, steps + 1):
            trajectories = generate(SHAPES[workload], round(replicas * load), step)
            outcome = Simulator(fleet, trajectories, _Shifted(manager, step, now_s, speculation)).run()
            now_s += outcome.makespan_s
            manager.on_weights_updated(now_s)
            manager.report()
            now_s += STEP_GAP_S
    return path
