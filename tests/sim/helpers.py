"""Small machines, turns and readings for the simulator's tests."""

from verl_war.core.types import ReplicaSnapshot, Turn, TurnResult
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.kv_cache import UNLIMITED_BLOCKS, PathPart
from verl_war.sim.policies.base import PolicyContext
from verl_war.sim.trace import TrajectorySpec, TurnSpec


def machine(**changes):
    """A step takes 1 s, and 10 ms more for each token that it prefills."""
    values = {"name": "test", "overlapped": False, "base_s": 1.0, "per_token_s": 0.01, "kv_capacity_tokens": 64 * 100}
    return HardwareProfile(**(values | changes))


def own(key):
    """Path of a context that shares nothing."""
    return (PathPart(key, UNLIMITED_BLOCKS),)


def context(specs=(), hardware=None, replicas=2, seed=0, **changes):
    return PolicyContext(hardware or machine(), replicas, seed, tuple(specs), **changes)


def spec(name, prompt=640, turns=((10, 1.0, 100),), group="g", system=0, start_s=0.0):
    return TrajectorySpec(
        trajectory_id=name,
        group_id=group,
        system_tokens=system,
        prompt_tokens=prompt,
        start_s=start_s,
        turns=tuple(TurnSpec(*turn) for turn in turns),
    )


def turn(name, prompt=640, hashes=()):
    return Turn(session_id=name, trajectory_id=name, prompt_tokens=prompt, block_hashes=tuple(hashes))


def finish(policy, name, replica_id, tokens=10, now_s=0.0):
    return policy.on_turn_end(name, name, replica_id, TurnResult(completion_tokens=tokens), now_s)


def reading(kv_usage):
    return ReplicaSnapshot(
        running_requests=0, waiting_requests=0, kv_usage=kv_usage, kv_usage_peak=kv_usage, kv_capacity_tokens=6400,
        preemptions=0, engine_steps=1,
    )  # fmt: skip


def up(policy, *names):
    for name in names:
        policy.on_replica_up(name, 0.0)
    return policy


def placed(starts):
    """Trajectory -> replica of the starts."""
    return {start.trajectory_id: start.replica_id for start in starts}
