"""Which replica serves a turn. This is the one place of that decision."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

from verl_war.core.types import Placement, Reason, Turn

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

    def place(self, turn: Turn) -> Placement:
        """Choose the replica of a turn and count it as in flight there.

        Raises:
            RuntimeError: The pool is empty. verl's asynchronous client waits on this very text.
        """
        replica_id, reason = self._choose(turn.session_id)
        self._session_replica[turn.session_id] = replica_id
        self._session_replica.move_to_end(turn.session_id)
        if len(self._session_replica) > STOCK_SESSION_CAPACITY:
            self._session_replica.popitem(last=False)
        self._inflight[replica_id] += 1
        return Placement(replica_id=replica_id, priority=turn.priority, reason=reason)

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
