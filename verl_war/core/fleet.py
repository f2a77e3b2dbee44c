"""State of the replicas and of the conversations on them. Keeps accounts, decides nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from verl_war.core.cost_model import DraftYield, ReplicaPace
from verl_war.core.types import SpeculationReading, Turn

STALE_SHARE = 0.85
"""Share of its trusted tokens that a replica is filled to while its engine does not report: the room of the last
reading may be taken by what grew since."""


@dataclass(slots=True)
class Conversation:
    """One conversation of a trajectory: where its context lies and how long it is.

    Attributes:
        replica_id: Its home; empty before the first placement and while it is held without one.
        last_replica_id: Where its last turn was placed.
        admitted: Whether its KV counts in the home's working set.
        prompt_tokens: Context sent with its last turn.
        context_tokens: Length of the context as last known.
        need_tokens: What it counts in the working set, its group's prompt excluded.
        turns_begun: Turns placed.
        inflight: Turns being generated; 0 while a tool runs.
        moved_at_turn: `turns_begun` when it last changed its home; -1 before.
        retained: Whether its KV was left alone since its last turn: not paused, not moved.
        last_end_s: When its last turn ended.
        allocated_mark: The home's `allocated_tokens` when it was paused.
    """

    session_id: str
    trajectory_id: str
    group_id: str
    validate: bool
    begin_s: float
    replica_id: str = ""
    last_replica_id: str = ""
    admitted: bool = False
    prompt_tokens: int = 0
    context_tokens: int = 0
    need_tokens: float = 0.0
    turns_begun: int = 0
    inflight: int = 0
    moved_at_turn: int = -1
    retained: bool = False
    last_end_s: float = float("-inf")
    allocated_mark: int = 0


@dataclass(slots=True)
class Replica:
    """Accounts of one replica.

    Attributes:
        index: Number in order of joining.
        in_pool: Whether turns may be placed on it.
        capacity_tokens: KV tokens that its engine says it holds; 0 until it has reported.
        trusted_share: Share of the capacity that admission fills; `core.admission` moves it.
        has_thrashed: Whether its engine was seen to lose so much of its cache that holding conversations pays.
        working_set_tokens: Needs of the admitted conversations, each of their groups' prompts once, and once what all
            prompts share.
        reserved_tokens: Needs of siblings that are expected to follow.
        admitted: Admitted conversations by id.
        group_prompts: Group -> (admitted conversations, prompt tokens of its own).
        common_tokens: What all prompts shared, as known when the first of its conversations was admitted: 0 for the
            first group of all, whose own prompt then counts whole.
        allocated_tokens: KV tokens that its turns have taken since it joined, cache hits excluded.
        prefill_until_s: When the prefill placed so far will be done, if nothing else ran.
        is_stale: Whether its engine's reports are overdue.
        speculation: Its engine's last reading; None before the first.
        draft_yield: What drafts bring there.
    """

    replica_id: str
    index: int
    in_pool: bool = False
    capacity_tokens: int = 0
    trusted_share: float = 1.0
    has_thrashed: bool = False
    working_set_tokens: float = 0.0
    reserved_tokens: float = 0.0
    kv_tokens: int = 0
    inflight: int = 0
    admitted: dict[str, Conversation] = field(default_factory=dict)
    group_prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    common_tokens: int = 0
    allocated_tokens: int = 0
    prefill_until_s: float = 0.0
    pace: ReplicaPace = field(default_factory=ReplicaPace)
    is_stale: bool = False
    speculation: SpeculationReading | None = None
    draft_yield: DraftYield = field(default_factory=DraftYield)
    stamp: int = 0

    @property
    def trusted_tokens(self) -> float:
        """Capacity that admission counts on; unlimited while the engine has not told any."""
        if not self.capacity_tokens:
            return float("inf")
        return self.capacity_tokens * self.trusted_share * (STALE_SHARE if self.is_stale else 1.0)

    @property
    def load(self) -> float:
        """Working set, siblings to come included, times the replica's slowness: what newcomers should avoid."""
        return (self.working_set_tokens + self.reserved_tokens) * self.pace.slowness


