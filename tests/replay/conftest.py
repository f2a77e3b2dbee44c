"""A recorded run: a small random rollout in which turns are held, moved and lost."""

import json
import random

import pytest

from verl_war.core.config import AdmissionConfig, SchedulingConfig, WarConfig
from verl_war.core.journal import RecordingManager, as_record, header
from verl_war.core.types import ReplicaSnapshot, SpeculationReading, Turn, TurnResult

CONFIG = WarConfig(
    scheduling=SchedulingConfig(enabled=True), admission=AdmissionConfig(enabled=True, wait_for_thrash=False), seed=11
)


def reading(tokens, steps):
    return ReplicaSnapshot(running_requests=3, waiting_requests=0, kv_usage=0.5, kv_usage_peak=0.6,
                           kv_capacity_tokens=20_000, preemptions=steps // 100, engine_steps=steps,
                           computed_tokens=tokens, kv_token_steps=500.0 * steps, busy_s=0.02 * steps)  # fmt: skip


def speculation(steps):
    return SpeculationReading(steps=steps, drafting_steps=steps // 2, drafting_rows=steps, drafted_tokens=4 * steps,
                              accepted_tokens=3 * steps, draft_s=0.0001 * steps, step_s=0.02 * steps,
                              regime="low" if steps // 70 % 2 else "high", budget_tokens=steps // 70 % 2 * 8,
                              expected_gain=0.4)  # fmt: skip


def rollout(manager, seed=3, trajectories=60, turns=6):
    """Drive a manager through a step of multi-turn trajectories in groups of four."""
    rng = random.Random(seed)
    now_s = 100.0
    for replica in ("r0", "r1", "r2"):
        manager.on_replica_up(replica, now_s)
        manager.on_snapshot(replica, reading(0, 0), now_s)
    manager.on_step_begin(0, trajectories, now_s, group_size=4)
    left = {f"t{i}": turns + rng.randrange(5) for i in range(trajectories)}
    running, tokens = {}, dict.fromkeys(left, 900)
    asking, steps = list(left), 0

    def start(placements):
        running.update({placement.trajectory_id: placement.replica_id for placement in placements})

    while left:
        now_s += rng.random() / 7
        steps += 7
        if asking and rng.random() < 0.5:
            name = asking.pop(0)
            group = f"g{int(name[1:]) // 4}"
            chain = tuple(range(int(name[1:]) // 4 * 1000, int(name[1:]) // 4 * 1000 + tokens[name] // 64))
            start(manager.on_turn(Turn(session_id=f"{name}s", trajectory_id=name, group_id=group,
                                       prompt_tokens=tokens[name], block_hashes=chain), now_s))  # fmt: skip
        elif running:
            name = rng.choice(sorted(running))
            replica = running.pop(name)
            result = TurnResult(completion_tokens=rng.randrange(20, 200), num_cached_tokens=tokens[name] // 128 * 64)
            start(manager.on_turn_end(name, f"{name}s", replica, result, now_s))
            tokens[name] += result.completion_tokens + rng.randrange(400)
            left[name] -= 1
            if left[name]:
                asking.append(name)
            else:
                del left[name]
                start(manager.on_trajectory_end(name, False, now_s))
        if steps % 21 == 0:
            start(manager.on_snapshot(f"r{steps // 21 % 3}", reading(40 * steps, steps), now_s))
        if steps % 35 == 0:
            start(manager.on_speculation("r1", speculation(steps), now_s))
        if steps == 7 * 40:
            start(manager.on_replica_down("r2", now_s, is_lost=True))
        if steps == 7 * 90:
            start(manager.on_replica_up("r2", now_s))
        start(manager.on_tick(now_s))
    manager.on_weights_updated(now_s)
    manager.forget_sessions()
    manager.report()


@pytest.fixture(scope="session")
def recorded_lines():
    entries = []
    rollout(RecordingManager(CONFIG, False, entries.append))
    return [json.dumps(header(CONFIG, False)), *(json.dumps(as_record(entry)) for entry in entries)]


@pytest.fixture
def journal(tmp_path, recorded_lines):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(line + "\n" for line in recorded_lines))
    return path
