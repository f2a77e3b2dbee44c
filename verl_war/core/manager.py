"""The workload manager: events of the rollout in, decisions and metrics out.

It is driven by the live router and by the simulator, and has no clock, no I/O and no knowledge of Ray, vLLM or verl.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

from verl_war.core.cache_view import CacheView
from verl_war.core.config import WarConfig
from verl_war.core.fleet import Conversation, Fleet, Replica
from verl_war.core.machine_profile import MachineProfile
from verl_war.core.placement import StockPlacement
from verl_war.core.progress import Progress
from verl_war.core.scheduler import SCHEDULER_METRICS, Scheduler, Start
from verl_war.core.step_stats import StepStats
from verl_war.core.step_time import StepTimeFit
from verl_war.core.trajectory import PendingTurn, Trajectory
from verl_war.core.types import Placement, ReplicaSnapshot, SpeculationReading, Turn, TurnResult

logger = logging.getLogger(__name__)

LOST_AFTER_UPDATES = 4
"""Weight updates after which a trajectory that asked for no turn meanwhile is forgotten, its room given back: nobody
will say that it ended. Agent loops leave turns behind that they do not wait for, and turns outside of an agent loop
belong to no trajectory that could end. A tool call of an asynchronous trainer may last for a step or two."""


@dataclass(slots=True)
class _ReplicaPeaks:
    live_trajectories: int = 0
    kv_tokens: int = 0
    kv_usage: float = 0.0
    preemptions_seen: int = 0
    working_set_tokens: float = 0.0


class WorkloadManager:
    """State of all live trajectories and replicas, and the decision when and where each turn runs.

    Args:
        config: Settings of WAR.
        full_determinism: `rollout.full_determinism` of verl.
        profile: Step times of the machine, measured earlier; None = unknown.

    Every event carries `now_s`, seconds of one monotonic clock, and returns the turns that may start because of it.
    A turn that `on_turn` does not return is held until a later event returns it.
    """

    def __init__(
        self, config: WarConfig, full_determinism: bool = False, profile: MachineProfile | None = None
    ) -> None:
        rng = random.Random(config.seed)
        self._fleet = Fleet()
        self._cache_view = CacheView(config.block_size_tokens)
        self._progress = Progress(config.scheduling.estimate_progress)
        self._step_time = StepTimeFit(None if profile is None else profile.step_time)
        self._stock = StockPlacement(rng, full_determinism)
        self._scheduler: Scheduler | None = None
        if config.scheduling.enabled or config.admission.enabled:
            self._scheduler = Scheduler(config, self._fleet, self._cache_view, self._progress, rng)
            self._scheduler.placement.model = self._step_time.value()
        self._trajectories: dict[str, Trajectory] = {}
        self._peaks: dict[str, _ReplicaPeaks] = {}
        self._stats = StepStats()

    @property
    def inflight(self) -> dict[str, int]:
        """Requests in flight of every replica in the pool."""
        return self._stock.inflight

    @property
    def held_turns(self) -> int:
        """Turns that wait for admission."""
        return len(self._scheduler.queue) if self._scheduler is not None else 0

    @property
    def is_loaded(self) -> bool:
        """Whether scheduling or admission is in force now."""
        return self._scheduler is not None and self._scheduler.is_in_force

    def on_step_begin(
        self, policy_step: int, num_trajectories: int, now_s: float, group_size: int = 1
    ) -> list[Placement]:
        """A rollout of so many trajectories begins, `group_size` of each prompt; before its first turn."""
        if self._scheduler is not None:
            self._scheduler.on_step_begin(num_trajectories, group_size, now_s)
        return self._drain(now_s)

    def on_replica_up(self, replica_id: str, now_s: float) -> list[Placement]:
        """A replica joined the pool or comes back to it."""
        self._stock.add_replica(replica_id)
        self._fleet.add_replica(replica_id)
        self._peaks.setdefault(replica_id, _ReplicaPeaks())
        return self._drain(now_s)

    def on_replica_down(self, replica_id: str, now_s: float, is_lost: bool = False) -> list[Placement]:
        """A replica left the pool, or broke if `is_lost`; what its cache held is not counted on any more.

        When it was the last one, held turns go on waiting for another.
        """
        self._stats.replicas_lost += is_lost
        self._stock.remove_replica(replica_id)
        self._cache_view.drop(replica_id)
        for conversation in self._fleet.remove_replica(replica_id):
            conversation.retained = False
        return self._drain(now_s)

    def on_turn(self, turn: Turn, now_s: float) -> list[Placement]:
        """A client wants to run a turn.

        Raises:
            RuntimeError: No replica is in the pool.
            ValueError: The conversation has a held turn already, or is one of another trajectory.
        """
        if self._scheduler is not None and self._scheduler.queue.find(turn.session_id) is not None:
            raise ValueError(
                f"session {turn.session_id} asked for a turn while one of its turns is held; expected one at a time"
            )
        if not self._fleet.pool_size:
            # The very text on which verl's asynchronous client waits.
            raise RuntimeError("No available servers in load balancer")
        known = self._fleet.conversations.get(turn.session_id)
        if known is not None and known.trajectory_id != turn.trajectory_id:
            raise ValueError(
                f"session {turn.session_id} of trajectory {turn.trajectory_id} is in use by trajectory "
                f"{known.trajectory_id}; expected a request id of its own for every conversation"
            )
        trajectory = self._trajectories.setdefault(turn.trajectory_id, Trajectory(now_s, turn.group_id, turn.validate))
        conversation = self._fleet.conversation_of(turn, now_s)
        if turn.session_id in trajectory.sessions and conversation.turns_begun:
            self._progress.on_turn_growth(turn.prompt_tokens - conversation.prompt_tokens)
        trajectory.sessions[turn.session_id] = None
        trajectory.updates_idle = 0
        conversation.prompt_tokens = turn.prompt_tokens
        if self._scheduler is None:
            return [self._begin(self._place_as_stock(turn, conversation), now_s)]
        return self._begin_all(self._scheduler.request(turn, conversation, now_s), now_s)

    def on_turn_end(self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult,
                    now_s: float) -> list[Placement]:  # fmt: skip
        """A turn returned or failed. A turn that was never placed, or ended before, only logs a warning."""
        trajectory = self._trajectories.get(trajectory_id)
        pending = trajectory.take_pending(session_id, replica_id) if trajectory is not None else None
        if trajectory is None or pending is None:
            logger.warning("turn of trajectory %s ended on %s but is not pending there", trajectory_id, replica_id)
            return []
        self._stock.release(replica_id)
        conversation = self._fleet.conversations[session_id]
        self._fleet.end_turn(conversation, replica_id)
        conversation.last_end_s = now_s
        if not (result.failed or result.aborted):
            self._learn(trajectory, pending, conversation, result, now_s)
        if conversation.replica_id == replica_id:
            grown = pending.turn.prompt_tokens + result.completion_tokens - conversation.context_tokens
            self._resize(conversation, max(0, grown), trajectory.validate)
            conversation.retained = not result.failed
        if not trajectory.validate:
            if pending.predicted_s is not None and not result.failed:
                self._stats.on_priced_turn(pending.predicted_s, now_s - pending.begin_s)
            self._stats.on_turn_end(replica_id, pending.turn.prompt_tokens, pending.believed_tokens, result)
        return self._drain(now_s)

    def on_turn_abandoned(self, session_id: str, now_s: float) -> list[Placement]:
        """The client of a held turn went away before the turn was admitted."""
        if self._scheduler is not None:
            self._scheduler.abandon(session_id)
        return self._drain(now_s)

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> list[Placement]:
        """A trajectory ended. Turns it still had pending are given up; an unknown one had no turn and is ignored."""
        trajectory = self._trajectories.pop(trajectory_id, None)
        if trajectory is None:
            return []
        self._clear(trajectory)
        if not failed and not trajectory.validate:
            self._progress.on_trajectory_end(trajectory.group_id, trajectory.turns)
        if not trajectory.validate:
            self._stats.on_trajectory_end(trajectory.begin_s, now_s, failed)
            if self._scheduler is not None:
                self._scheduler.guard.on_trajectory_end(now_s)
        return self._drain(now_s)

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> list[Placement]:
        """Take in an engine's readings. A restarted engine counts its preemptions from zero again."""
        replica, peaks = self._fleet.replicas[replica_id], self._peaks[replica_id]
        self._fleet.freed += replica.is_stale
        replica.is_stale = False
        if snapshot.preemptions < peaks.preemptions_seen:
            peaks.preemptions_seen = 0
        preempted = snapshot.preemptions - peaks.preemptions_seen
        peaks.preemptions_seen = snapshot.preemptions
        peaks.kv_usage = max(peaks.kv_usage, snapshot.kv_usage_peak)
        self._stats.preemptions += preempted
        scheduler = self._scheduler
        begins_anew = scheduler is not None and scheduler.on_capacity(replica, snapshot.kv_capacity_tokens, now_s)
        self._fleet.on_capacity(replica, snapshot.kv_capacity_tokens)
        window = replica.pace.window(snapshot, now_s)
        if window is not None:
            self._step_time.observe(*window)
            replica.pace.update(window, self._step_time.value())
            self._fleet.on_pace(replica)
        if scheduler is not None:
            scheduler.placement.model = self._step_time.value()
            if not begins_anew:  # this reading is of the time before
                busy_s = None if window is None else window.known_busy_s
                scheduler.trust.on_reading(replica, busy_s, max(0, preempted), now_s)
            scheduler.control(replica, now_s)
        return self._drain(now_s)

    def on_snapshot_missing(self, replica_id: str, now_s: float, is_rejected: bool = False) -> list[Placement]:
        """A replica's readings are overdue, or make no sense: until the next, admission keeps a wider margin on it."""
        self._stats.snapshots_missing += 1
        self._stats.snapshots_rejected += is_rejected
        self._fleet.replicas[replica_id].is_stale = True
        return self._drain(now_s)

    def on_speculation(self, replica_id: str, reading: SpeculationReading, now_s: float) -> list[Placement]:
        """Take in how an engine speculates: what drafts bring there makes its decoding cheaper."""
        replica = self._fleet.replicas[replica_id]
        # Engines start without drafts.
        old = replica.speculation.regime if replica.speculation is not None else "high"
        replica.speculation = reading
        replica.draft_yield.on_reading(reading.accepted_tokens)
        if reading.regime != old:
            logger.info(
                "replica %s: speculation %s -> %s (%d in flight, %d live; budget %d tokens, expected gain %.0f%%)",
                *(replica_id, old, reading.regime, replica.inflight, len(replica.admitted)),
                *(reading.budget_tokens, 100 * reading.expected_gain),
            )
        return self._drain(now_s)

    def on_tick(self, now_s: float) -> list[Placement]:
        """Time has passed: held turns may be overdue. To be called about twice a second."""
        if self._scheduler is not None:
            self._scheduler.on_tick(now_s)
        return self._drain(now_s)

    def on_weights_updated(self, now_s: float) -> None:
        """The policy changed on all replicas; verl clears their prefix caches with it."""
        self._cache_view.drop_all()
        for conversation in self._fleet.conversations.values():
            conversation.retained = False
        self._forget_lost()
        if self._scheduler is not None:
            self._scheduler.on_step_end({trajectory.group_id for trajectory in self._trajectories.values()})

    def on_decision_time(self, seconds: float) -> None:
        """How long the caller measured one `on_turn` to take."""
        self._stats.decision_times_s.append(seconds)

    def on_process_time(self, seconds: float) -> None:
        """Processor time that the caller's process took since the last report."""
        self._stats.router_cpu_s += seconds

    def forget_sessions(self) -> int:
        """Drop all stickiness, as verl asks when it changes between training and rollout."""
        for conversation in self._fleet.conversations.values():
            if conversation.inflight == 0:
                self._fleet.withdraw(conversation)
                conversation.replica_id = ""
                conversation.retained = False
        return self._stock.forget_sessions()

    def report(self) -> dict[str, float]:
        """Metrics since the last report; see `step_stats.METRICS`. Starts the next window."""
        # A replica may have worked in this window and left the pool before its end.
        active = [name for name in self._peaks if name in self._stock.inflight or self._stats.worked(name)]
        metrics = self._stats.report(active)
        metrics["war/trajectories_live"] = sum(not trajectory.validate for trajectory in self._trajectories.values())
        for replica_id in active:
            metrics.update(self._report_replica(replica_id))
        metrics.update(
            self._scheduler.report() if self._scheduler is not None else dict.fromkeys(SCHEDULER_METRICS, 0.0)
        )
        self._stats = StepStats()
        return metrics

    def _report_replica(self, replica_id: str) -> dict[str, float]:
        replica, peaks = self._fleet.replicas[replica_id], self._peaks[replica_id]
        prefix = f"war/replica/{replica.index}"
        values = {
            f"{prefix}/live_trajectories_peak": float(peaks.live_trajectories),
            f"{prefix}/kv_tokens_peak": float(peaks.kv_tokens),
            f"{prefix}/kv_usage_peak": peaks.kv_usage,
            f"{prefix}/working_set_peak": peaks.working_set_tokens / max(1, replica.capacity_tokens),
            f"{prefix}/trusted_share": replica.trusted_share,
            f"{prefix}/thrashed": float(replica.has_thrashed),
            f"{prefix}/slowness": replica.pace.slowness,
        }
        peaks.live_trajectories, peaks.kv_tokens, peaks.kv_usage = len(replica.admitted), replica.kv_tokens, 0.0
        peaks.working_set_tokens = replica.working_set_tokens
        return values

    def _clear(self, trajectory: Trajectory) -> None:
        """Take a trajectory out of all accounts."""
        for pending in trajectory.pending:
            self._stock.release(pending.replica_id)
            self._fleet.end_turn(self._fleet.conversations[pending.turn.session_id], pending.replica_id)
        for session_id in trajectory.sessions:
            if self._scheduler is not None:
                self._scheduler.abandon(session_id)
            self._fleet.withdraw(self._fleet.conversations.pop(session_id))
            self._cache_view.forget(session_id)

    def _forget_lost(self) -> None:
        """Clear the trajectories that nobody will end."""
        queue = self._scheduler.queue if self._scheduler is not None else None
        lost = []
        for trajectory_id, trajectory in self._trajectories.items():
            is_held = queue is not None and any(queue.find(session_id) for session_id in trajectory.sessions)
            trajectory.updates_idle = 0 if trajectory.pending or is_held else trajectory.updates_idle + 1
            if trajectory.updates_idle >= LOST_AFTER_UPDATES:
                lost.append(trajectory_id)
        for trajectory_id in lost:
            self._clear(self._trajectories.pop(trajectory_id))
        if lost:
            logger.warning("%d trajectories asked for no turn in %d weight updates and did not end: forgotten (%s)",
                           len(lost), LOST_AFTER_UPDATES, ", ".join(lost[:3]))  # fmt: skip

    def _place_as_stock(self, turn: Turn, conversation: Conversation) -> Start:
        replica_id, reason = self._stock.place(turn)
        replica = self._fleet.replicas[replica_id]
        if conversation.admitted and conversation.replica_id != replica_id:
            self._fleet.withdraw(conversation)
            conversation.retained = False
        if not conversation.admitted:
            if conversation.turns_begun and conversation.replica_id != replica_id:
                conversation.moved_at_turn = conversation.turns_begun
            self._fleet.resize(conversation, turn.prompt_tokens, turn.prompt_tokens)
            self._fleet.admit(conversation, replica, turn.prompt_tokens, 0)
        return Start(turn, conversation, replica, reason)

    def _begin_all(self, starts: Iterable[Start], now_s: float) -> list[Placement]:
        return [self._begin(start, now_s) for start in starts]

    def _drain(self, now_s: float) -> list[Placement]:
        return self._begin_all(self._scheduler.drain(now_s), now_s) if self._scheduler is not None else []

    def _begin(self, start: Start, now_s: float) -> Placement:
        """Account for a turn that starts now."""
        turn, conversation, replica = start.turn, start.conversation, start.replica
        replica_id = replica.replica_id
        if self._scheduler is not None:
            self._stock.count(replica_id)
        moved = conversation.turns_begun > 0 and conversation.last_replica_id != replica_id
        conversation.last_replica_id = replica_id
        self._fleet.begin_turn(conversation)
        self._resize(conversation, turn.prompt_tokens - conversation.context_tokens, turn.validate)
        believed = self._cache_view.believed_tokens(replica_id, turn.session_id, turn.group_id, turn.block_hashes)
        self._cache_view.record(replica_id, turn.session_id, turn.group_id, turn.block_hashes)
        uncached = max(0, turn.prompt_tokens - believed)
        replica.allocated_tokens += uncached
        prefill_s = self._step_time.value().prefill_s(uncached) * replica.pace.slowness
        replica.prefill_until_s = max(replica.prefill_until_s, now_s) + prefill_s
        trajectory = self._trajectories[turn.trajectory_id]
        trajectory.turns += 1
        retained_since_s = conversation.last_end_s if conversation.retained and not moved else None
        trajectory.pending.append(
            PendingTurn(turn, replica_id, believed, retained_since_s, now_s, start.price_s.get("turn_s"))
        )
        if not turn.validate:
            self._stats.on_start(start.reason, start.held_s, moved, start.price_s)
        return Placement(session_id=turn.session_id, trajectory_id=turn.trajectory_id, replica_id=replica_id,
                         priority=turn.priority, reason=start.reason, price_s=start.price_s,
                         held_s=start.held_s)  # fmt: skip

    def _learn(
        self, trajectory: Trajectory, pending: PendingTurn, conversation: Conversation, result: TurnResult,
        now_s: float,
    ) -> None:  # fmt: skip
        """What a turn that returned tells about progress and about the engine's cache."""
        replica: Replica = self._fleet.replicas[pending.replica_id]
        replica.allocated_tokens += result.completion_tokens
        replica.draft_yield.on_turn_end(result.completion_tokens)
        if not trajectory.validate:
            self._progress.on_turn_output(result.completion_tokens)
            if self._scheduler is not None:
                self._scheduler.guard.on_turn_end(result.completion_tokens)
        if result.num_cached_tokens is None or self._scheduler is None:
            return
        if pending.retained_since_s is not None:
            self._scheduler.trust.on_turn_end(
                replica, pending.believed_tokens, result.num_cached_tokens, pending.retained_since_s
            )

    def _resize(self, conversation: Conversation, grown_tokens: int, validate: bool) -> None:
        """The context grew; peaks are those of training trajectories."""
        self._fleet.resize(
            conversation, conversation.context_tokens + grown_tokens, conversation.need_tokens + grown_tokens
        )
        if conversation.replica_id and not validate:
            replica, peaks = self._fleet.replicas[conversation.replica_id], self._peaks[conversation.replica_id]
            peaks.live_trajectories = max(peaks.live_trajectories, len(replica.admitted))
            peaks.kv_tokens = max(peaks.kv_tokens, replica.kv_tokens)
            peaks.working_set_tokens = max(peaks.working_set_tokens, replica.working_set_tokens)