class Fleet:
    """All replicas and conversations.

    Every change costs O(log n); the least loaded replicas come from a heap whose outdated entries are skipped.
    `freed` counts the changes that may have made room, `pool_size` the replicas on which turns may be placed.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.conversations: dict[str, Conversation] = {}
        self.inflight = 0
        self.admitted = 0
        self.freed = 0
        self.pool_size = 0
        self.least_capacity_tokens = self.most_capacity_tokens = float("inf")
        """Least and greatest capacity that an engine of the pool has told; unlimited while none has."""
        self.common_tokens = 0
        """Beginning that the prompts of all groups share: in each cache once, as vLLM's prefix caching has it."""
        self._changes = 0
        self._least: tuple[int, int, list[Replica]] = (-1, 0, [])
        self._heap: list[tuple[float, int, int, Replica]] = []

    def add_replica(self, replica_id: str) -> Replica:
        """Put a replica in the pool, anew or again."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            replica = self.replicas[replica_id] = Replica(replica_id, index=len(self.replicas))
        self.pool_size += not replica.in_pool
        replica.in_pool = True
        self.freed += 1
        self._update_capacity()
        self._changed(replica)
        return replica

    def remove_replica(self, replica_id: str) -> list[Conversation]:
        """Take a replica out of the pool; returns the conversations that were admitted on it, now homeless."""
        replica = self.replicas.get(replica_id)
        if replica is None or not replica.in_pool:
            return []
        replica.in_pool = False
        self.pool_size -= 1
        self._update_capacity()
        self._changed(replica)
        evicted = list(replica.admitted.values())
        for conversation in evicted:
            self.withdraw(conversation)
            conversation.replica_id = ""
        return evicted

    @property
    def duty(self) -> float:
        """Share of the admitted conversations that are being served now; the others wait for tools. 1 when idle."""
        return self.inflight / self.admitted if self.admitted and self.inflight else 1.0

    def pool(self) -> list[Replica]:
        """Replicas in the pool."""
        return [replica for replica in self.replicas.values() if replica.in_pool]

    def least_loaded(self, count: int) -> list[Replica]:
        """Up to `count` replicas of the pool with the least load, ascending."""
        changes, known, least = self._least
        if changes == self._changes and known >= count:
            return least[:count]
        found: list[tuple[float, int, int, Replica]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if entry[2] == entry[3].stamp and entry[3].in_pool:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        self._least = (self._changes, count, [entry[3] for entry in found])
        return self._least[2][:count]

    def on_capacity(self, replica: Replica, capacity_tokens: int) -> None:
        """An engine tells how much KV it has."""
        if capacity_tokens != replica.capacity_tokens:
            replica.capacity_tokens = capacity_tokens
            self.freed += 1
            self._update_capacity()

    def on_pace(self, replica: Replica) -> None:
        """A replica's slowness, and so its load, has changed."""
        self._changed(replica)

    def conversation_of(self, turn: Turn, now_s: float) -> Conversation:
        """The conversation that a turn belongs to, begun if it is new."""
        conversation = self.conversations.get(turn.session_id)
        if conversation is None:
            conversation = self.conversations[turn.session_id] = Conversation(
                turn.session_id, turn.trajectory_id, turn.group_id, turn.validate, now_s
            )
        return conversation

    def admit(self, conversation: Conversation, replica: Replica, need_tokens: float, prompt_tokens: int) -> None:
        """Count a conversation in a replica's working set; it was in none. `prompt_tokens` are its group's alone."""
        assert not conversation.admitted, f"{conversation.session_id} is admitted on {conversation.replica_id}"
        conversation.admitted = True
        conversation.replica_id = replica.replica_id
        conversation.need_tokens = need_tokens
        self.admitted += 1
        if not replica.admitted:
            replica.common_tokens = self.common_tokens
            replica.working_set_tokens += replica.common_tokens
        replica.admitted[conversation.session_id] = conversation
        replica.working_set_tokens += need_tokens
        replica.kv_tokens += conversation.context_tokens
        if conversation.group_id:
            members, counted = replica.group_prompts.get(conversation.group_id, (0, 0))
            if members == 0:
                counted = prompt_tokens
                replica.working_set_tokens += counted
            replica.group_prompts[conversation.group_id] = (members + 1, counted)
        self._changed(replica)

    def withdraw(self, conversation: Conversation) -> None:
        """Stop counting an admitted conversation; it keeps its home."""
        if not conversation.admitted:
            return
        replica = self.replicas[conversation.replica_id]
        conversation.admitted = False
        self.admitted -= 1
        self.freed += 1
        del replica.admitted[conversation.session_id]
        replica.working_set_tokens -= conversation.need_tokens
        replica.kv_tokens -= conversation.context_tokens
        if conversation.group_id:
            members, counted = replica.group_prompts[conversation.group_id]
            if members == 1:
                del replica.group_prompts[conversation.group_id]
                replica.working_set_tokens -= counted
            else:
                replica.group_prompts[conversation.group_id] = (members - 1, counted)
        if not replica.admitted:
            # Sums of floats drift; an empty replica is the moment to be exact again.
            replica.working_set_tokens = 0.0
        self._changed(replica)

    def resize(self, conversation: Conversation, context_tokens: int, need_tokens: float) -> None:
        """The context of a conversation is this long now."""
        if conversation.admitted:
            replica = self.replicas[conversation.replica_id]
            replica.working_set_tokens += need_tokens - conversation.need_tokens
            replica.kv_tokens += context_tokens - conversation.context_tokens
            self.freed += need_tokens < conversation.need_tokens
            self._changed(replica)
        conversation.context_tokens = context_tokens
        conversation.need_tokens = need_tokens

    def reserve(self, replica: Replica, tokens: float) -> None:
        """Expect so many tokens more (negative: fewer) of siblings on a replica."""
        replica.reserved_tokens = max(0.0, replica.reserved_tokens + tokens)
        self._changed(replica)

    def begin_turn(self, conversation: Conversation) -> None:
        """A turn of an admitted conversation starts on its home."""
        conversation.inflight += 1
        conversation.turns_begun += 1
        self.inflight += 1
        self.replicas[conversation.replica_id].inflight += 1

    def end_turn(self, conversation: Conversation, replica_id: str) -> None:
        """A turn ended on the replica on which it was started."""
        conversation.inflight -= 1
        self.inflight -= 1
        self.replicas[replica_id].inflight -= 1

    def _update_capacity(self) -> None:
        told = [replica.capacity_tokens for replica in self.pool() if replica.capacity_tokens]
        self.least_capacity_tokens = float(min(told, default=float("inf")))
        self.most_capacity_tokens = float(max(told, default=float("inf")))

    def _changed(self, replica: Replica) -> None:
        replica.stamp += 1
        self._changes += 1
        if not replica.in_pool:
            return
        heapq.heappush(self._heap, (replica.load, replica.index, replica.stamp, replica))
        if len(self._heap) > 64 + 8 * len(self.replicas):
            self._heap = [(r.load, r.index, r.stamp, r) for r in self.pool()]
            heapq.heapify(self._heap)
