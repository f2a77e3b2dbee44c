"""Which conversations run now: the hold queue, and how full a replica may be."""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from verl_war.core.config import AdmissionConfig
from verl_war.core.fleet import Conversation, Replica
from verl_war.core.step_time import StepTime
from verl_war.core.types import Turn

logger = logging.getLogger(__name__)

EVIDENCE_TURNS = 64
"""Turns that returned before the controller looks at a replica: fewer are chance, and calm looks raise the share."""

PLAIN_TURNS = 16
PLAIN_FACTOR = 4.0
"""So many turns are enough if the loss is so many times what is tolerated."""

THRASH_TIME = 0.015
"""Share of an engine's time that it may spend on cached tokens that it lost without being called thrashing: partial
blocks, contexts that agent loops rewrite, and evictions by requests that were never described to the router. On an H100
that is 2% of the tokens; from 5% on, prefill had doubled (simulated, a later step: 1.44 fell to 1.40 at 32B, 1.98 to
1.90 at 8B)."""

OVERFILL_WORTH = 0.25
"""What requests beyond the KV yield of what they would yield if all decoded at once: most of them wait for tools, or in
the engine's queue."""

CALM_TIME = 0.004
"""Below this share, and with conversations held, the replica may be filled further."""

THRASH_MIN_FILL = 0.5
"""Share of the capacity, or of what is trusted if that is less, that the working set must fill before lost cache is
taken for thrash."""

LARGEST_DECREASE = 0.25
"""The trusted share falls by the share of the cache that was lost, at most by this much at once. The first time it
begins at what is resident, which may be several times the capacity."""

INCREASE = 0.03
"""Added to the trusted share after a calm look. Small against a decrease: thrash costs more than a gap."""

RESIZED_SHARE = 0.1
"""Another capacity by more than this is another engine, of which nothing is known yet."""

TRUSTED_SHARE_BOUNDS = (0.1, 4.0)
"""The upper one allows for engines that understate what they hold: host offload, shared prefixes."""


@dataclass(slots=True)
class HeldTurn:
    """A turn that waits for admission."""

    turn: Turn
    conversation: Conversation
    since_s: float
    is_waiting: bool = True


class HoldQueue:
    """Held turns, those with most work ahead first.

    A step ends with its longest trajectory, so the longest start first (LPT list scheduling, Graham 1969; Seer and
    Heddle do the same for rollouts); among equals the one that has come furthest, whose context costs most to hold.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, HeldTurn]] = []
        self._by_deadline: list[tuple[float, int, HeldTurn]] = []
        self._by_age: deque[HeldTurn] = deque()
        self._sessions: dict[str, HeldTurn] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def push(self, held: HeldTurn, remaining_turns: float, deadline_s: float = math.inf) -> None:
        """Queue a turn. `remaining_turns` is the estimate at this moment; at `deadline_s` it has to run."""
        self._count += 1
        entry = (-remaining_turns, -held.conversation.turns_begun, self._count, held)
        heapq.heappush(self._heap, entry)
        self._by_age.append(held)
        if deadline_s < math.inf:
            heapq.heappush(self._by_deadline, (deadline_s, self._count, held))
        self._sessions[held.turn.session_id] = held

    def in_order(self) -> Iterator[HeldTurn]:
        """Waiting turns by rank, without removing them; each is found by popping, so stop early."""
        seen = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if entry[3].is_waiting:
                    seen.append(entry)
                    yield entry[3]
        finally:
            for entry in seen:
                if entry[3].is_waiting:
                    heapq.heappush(self._heap, entry)

    def oldest(self) -> HeldTurn | None:
        """The turn that has waited longest."""
        while self._by_age and not self._by_age[0].is_waiting:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def first_due(self, now_s: float) -> HeldTurn | None:
        """The waiting turn whose deadline is first, if it has come."""
        while self._by_deadline and not self._by_deadline[0][2].is_waiting:
            heapq.heappop(self._by_deadline)
        return self._by_deadline[0][2] if self._by_deadline and self._by_deadline[0][0] <= now_s else None

    def remove(self, held: HeldTurn) -> None:
        """A turn starts or is given up."""
        held.is_waiting = False
        self._sessions.pop(held.turn.session_id, None)
        if not self._sessions:
            self._by_age.clear()
            self._by_deadline.clear()

    def find(self, session_id: str) -> HeldTurn | None:
        """The waiting turn of a conversation."""
        return self._sessions.get(session_id)


@dataclass(slots=True)
class _Evidence:
    """What was seen of a replica since the last look; of turns whose KV was left alone, which had something to lose."""

    busy_s: float = 0.0
    preemptions: int = 0
    turns: int = 0
    believed_tokens: int = 0
    lost_tokens: int = 0
    fill: float = 0.0
    requests: int = 0
    changed_s: float = float("-inf")

    @property
    def lost_share(self) -> float:
        """Share of the cached tokens that were lost; a preemption loses all of its request's."""
        found = self.lost_tokens / self.believed_tokens if self.believed_tokens else 0.0
        return found + self.preemptions / self.turns

    def lost_time(self, token_s: float) -> float:
        """Time for reading lost tokens again, as a share of the engine's time."""
        return self.lost_share * self.believed_tokens * token_s / self.busy_s


