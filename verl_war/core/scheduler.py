"""Admission and placement together: which waiting turns start now, and where."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verl_war.core.admission import HeldTurn, HoldQueue, TrustController, deadline_s, pause_order
from verl_war.core.cache_view import CacheView
from verl_war.core.config import WarConfig
from verl_war.core.fleet import Conversation, Fleet, Replica
from verl_war.core.groups import GroupPlacement
from verl_war.core.guard import ControlGuard
from verl_war.core.placement import PricedPlacement
from verl_war.core.progress import Progress
from verl_war.core.regime import FleetLoad
from verl_war.core.types import PRICE_TERMS, Reason, Turn

logger = logging.getLogger(__name__)

DEGENERATE_AFTER = 50
"""Decisions that must have been looked at before a term that decided none of them is called degenerate."""

SCHEDULER_METRICS = (
    *("war/turns_paused", "war/regime_high", "war/regime_changes", "war/kv_load_peak", "war/degenerate_terms"),
    *("war/guard_trial", "war/guard_off", "war/guard_speedup", "war/cache_lost_share"),
    *(f"war/decisive_{name.removesuffix('_s')}" for name in PRICE_TERMS),
)
"""What `Scheduler.report` gives."""

THRASH_SHARE = 0.4
"""Share of the cache that engines may lose in a step under admission before that is worth a warning: where contexts are
short and cheap to read again, the controller lets them lose as much as a fifth."""

LOOKAHEAD = 8
"""Held turns that are tried when those ranked before them do not fit: small ones fill gaps, but the scan is short."""


@dataclass(frozen=True, slots=True)
class Start:
    """A turn that starts now, as `WorkloadManager` takes it up."""

    turn: Turn
    conversation: Conversation
    replica: Replica
    reason: Reason
    price_s: dict[str, float] = field(default_factory=dict)
    held_s: float = 0.0


class Scheduler:
    """Decides for the fleet when `scheduling` or `admission` is on.

    With `scheduling` alone nothing is ever held; with `admission` alone a turn goes home or to the replica with the
    fewest requests in flight among those where it fits. While the fleet is not loaded, and when the guard says so,
    neither is in force, and a turn goes home or to the replica with the fewest requests in flight: stock verl's rule.
    """

    def __init__(
        self, config: WarConfig, fleet: Fleet, cache_view: CacheView, progress: Progress, rng: random.Random
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._cache_view = cache_view
        self._progress = progress
        self._rng = rng
        self.placement = PricedPlacement(config.scheduling, fleet, cache_view, progress, rng)
        self.queue = HoldQueue()
        self.trust = TrustController()
        self.groups = GroupPlacement(fleet)
        self.load = FleetLoad(config.regime, fleet)
        self.guard = ControlGuard(config.guard)
        self.paused = 0
        self._prompt_tokens: dict[str, int] = {}
        self._common_blocks: tuple[int, ...] | None = None
        self._full_since: int | None = None
        self._has_thrashed = False
        self._most_capacity_tokens = float("inf")

    @property
    def is_in_force(self) -> bool:
        """Whether anything but stock verl's rule decides now."""
        return self.load.regime == "high" and self.guard.in_force

    @property
    def _is_placing(self) -> bool:
        return self._config.scheduling.enabled and self.is_in_force

    @property
    def _is_admitting(self) -> bool:
        return self._config.admission.enabled and self.is_in_force

    def on_step_begin(self, num_trajectories: int, group_size: int, now_s: float) -> None:
        """A step of so many trajectories begins, `group_size` of each prompt."""
        self.guard.on_step_begin(not self._fleet.conversations, now_s)
        self._fleet.freed += 1  # the guard may have decided otherwise
        self._has_thrashed = any(replica.has_thrashed for replica in self._fleet.pool())
        self.groups.on_step_begin(num_trajectories, group_size)
        self.load.on_step_begin(num_trajectories)
        self.look(now_s)

    def on_step_end(self, live_groups: set[str]) -> None:
        """The policy changed, and the caches were cleared; these groups still have trajectories."""
        change = self.guard.on_step_end(self.load.was_high)
        if change is not None:
            logger.warning("fleet: scheduling and admission %s -> %s (%s)", change.old, change.new, change.cause)
        self.groups.clear()
        self.load.on_step_end()
        self._common_blocks = None
        self._prompt_tokens = {group: n for group, n in self._prompt_tokens.items() if group in live_groups}

    def look(self, now_s: float) -> None:
        """See whether the fleet is loaded."""
        change = self.load.update(len(self.queue) > 0, now_s)
        if change is not None:
            self._fleet.freed += 1  # what did not fit before may run now
            logger.info(
                "fleet: load %s -> %s (%s; %d conversations on %d replicas)",
                *(change.old, change.new, change.cause, len(self._fleet.conversations), self._fleet.pool_size),
            )

    def request(self, turn: Turn, conversation: Conversation, now_s: float) -> list[Start]:
        """A turn wants to run; the pool is not empty. Returns the turns that start now, this one unless it is held."""
        if turn.group_id not in self._prompt_tokens or not (turn.group_id or conversation.turns_begun):
            self._prompt_tokens[turn.group_id] = turn.prompt_tokens
            self._learn_common(turn)
        self.load.on_turn(turn.prompt_tokens, is_first=not conversation.turns_begun)
        if self.load.is_due():
            self.look(now_s)
        is_oversize = self._fits_nowhere(turn)
        self._fleet.resize(conversation, turn.prompt_tokens, 0.0 if is_oversize else self._need_tokens(turn))
        if conversation.admitted:
            start = self._continue(turn, conversation, now_s)
            if start is not None:
                return [start]
        elif not self._is_admitting:
            return [self._place(turn, conversation, self._candidates(turn, conversation), Reason.PRICED, now_s)]
        remaining = self._progress.remaining_turns(turn.group_id, conversation.turns_begun)
        held = HeldTurn(turn, conversation, now_s)
        if is_oversize:
            return [self._start_oversize(held, now_s)]
        self.queue.push(held, remaining, deadline_s(conversation, self._config.admission))
        if self._full_since == self._fleet.freed and len(self.queue) > LOOKAHEAD:
            # Nothing was freed since those ranked first did not fit: this one waits behind them.
            return self._overdue(now_s)
        return self.drain(now_s)

    def drain(self, now_s: float) -> list[Start]:
        """Start the held turns that must run or that fit now."""
        starts = self._overdue(now_s) + self._grown_too_long(now_s)
        if not self.queue or self._full_since == self._fleet.freed or not self._fleet.pool_size:
            return starts
        skipped = 0
        for held in self.queue.in_order():
            replicas = self._fitting(held.turn, held.conversation)
            if replicas:
                starts.append(self._start_held(held, replicas, Reason.RESUMED, now_s))
            elif self._fits_nowhere(held.turn):  # the last replica that might have had more told its KV
                starts.append(self._start_oversize(held, now_s))
            else:
                skipped += 1
                if skipped >= LOOKAHEAD:
                    self._full_since = self._fleet.freed
                    break
        return starts

    def on_capacity(self, replica: Replica, capacity_tokens: int, now_s: float) -> bool:
        """An engine tells how much KV it has; returns whether what was learnt of the replica is forgotten for it."""
        if not self.trust.on_capacity(replica, capacity_tokens, now_s):
            return False
        self._has_thrashed = any(other.has_thrashed for other in self._fleet.pool())
        self._fleet.freed += 1
        return True

    def on_tick(self, now_s: float) -> None:
        """Time has passed."""
        if self._config.scheduling.enabled:
            self.load.look_at_speed()
        self.look(now_s)

    def abandon(self, session_id: str) -> None:
        """The client of a held turn gave it up."""
        held = self.queue.find(session_id)
        if held is not None:
            self.queue.remove(held)

    def report(self) -> dict[str, float]:
        """Metrics since the last call; `SCHEDULER_METRICS` names them."""
        sampled, decisive = self.placement.take_decisive()
        changes, load_peak = self.load.take_counts()
        paused, self.paused = self.paused, 0
        is_known = sampled >= DEGENERATE_AFTER
        shares = (decisive[name] / sampled if sampled else 0.0 for name in PRICE_TERMS)
        degenerate = sum(count == 0 for count in decisive.values()) if is_known else 0
        lost_share = self.trust.take_lost_share()
        is_limiting = self._is_admitting and any(map(self._is_limited, self._fleet.pool()))
        if is_limiting and not self.guard.was_trial and lost_share > THRASH_SHARE:
            logger.warning(
                "fleet: thrashing in spite of admission (engines lost %.0f%% of the cache of conversations left alone; "
                "expected under %.0f%%). Do other clients use these engines, or is vLLM's prefix caching off?",
                *(100 * lost_share, 100 * THRASH_SHARE),
            )
        guard = (self.guard.was_trial, self.guard.is_losing, self.guard.speedup, lost_share)
        values = (paused, self.load.regime == "high", changes, load_peak, degenerate, *guard, *shares)
        return {name: float(value) for name, value in zip(SCHEDULER_METRICS, values, strict=True)}

    def control(self, replica: Replica, now_s: float) -> None:
        """Let the controller look at a replica's evidence."""
        is_admitting, was_limited = self._is_admitting, self._is_limited(replica)
        is_full = len(self.queue) > 0 and self._limits_newcomers(replica)
        changed = self.trust.decide(replica, is_admitting, was_limited, is_full, self.placement.model, now_s)
        self._has_thrashed |= replica.has_thrashed
        if self._config.admission.enabled and replica.has_thrashed and not was_limited:
            self._fleet.freed += 1
            logger.warning(
                "replica %s: admission unlimited -> limited (its engine lost cache that was needed again; others are "
                "filled only as far as conversations fit)",
                replica.replica_id,
            )
        if changed is not None:
            self._fleet.freed += 1
            logger.info(
                "replica %s: trusted share of KV %.2f -> %.2f (%d of %d tokens in the working set, %d turns held)",
                *(replica.replica_id, *changed, replica.working_set_tokens, replica.capacity_tokens, len(self.queue)),
            )

    def _learn_common(self, turn: Turn) -> None:
        """The first prompt of a group: what it has in common with those of all others of the step, in whole blocks."""
        known = self._common_blocks
        shared = tuple(turn.block_hashes if known is None else _common(known, turn.block_hashes))
        self._common_blocks = shared
        # The prompt of a single group is no beginning that all share.
        self._fleet.common_tokens = 0 if known is None else len(shared) * self._config.block_size_tokens

    def _group_tokens(self, group_id: str) -> int:
        """Prompt of a group besides what all groups share; 0 without a group."""
        return max(0, self._prompt_tokens.get(group_id, 0) - self._fleet.common_tokens) if group_id else 0

    def _need_tokens(self, turn: Turn) -> float:
        """Working set of a conversation besides its group's prompt: its own context and the growth to come."""
        shared = self._prompt_tokens.get(turn.group_id, 0) if turn.group_id else self._fleet.common_tokens
        growth = self._config.admission.growth_turns * self._progress.growth_tokens
        return max(0, turn.prompt_tokens - shared) + growth

    def _continue(self, turn: Turn, conversation: Conversation, now_s: float) -> Start | None:
        """Next turn of an admitted conversation: at home, moved, or None when it has to be paused."""
        home = self._fleet.replicas[conversation.replica_id]
        if self._is_admitting and self._relieve(home, conversation, now_s):
            return None
        if self._is_placing and conversation.inflight == 0:
            move = self.placement.move(turn, conversation, home, now_s)
            if move is not None and self._has_room(move[0], turn, conversation):
                self._fleet.withdraw(conversation)
                conversation.moved_at_turn = conversation.turns_begun
                return self._admit(turn, conversation, move[0], Reason.MOVED, move[1], 0.0)
        return Start(turn, conversation, home, Reason.STICKY)

    def _relieve(self, home: Replica, conversation: Conversation, now_s: float) -> bool:
        """Pause conversations between turns while the working set is over the limit; True if this one is among them."""
        limit = self._config.admission.pause_fraction * home.trusted_tokens
        if home.working_set_tokens <= limit or not (self._is_limited(home) and not home.is_stale):
            return False
        for victim in pause_order(home):
            if len(home.admitted) <= 1 or home.working_set_tokens <= limit:
                break
            if now_s >= deadline_s(victim, self._config.admission):
                continue
            self._fleet.withdraw(victim)
            victim.retained = False
            victim.allocated_mark = home.allocated_tokens
            self.paused += 1
            if victim is conversation:
                return True
        return False

    def _is_limited(self, replica: Replica) -> bool:
        """Whether more conversations than fit would lose more than they yield."""
        # Without readings nobody would see it thrash.
        return replica.has_thrashed or replica.is_stale or not self._config.admission.wait_for_thrash

    def _limits_newcomers(self, replica: Replica) -> bool:
        """Whether conversations that are not on the replica may come to it only as far as they fit.

        One that thrashes is enough: the others would be filled with all that it turns away, and a slow one, which
        takes longest to show that it thrashes, most of all (simulated, one of 8 at half speed: filled to 1.7).
        """
        return self._has_thrashed or self._is_limited(replica)

    def _has_room(self, replica: Replica, turn: Turn, conversation: Conversation) -> bool:
        """Whether the conversation fits in the replica's working set, or has it to itself."""
        if not self._is_admitting or not replica.admitted or not self._limits_newcomers(replica):
            return True
        need_tokens = conversation.need_tokens
        if turn.group_id and turn.group_id not in replica.group_prompts:
            need_tokens += self._group_tokens(turn.group_id)
        # One that has not told its capacity has hardly more than the others.
        trusted_tokens = replica.trusted_tokens if replica.capacity_tokens else self._fleet.least_capacity_tokens
        return replica.working_set_tokens + need_tokens <= self._config.admission.admit_fraction * trusted_tokens

    def _fits_nowhere(self, turn: Turn) -> bool:
        """Whether the context alone exceeds the KV of every replica.

        Its engine refuses it whenever it comes (vLLM starts only where `max_model_len` tokens fit in its KV), so that
        letting it go takes no room from others. One that exceeds only what is trusted would run, at the price of what
        others have cached there, and is held.
        """
        if turn.prompt_tokens <= self._fleet.most_capacity_tokens:
            return False
        # Engines that understate their KV are trusted with more, and one that has not told any may have more.
        return all(turn.prompt_tokens > replica.trusted_tokens for replica in self._fleet.pool())

    def _grown_too_long(self, now_s: float) -> list[Start]:
        """Held turns that fit nowhere since the largest replica left or shrank, wherever they are in the queue."""
        before, self._most_capacity_tokens = self._most_capacity_tokens, self._fleet.most_capacity_tokens
        if self._most_capacity_tokens >= before or not self._fleet.pool_size:
            return []
        too_long = [held for held in self.queue.in_order() if self._fits_nowhere(held.turn)]
        return [self._start_oversize(held, now_s) for held in too_long]

    def _start_oversize(self, held: HeldTurn, now_s: float) -> Start:
        """Let a turn go that its engine will refuse: it counts nothing in the working set."""
        self._fleet.resize(held.conversation, held.turn.prompt_tokens, 0.0)
        return self._start_held(held, self._candidates(held.turn, held.conversation), Reason.OVERSIZE, now_s)

    def _candidates(self, turn: Turn, conversation: Conversation) -> list[Replica]:
        if self._is_placing:
            return self.placement.candidates(turn, conversation)
        home = self._fleet.replicas.get(conversation.replica_id)
        return [home] if home is not None and home.in_pool else self._fleet.pool()

    def _fitting(self, turn: Turn, conversation: Conversation) -> list[Replica]:
        replicas = self._candidates(turn, conversation)
        fitting = [replica for replica in replicas if self._has_room(replica, turn, conversation)]
        if not fitting and not self._is_placing:
            fitting = [replica for replica in self._fleet.pool() if self._has_room(replica, turn, conversation)]
        return fitting

    def _overdue(self, now_s: float) -> list[Start]:
        """Held turns that run whether they fit or not."""
        starts: list[Start] = []
        if not self.queue or not self._fleet.pool_size:
            return starts
        admission = self._config.admission
        while (held := self.queue.oldest()) is not None and now_s - held.since_s >= admission.max_hold_s:
            replicas = self._candidates(held.turn, held.conversation)
            starts.append(self._start_held(held, replicas, Reason.STARVED, now_s))
        while (held := self.queue.first_due(now_s)) is not None:
            replicas = self._candidates(held.turn, held.conversation)
            starts.append(self._start_held(held, replicas, Reason.DEADLINE, now_s))
        return starts

    def _start_held(self, held: HeldTurn, replicas: Sequence[Replica], reason: Reason, now_s: float) -> Start:
        self.queue.remove(held)
        held_s = max(0.0, now_s - held.since_s)
        if reason is Reason.RESUMED and held_s <= 0:
            reason = Reason.PRICED
        return self._place(held.turn, held.conversation, replicas, reason, now_s, held_s)

    def _place(
        self, turn: Turn, conversation: Conversation, replicas: Sequence[Replica], reason: Reason, now_s: float,
        held_s: float = 0.0,
    ) -> Start:  # fmt: skip
        if self._is_placing:
            expected = self.groups.replica_of(turn.group_id) if not conversation.turns_begun else None
            if expected is not None and expected in replicas:
                replica, terms = expected, self.placement.price(turn, conversation, expected, now_s)
                reason = Reason.GROUP if reason is Reason.PRICED else reason
            else:
                replica, terms = self.placement.cheapest(turn, conversation, replicas, now_s)
            if not conversation.turns_begun and reason is not Reason.OVERSIZE:
                self.groups.on_placed(turn.group_id, replica, conversation.need_tokens)
        else:
            fewest = min(replica.inflight for replica in replicas)
            replica = self._rng.choice([replica for replica in replicas if replica.inflight == fewest])
            terms = {}
        if not self._is_placing and reason is Reason.PRICED:
            reason = Reason.LEAST_INFLIGHT
        return self._admit(turn, conversation, replica, reason, terms, held_s)

    def _admit(
        self, turn: Turn, conversation: Conversation, replica: Replica, reason: Reason, terms: dict[str, float],
        held_s: float,
    ) -> Start:  # fmt: skip
        if conversation.replica_id != replica.replica_id:
            conversation.retained = False
        group_tokens = 0 if reason is Reason.OVERSIZE else self._group_tokens(turn.group_id)
        self._fleet.admit(conversation, replica, conversation.need_tokens, group_tokens)
        return Start(turn, conversation, replica, reason, terms, held_s)


def _common(one: Sequence[int], other: Sequence[int]) -> Iterator[int]:
    """Blocks with which both begin."""
    return (mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
