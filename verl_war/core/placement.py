"""Which replica serves a turn. This is the one place of that decision."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from verl_war.core.cache_view import CacheView
from verl_war.core.config import SchedulingConfig
from verl_war.core.fleet import Conversation, Fleet, Replica
from verl_war.core.progress import Progress
from verl_war.core.step_time import StepTime
from verl_war.core.types import PRICE_TERMS, Reason, Turn

STOCK_SESSION_CAPACITY = 10_000
"""verl forgets the least recently used session beyond this many
(`DEFAULT_ROUTING_CACHE_SIZE`, verl/workers/rollout/router.py, 0.9.1)."""


class StockPlacement:
    """Stock verl's rule: a session stays on its replica; a new one goes where the fewest requests are in flight.

    Requests in flight are those now being generated: a trajectory waiting for its tool counts nothing.
    Given the same seed and the same calls it decides as `GlobalRequestLoadBalancer` does.

    Source: verl/workers/rollout/router.py, verl 0.9.1.
    """

    def __init__(self, rng: random.Random, full_determinism: bool = False) -> None:
        self._rng = rng
        self._full_determinism = full_determinism
        self._inflight: dict[str, int] = {}
        self._session_replica: OrderedDict[str, str] = OrderedDict()

    @property
    def inflight(self) -> dict[str, int]:
        """Requests in flight of every replica in the pool."""
        return dict(self._inflight)

    def add_replica(self, replica_id: str) -> None:
        """Put a replica in the pool with no requests in flight (also when it was there before, as verl does)."""
        self._inflight[replica_id] = 0

    def remove_replica(self, replica_id: str) -> None:
        """Take a replica out of the pool; its sessions are placed anew at their next turn."""
        self._inflight.pop(replica_id, None)

    def place(self, turn: Turn) -> tuple[str, Reason]:
        """Choose the replica of a turn and count it as in flight there.

        Raises:
            RuntimeError: The pool is empty. verl's asynchronous client waits on this very text.
        """
        replica_id, reason = self._choose(turn.session_id)
        self._session_replica[turn.session_id] = replica_id
        self._session_replica.move_to_end(turn.session_id)
        if len(self._session_replica) > STOCK_SESSION_CAPACITY:
            self._session_replica.popitem(last=False)
        self.count(replica_id)
        return replica_id, reason

    def count(self, replica_id: str) -> None:
        """Count one more request in flight on a replica of the pool."""
        self._inflight[replica_id] += 1

    def release(self, replica_id: str) -> None:
        """Count one request fewer in flight; a replica no longer in the pool is ignored."""
        if self._inflight.get(replica_id, 0) > 0:
            self._inflight[replica_id] -= 1

    def forget_sessions(self) -> int:
        """Drop all stickiness and return how many sessions were known."""
        count = len(self._session_replica)
        self._session_replica.clear()
        return count

    def _choose(self, session_id: str) -> tuple[str, Reason]:
        home = self._session_replica.get(session_id)
        if home in self._inflight:
            return home, Reason.STICKY
        if not self._inflight:
            raise RuntimeError("No available servers in load balancer")
        if self._full_determinism:
            pool = list(self._inflight)
            return pool[hash(session_id) % len(pool)], Reason.DETERMINISTIC
        return self._rng.choice(_least(self._inflight.items())), Reason.LEAST_INFLIGHT


def _least(counts: Iterable[tuple[str, int]]) -> list[str]:
    pairs = list(counts)
    fewest = min(count for _, count in pairs)
    return [replica_id for replica_id, count in pairs if count == fewest]


PRICE_EPSILON = 0.1
"""Replicas count as equal when their price exceeds the least by no more than this share of the spread of all prices:
prices are estimates, but only their differences matter, since most of a price is the same everywhere. The least loaded
of them is taken, ties at random: a strict minimum sends every new conversation of a burst to one replica (verl issue
7613)."""

SAMPLE_EVERY = 8
"""Of so many decisions one is looked at for what decided it; looking at all would double their cost."""

CANDIDATES = 4
"""Least loaded replicas that are priced besides home and those that hold the group's prompt. Two random choices
already remove most of the imbalance of one (Mitzenmacher 2001); the least loaded of a heap are better than random."""

GROUP_CANDIDATES = 4
"""Replicas with the group's prompt that are priced at most."""