@dataclass(slots=True)
class TrustController:
    """Moves each replica's trusted share of its KV capacity: under what is resident on evidence of thrash, up without.

    Evidence are cached tokens that were believed and not found, of turns whose KV was left alone since the last
    change (older ones tell of what that change has already answered), priced in engine time, and preemptions.
    """

    _evidence: dict[str, _Evidence] = field(default_factory=dict)
    _cut: set[str] = field(default_factory=set)
    """Replicas whose share has been lowered before."""
    _learnt_of: dict[str, int] = field(default_factory=dict)
    """Capacity that a replica had when its evidence began."""
    _believed_tokens: int = 0
    _lost_tokens: int = 0

    def on_capacity(self, replica: Replica, capacity_tokens: int, now_s: float) -> bool:
        """An engine tells how much KV it has. The share of another capacity that was trusted says nothing of it.

        Returns:
            Whether the evidence begins anew.
        """
        if not capacity_tokens:  # it has not told yet
            return False
        learnt_of = self._learnt_of.setdefault(replica.replica_id, capacity_tokens)
        if abs(capacity_tokens - learnt_of) <= RESIZED_SHARE * learnt_of:
            return False
        logger.info(
            "replica %s: KV %d -> %d tokens (its engine reports it; trusted share %.2f -> 1.00, admission begins anew)",
            *(replica.replica_id, learnt_of, capacity_tokens, replica.trusted_share),
        )
        self._learnt_of[replica.replica_id] = capacity_tokens
        replica.trusted_share, replica.has_thrashed = 1.0, False
        self._cut.discard(replica.replica_id)
        self._evidence[replica.replica_id] = _Evidence(changed_s=now_s)
        return True

    def on_turn_end(self, replica: Replica, believed_tokens: int, cached_tokens: int, retained_since_s: float) -> None:
        """Take in a turn whose KV was left alone since `retained_since_s` and should have been there."""
        evidence = self._of(replica)
        if retained_since_s < evidence.changed_s:
            return
        lost_tokens = max(0, believed_tokens - cached_tokens)
        evidence.turns += 1
        evidence.believed_tokens += believed_tokens
        evidence.lost_tokens += lost_tokens
        evidence.fill += replica.working_set_tokens / replica.capacity_tokens if replica.capacity_tokens else 0.0
        evidence.requests += len(replica.admitted)
        self._believed_tokens += believed_tokens
        self._lost_tokens += lost_tokens

    def on_reading(self, replica: Replica, busy_s: float | None, preemptions: int, now_s: float) -> None:
        """The engine worked for so many seconds since the last reading, and preempted so many requests.

        None where there is no telling, as after a restart: what its turns lost cannot be priced then, and what was
        cached before tells nothing of its size.
        """
        evidence = self._of(replica)
        if busy_s is None:
            self._evidence[replica.replica_id] = _Evidence(changed_s=now_s)
            return
        evidence.busy_s += busy_s
        evidence.preemptions += preemptions

    def decide(
        self, replica: Replica, is_admitting: bool, is_limited: bool, is_full: bool, model: StepTime, now_s: float
    ) -> tuple[float, float] | None:
        """Change the trusted share if there is evidence.

        Until a replica thrashes for the first time only that is looked for: contexts that are short, or begin alike,
        leave little to lose, and holding some for room that is not missed costs the batch its requests (two cores, 41
        conversations a replica with contexts of 400 tokens, 2.2 times the KV: 6% of the cache lost, 12% longer held).

        Args:
            replica: Whose share.
            is_admitting: Whether admission is in force. While it is not, a loss says nothing of the share, only that
                the replica thrashes.
            is_limited: Whether its conversations are paused when they do not fit.
            is_full: Whether any are held now that could not come to it.
            model: Of its engine's time.
            now_s: Time of the caller.

        Returns:
            (old, new) share, or None when it stays.
        """
        evidence = self._of(replica)
        if evidence.turns < PLAIN_TURNS or not evidence.busy_s > 0.0:
            return None
        fill, requests = evidence.fill / evidence.turns, evidence.requests / evidence.turns
        lost_time = evidence.lost_time(model.token_s * replica.pace.slowness)
        worth = OVERFILL_WORTH * model.base_share(requests, replica.capacity_tokens)
        # Once limited, a replica is filled as far as it loses nothing.
        tolerated = THRASH_TIME + (0.0 if is_limited else worth * math.log(max(1.0, fill)))
        if evidence.turns < EVIDENCE_TURNS and lost_time <= PLAIN_FACTOR * tolerated:
            return None
        old = new = replica.trusted_share
        low, high = TRUSTED_SHARE_BOUNDS
        # What a replica loses while it is far from full, it did not lose to its working set.
        if lost_time > tolerated and fill >= THRASH_MIN_FILL * min(1.0, old):
            if is_admitting:
                # From what is resident: a ceiling that was never reached says nothing, and before the first cut there
                # is none, so that several times the capacity may be.
                new = min(old, fill) * (1 - min(LARGEST_DECREASE, evidence.lost_share))
                if replica.replica_id not in self._cut:
                    new = max(new, fill * (1 - evidence.lost_share))
                new = min(high, max(low, new))
                self._cut.add(replica.replica_id)
            replica.has_thrashed = True
        elif lost_time < CALM_TIME and is_admitting and is_full:
            new = min(high, old + INCREASE)
        is_cut = new != old and lost_time > tolerated
        self._evidence[replica.replica_id] = _Evidence(changed_s=now_s if is_cut else evidence.changed_s)
        if new == old:
            return None
        replica.trusted_share = new
        return old, new

    def _of(self, replica: Replica) -> _Evidence:
        return self._evidence.setdefault(replica.replica_id, _Evidence())

    def take_lost_share(self) -> float:
        """Share of the believed cached tokens that all engines lost since the last call."""
        believed, lost = self._believed_tokens, self._lost_tokens
        self._believed_tokens = self._lost_tokens = 0
        return lost / believed if believed else 0.0


def deadline_s(conversation: Conversation, config: AdmissionConfig) -> float:
    """When a held turn of the conversation has to run for its sandbox's sake."""
    if config.trajectory_ttl_s is None:
        return float("inf")
    return conversation.begin_s + config.trajectory_ttl_s - config.deadline_margin_s


def pause_order(replica: Replica) -> Iterator[Conversation]:
    """Admitted conversations between two turns, in the order in which they are paused.

    The one whose last turn ended longest ago first: the engine evicts the blocks that were left longest (vLLM's LRU),
    so its context is the next to go whoever is paused, and to pause another would lose both. Tool times being
    heavy-tailed, it is also the one that will be missed last. Simulated against the shortest context first: 1.49 over
    1.44 and 2.17 over 2.13 (32B, 128 and 192 trajectories on each of 4 replicas), 1.40 over 1.35 (8B, 64 on 8).
    """
    idle = [
        (conversation.last_end_s, position, conversation)
        for position, conversation in enumerate(replica.admitted.values())
        if conversation.inflight == 0
    ]
    # One or two are paused as a rule: a heap finds them without sorting the others.
    heapq.heapify(idle)
    while idle:
        yield heapq.heappop(idle)[2]
