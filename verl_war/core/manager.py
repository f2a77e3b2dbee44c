"""The workload manager: events of the rollout in, decisions and metrics out.

It is driven by the live router and has no clock, no I/O and no knowledge of Ray, vLLM or verl.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

from verl_war.core.cache_view import CacheView
from verl_war.core.config import WarConfig
from verl_war.core.placement import StockPlacement
from verl_war.core.step_stats import StepStats
from verl_war.core.types import Placement, ReplicaSnapshot, Turn, TurnResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Session:
    """One conversation of a trajectory: where its context lies and how long it is."""

    replica_id: str
    context_tokens: int = 0


@dataclass(slots=True)
class _Trajectory:
    begin_s: float
    validate: bool
    sessions: dict[str, _Session] = field(default_factory=dict)
    pending: list[_PendingTurn] = field(default_factory=list)

    def take_pending(self, session_id: str, replica_id: str) -> _PendingTurn | None:
        """Remove and return the oldest matching turn; an agent loop may have several under way at once."""
        for position, pending in enumerate(self.pending):
            if pending.turn.session_id == session_id and pending.replica_id == replica_id:
                return self.pending.pop(position)
        return None


@dataclass(slots=True)
class _PendingTurn:
    turn: Turn
    replica_id: str
    believed_tokens: int


@dataclass(slots=True)
class _Replica:
    index: int
    live_trajectories: int = 0
    kv_tokens: int = 0
    live_trajectories_peak: int = 0
    kv_tokens_peak: int = 0
    kv_usage_peak: float = 0.0
    preemptions_seen: int = 0

    def note_peaks(self) -> None:
        self.live_trajectories_peak = max(self.live_trajectories_peak, self.live_trajectories)
        self.kv_tokens_peak = max(self.kv_tokens_peak, self.kv_tokens)


class WorkloadManager:
    """State of all live trajectories and replicas, and the decision where each turn runs.

    Args:
        config: Settings of WAR.
        full_determinism: `rollout.full_determinism` of verl.

    Every event carries `now_s`, seconds of one monotonic clock.
    """

    def __init__(self, config: WarConfig, full_determinism: bool = False) -> None:
        self._placement = StockPlacement(random.Random(config.seed), full_determinism)
        self._cache_view = CacheView(config.block_size_tokens)
        self._trajectories: dict[str, _Trajectory] = {}
        self._replicas: dict[str, _Replica] = {}
        self._stats = StepStats()
        self._preemptions = 0

    @property
    def inflight(self) -> dict[str, int]:
        """Requests in flight of every replica in the pool."""
        return self._placement.inflight

    def on_replica_up(self, replica_id: str, now_s: float) -> None:
        """A replica joined the pool or comes back to it."""
        self._placement.add_replica(replica_id)
        self._replicas.setdefault(replica_id, _Replica(index=len(self._replicas)))

    def on_replica_down(self, replica_id: str, now_s: float) -> None:
        """A replica left the pool; what its cache held is not counted on any more."""
        self._placement.remove_replica(replica_id)
        self._cache_view.drop(replica_id)

    def on_turn(self, turn: Turn, now_s: float) -> Placement:
        """Place a turn.

        Raises:
            RuntimeError: No replica is in the pool.
        """
        placement = self._placement.place(turn)
        replica_id = placement.replica_id
        trajectory = self._trajectories.setdefault(
            turn.trajectory_id, _Trajectory(begin_s=now_s, validate=turn.validate)
        )
        session = trajectory.sessions.get(turn.session_id)
        if session is not None and session.replica_id != replica_id:
            self._leave(session)
            session = None
            self._stats.turns_moved += not turn.validate
        if session is None:
            session = trajectory.sessions[turn.session_id] = _Session(replica_id)
            self._replicas[replica_id].live_trajectories += 1
        self._set_context(session, turn.prompt_tokens, turn.validate)
        believed = self._cache_view.believed_tokens(replica_id, turn.block_hashes)
        self._cache_view.record(replica_id, turn.block_hashes)
        trajectory.pending.append(_PendingTurn(turn, replica_id, believed))
        return placement

    def on_turn_end(self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult,
                    now_s: float) -> None:  # fmt: skip
        """A turn returned or failed. A turn that was never placed, or ended before, only logs a warning."""
        trajectory = self._trajectories.get(trajectory_id)
        pending = trajectory.take_pending(session_id, replica_id) if trajectory is not None else None
        if trajectory is None or pending is None:
            logger.warning("turn of trajectory %s ended on %s but is not pending there", trajectory_id, replica_id)
            return
        self._placement.release(replica_id)
        session = trajectory.sessions[session_id]
        if session.replica_id == replica_id:
            context_tokens = pending.turn.prompt_tokens + result.completion_tokens
            self._set_context(session, context_tokens, trajectory.validate)
        if not trajectory.validate:
            self._stats.on_turn_end(replica_id, pending.turn.prompt_tokens, pending.believed_tokens, result)

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> None:
        """A trajectory ended. Turns it still had pending are given up; an unknown one had no turn and is ignored."""
        trajectory = self._trajectories.pop(trajectory_id, None)
        if trajectory is None:
            return
        for pending in trajectory.pending:
            self._placement.release(pending.replica_id)
        for session in trajectory.sessions.values():
            self._leave(session)
        if not trajectory.validate:
            self._stats.on_trajectory_end(trajectory.begin_s, now_s, failed)

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> None:
        """Take in an engine's readings. A restarted engine counts its preemptions from zero again."""
        replica = self._replicas[replica_id]
        if snapshot.preemptions < replica.preemptions_seen:
            replica.preemptions_seen = 0
        self._preemptions += snapshot.preemptions - replica.preemptions_seen
        replica.preemptions_seen = snapshot.preemptions
        replica.kv_usage_peak = max(replica.kv_usage_peak, snapshot.kv_usage_peak)

    def on_weights_updated(self, now_s: float) -> None:
        """The policy changed on all replicas; verl clears their prefix caches with it."""
        self._cache_view.drop_all()

    def on_decision_time(self, seconds: float) -> None:
        """How long the caller measured one `on_turn` to take."""
        self._stats.decision_times_s.append(seconds)

    def forget_sessions(self) -> int:
        """Drop all stickiness, as verl asks when it changes between training and rollout."""
        return self._placement.forget_sessions()

    def report(self) -> dict[str, float]:
        """Metrics since the last report; see `step_stats.METRICS`. Starts the next window."""
        # A replica may have worked in this window and left the pool before its end.
        active = [name for name in self._replicas if name in self._placement.inflight or self._stats.worked(name)]
        metrics = self._stats.report(active)
        metrics["war/trajectories_live"] = sum(not trajectory.validate for trajectory in self._trajectories.values())
        metrics["war/preemptions"] = self._preemptions
        for replica_id in active:
            metrics.update(self._report_replica(self._replicas[replica_id]))
        self._stats = StepStats()
        self._preemptions = 0
        return metrics

    def _report_replica(self, replica: _Replica) -> dict[str, float]:
        prefix = f"war/replica/{replica.index}"
        values = {
            f"{prefix}/live_trajectories_peak": float(replica.live_trajectories_peak),
            f"{prefix}/kv_tokens_peak": float(replica.kv_tokens_peak),
            f"{prefix}/kv_usage_peak": replica.kv_usage_peak,
        }
        replica.live_trajectories_peak = replica.live_trajectories
        replica.kv_tokens_peak = replica.kv_tokens
        replica.kv_usage_peak = 0.0
        return values

    def _leave(self, session: _Session) -> None:
        replica = self._replicas[session.replica_id]
        replica.live_trajectories -= 1
        replica.kv_tokens -= session.context_tokens

    def _set_context(self, session: _Session, context_tokens: int, validate: bool) -> None:
        replica = self._replicas[session.replica_id]
        replica.kv_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens
        if not validate:
            replica.note_peaks()