class PricedPlacement:
    """Prices replicas in seconds and picks among the cheapest.

    The price of serving a conversation's coming turns on a replica adds up, times the replica's observed slowness:
    the prefill of what its cache lacks, a transfer for what it keeps in host memory, the prefill queued before it,
    the decoding of the tokens still expected at the replica's batch, KV and yield of drafts, and the overflow: what its
    working set exceeds the trusted capacity by is prefilled again every turn, by somebody.
    """

    def __init__(
        self, config: SchedulingConfig, fleet: Fleet, cache_view: CacheView, progress: Progress, rng: random.Random
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._cache_view = cache_view
        self._progress = progress
        self._rng = rng
        self.model = StepTime()
        self.decisive = dict.fromkeys(PRICE_TERMS, 0)
        self.sampled = 0
        self._decisions = 0

    def price(self, turn: Turn, conversation: Conversation, replica: Replica, now_s: float) -> dict[str, float]:
        """Terms of the price of `replica` in seconds, their sum as `total`, and the time of one turn as `turn_s`."""
        model, slowness = self.model, replica.pace.slowness
        at_home = conversation.admitted and conversation.replica_id == replica.replica_id
        cached = self._cache_view.believed_tokens(replica.replica_id, turn.session_id, turn.group_id, turn.block_hashes)
        lost, offloaded = self._evicted(conversation, replica, cached)
        turns = self._progress.remaining_turns(turn.group_id, conversation.turns_begun)
        duty = self._fleet.duty
        decoding = duty * (len(replica.admitted) - at_home) + 1
        kv_tokens = duty * (replica.kv_tokens - at_home * conversation.context_tokens) + turn.prompt_tokens
        working_set = replica.working_set_tokens + (0.0 if at_home else conversation.need_tokens)
        overflow = max(0.0, working_set - replica.trusted_tokens)
        iterations = self._progress.output_tokens / replica.draft_yield.tokens_per_iteration
        decode_s = slowness * iterations * model.step_s(decoding, kv_tokens)
        terms = {
            "prefill_s": slowness * model.prefill_s(max(0, turn.prompt_tokens - cached + lost)),
            "offload_s": slowness * model.prefill_s(offloaded) * self._config.offload_price_share,
            "queue_s": max(0.0, replica.prefill_until_s - now_s),
            "decode_s": turns * decode_s,
            "overflow_s": slowness * turns * model.prefill_s(overflow),
        }
        terms["total"] = sum(terms.values())
        terms["turn_s"] = terms["prefill_s"] + terms["offload_s"] + terms["queue_s"] + decode_s
        return terms

    def _evicted(self, conversation: Conversation, replica: Replica, cached: int) -> tuple[float, float]:
        """Tokens of a paused conversation's believed cache that are gone, and that went to host memory.

        Blocks of a paused conversation are the first that the engine evicts, but not before everything that was
        free is taken (vLLM evicts the least recently used block).
        """
        if conversation.admitted or conversation.replica_id != replica.replica_id or not replica.capacity_tokens:
            return 0.0, 0.0
        spare = max(0.0, replica.capacity_tokens - replica.working_set_tokens)
        taken = max(0.0, replica.allocated_tokens - conversation.allocated_mark - spare)
        evicted = min(float(cached), taken)
        offloaded = min(evicted, max(0.0, self._config.offload_capacity_tokens - (taken - evicted)))
        return evicted - offloaded, offloaded

    def candidates(self, turn: Turn, conversation: Conversation) -> list[Replica]:
        """Home, replicas that hold the group's prompt, and the least loaded ones; all in the pool, none twice."""
        found: dict[str, Replica] = {}
        home = self._fleet.replicas.get(conversation.replica_id)
        if home is not None and home.in_pool:
            found[home.replica_id] = home
        for replica_id in self._cache_view.holders(turn.group_id)[:GROUP_CANDIDATES]:
            if self._fleet.replicas[replica_id].in_pool:
                found[replica_id] = self._fleet.replicas[replica_id]
        for replica in self._fleet.least_loaded(CANDIDATES):
            found[replica.replica_id] = replica
        return list(found.values())

    def cheapest(
        self, turn: Turn, conversation: Conversation, replicas: Sequence[Replica], now_s: float
    ) -> tuple[Replica, dict[str, float]]:
        """The least loaded of the replicas whose price is within `PRICE_EPSILON` of the least; ties at random."""
        priced = [(self.price(turn, conversation, replica, now_s), replica) for replica in replicas]
        self._note_decisive([terms for terms, _ in priced])
        totals = [terms["total"] for terms, _ in priced]
        limit = min(totals) + PRICE_EPSILON * (max(totals) - min(totals))
        near = [(terms, replica) for terms, replica in priced if terms["total"] <= limit]
        load = min(replica.load for _, replica in near)
        terms, replica = self._rng.choice([pair for pair in near if pair[1].load <= load])
        return replica, terms

    def _note_decisive(self, prices: Sequence[dict[str, float]]) -> None:
        """Of every `SAMPLE_EVERY`th decision, note which terms it would have gone elsewhere without."""
        self._decisions += 1
        if len(prices) < 2 or self._decisions % SAMPLE_EVERY:
            return
        self.sampled += 1
        cheapest = min(prices, key=lambda terms: terms["total"])
        for name in PRICE_TERMS:
            if min(prices, key=lambda terms: terms["total"] - terms[name]) is not cheapest:
                self.decisive[name] += 1

    def take_decisive(self) -> tuple[int, dict[str, int]]:
        """Decisions looked at since the last call, and how many each term of the price decided."""
        sampled, decisive = self.sampled, self.decisive
        self.sampled, self.decisive = 0, dict.fromkeys(PRICE_TERMS, 0)
        return sampled, decisive

    def move(
        self, turn: Turn, conversation: Conversation, home: Replica, now_s: float
    ) -> tuple[Replica, dict[str, float]] | None:
        """Another replica if that saves more than the hysteresis; None = stay.

        A conversation that has just moved stays for `move_min_turns`, and a home that is hardly busier than the
        least loaded replica is not priced at all.
        """
        config = self._config
        if conversation.moved_at_turn >= 0:
            if conversation.turns_begun - conversation.moved_at_turn < config.move_min_turns:
                return None
        others = [replica for replica in self._fleet.least_loaded(2) if replica is not home]
        if not others or home.load <= others[0].load * config.move_min_load_ratio:
            return None
        here = self.price(turn, conversation, home, now_s)["total"]
        there, terms = self.cheapest(turn, conversation, others, now_s)
        saved_s = here - terms["total"]
        if saved_s < max(config.move_min_saving_s, config.move_min_saving_share * here):
            return None
        return there, terms | {"saved_s": saved_s}
