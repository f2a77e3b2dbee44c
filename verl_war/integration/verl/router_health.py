"""Which replicas can serve: readings of their engines, and who is out of the pool because it broke."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorUnavailableError

from verl_war.core.types import ReplicaSnapshot
from verl_war.integration.verl.failures import GONE_ERRORS, cause_of

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
"""Fast against the seconds in which a working set changes, slow against the cost of a reading."""

CALM_POLL_EVERY_S = 2.0
"""The same while the fleet is not loaded: nothing is held or placed by readings then, and on a machine whose cores the
engines need themselves two a second are a per cent of it."""

POLLS_PER_S = 200
"""Most readings that the router takes in a second: each costs it half a millisecond (scripts/bench_router.py), so that
they stay a tenth of its time. With more than a hundred replicas each is read less often, with 1,000 every 5 s."""

STALE_AFTER_S = 5.0
"""Ten readings missed: more than a busy event loop explains. Three intervals where those add up to more."""

SECOND_LOOK_S = 10.0
"""A replica under suspicion is read twice, this far apart: an engine finishes many iterations in that time."""


@dataclass(slots=True)
class Watched:
    """A replica: its server, and what is known of its health."""

    server: Any
    down_cause: str = ""
    """Empty while it is up."""
    is_gone: bool = False
    """Its process or engine is gone and cannot come back."""
    answered_s: float = field(default_factory=time.monotonic)
    progress_s: float = field(default_factory=time.monotonic)
    engine_steps: int = -1
    has_sent_garbage: bool = False
    task: asyncio.Task[None] | None = None
    verifying: asyncio.Task[bool] | None = None


class ReplicaHealth:
    """Watches replicas and says when they break and when they go on.

    Args:
        hang_s: `failures.replica_hang_s`.
        on_snapshot: Called with every sound reading of a replica that is up.
        on_missing: Called each `STALE_AFTER_S` that a replica's reading is overdue, and with True when one is refused.
        on_down: Called when a replica breaks.
        on_up: Called when one goes on.
        is_calm: Says whether readings are of little use now.
    """

    def __init__(
        self,
        hang_s: float,
        on_snapshot: Callable[[str, ReplicaSnapshot], None],
        on_missing: Callable[[str, bool], None],
        on_down: Callable[[str], None],
        on_up: Callable[[str], None],
        is_calm: Callable[[], bool],
    ) -> None:
        self._hang_s = hang_s
        self._is_calm = is_calm
        self._on_snapshot = on_snapshot
        self._on_missing = on_missing
        self._on_down = on_down
        self._on_up = on_up
        self._watched: dict[str, Watched] = {}
        self._is_polling = False

    def start_polling(self) -> None:
        """Read all replicas about twice a second from now on."""
        self._is_polling = True
        for replica_id, watched in self._watched.items():
            self._begin(replica_id, watched)

    def add(self, replica_id: str, server: Any) -> bool:
        """A replica is put in the pool. False when it is known to be broken: it joins when it answers."""
        known = self._watched.get(replica_id)
        if known is None or not known.down_cause:
            self.remove(replica_id)
            self._watched[replica_id] = Watched(server)
            if self._is_polling:
                self._begin(replica_id, self._watched[replica_id])
            return True
        known.server, known.is_gone = server, False
        self._begin(replica_id, known)
        return False

    def remove(self, replica_id: str) -> None:
        """A replica leaves in good order."""
        watched = self._watched.pop(replica_id, None)
        if watched is not None and watched.task is not None:
            watched.task.cancel()

    def may_return(self) -> bool:
        """Whether a replica that is out of the pool could go on."""
        return any(watched.down_cause and not watched.is_gone for watched in self._watched.values())

    def report_gone(self, replica_id: str, cause: str) -> None:
        """A client saw that the replica's process or engine is gone."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            self._down(replica_id, watched, cause, is_gone=True)

    async def verify(self, replica_id: str, cause: str) -> bool:
        """A client waited in vain. Look twice; True when the replica is up nevertheless.

        Clients that come meanwhile share the looks: hundreds of them at once would keep a replica that works from
        answering.
        """
        watched = self._watched.get(replica_id)
        if watched is None or watched.down_cause:
            return False
        if watched.verifying is None or watched.verifying.done():
            watched.verifying = asyncio.create_task(self._look_twice(replica_id, watched, cause))
        return await asyncio.shield(watched.verifying)

    async def _look_twice(self, replica_id: str, watched: Watched, cause: str) -> bool:
        """The client has taken its turn back, so that an engine that hangs may read like one with nothing to do."""
        steps = []
        for look in range(2):
            if look:
                await asyncio.sleep(min(SECOND_LOOK_S, self._hang_s))
            patience_s = min(SECOND_LOOK_S, self._hang_s)
            snapshot = await self._read(replica_id, watched, patience_s, with_engine=True)
            if watched.down_cause:
                return False
            if snapshot is not None:
                steps.append((snapshot.engine_steps, snapshot.is_idle))
        if not steps:
            self._down(replica_id, watched, f"{cause}; it does not answer", is_gone=False)
        elif len(steps) == 2 and steps[0][0] == steps[1][0] and not (steps[0][1] or steps[1][1]):
            self._down(replica_id, watched, f"{cause}; its engine finishes no iterations", is_gone=False)
        return not watched.down_cause

    async def read_all(self, timeout_s: float) -> None:
        """Take a reading of every replica that is up; one that gives none in time is counted."""
        up = [(replica_id, watched) for replica_id, watched in self._watched.items() if not watched.down_cause]
        await asyncio.gather(*(self._read(replica_id, watched, timeout_s) for replica_id, watched in up))

    def _begin(self, replica_id: str, watched: Watched) -> None:
        if watched.task is None or watched.task.done():
            watched.answered_s = watched.progress_s = time.monotonic()
            watched.task = asyncio.create_task(self._poll(replica_id, watched))
            watched.task.add_done_callback(_log_failure)

    async def _poll(self, replica_id: str, watched: Watched) -> None:
        """Read one replica for as long as it is in the pool or could come back to it."""
        while not watched.is_gone and (self._is_polling or watched.down_cause):
            begin_s = time.monotonic()
            # Its turns are asked again elsewhere: a broken replica that has nothing to do is not one that goes on.
            await self._read(replica_id, watched, None, with_engine=bool(watched.down_cause))
            await asyncio.sleep(max(0.0, begin_s + self._interval_s() - time.monotonic()))

    def _interval_s(self) -> float:
        return max(CALM_POLL_EVERY_S if self._is_calm() else POLL_EVERY_S, len(self._watched) / POLLS_PER_S)

    async def _read(
        self, replica_id: str, watched: Watched, timeout_s: float | None, with_engine: bool = False
    ) -> ReplicaSnapshot | None:
        """One reading; None when there is none. Without time limit it waits, and counts the waiting as a hang.

        `with_engine`: only once the engine answers, too, and not only its server.
        """
        try:
            call = asyncio.ensure_future(_reading(watched.server, with_engine))
            patience_s = timeout_s or min(max(STALE_AFTER_S, 3 * self._interval_s()), self._hang_s)
            while not (await asyncio.wait((call,), timeout=patience_s))[0]:
                self._miss(replica_id, watched)
                if timeout_s is not None:
                    call.cancel()
                    return None
            snapshot: ReplicaSnapshot = call.result()
        except ActorUnavailableError:
            self._miss(replica_id, watched)
            return None
        except GONE_ERRORS as error:
            self._down(replica_id, watched, cause_of(error), is_gone=True)
            return None
        except ValueError as error:
            self._reject(replica_id, watched, error)
            return None
        self._take(replica_id, watched, snapshot)
        return snapshot

    def _take(self, replica_id: str, watched: Watched, snapshot: ReplicaSnapshot) -> None:
        if self._watched.get(replica_id) is not watched:
            return
        now_s = time.monotonic()
        watched.answered_s = now_s
        has_progress = snapshot.engine_steps != watched.engine_steps or snapshot.is_idle
        # After a silence the first reading shows nothing yet: it only says from where to count.
        is_first, watched.engine_steps = watched.engine_steps < 0, snapshot.engine_steps
        if has_progress:
            watched.progress_s = now_s
        if watched.down_cause:
            if has_progress and not is_first:
                self._up(replica_id, watched, "it goes on")
            return
        if now_s - watched.progress_s >= self._hang_s:
            cause = f"no engine iteration in {now_s - watched.progress_s:.0f} s with requests running"
            self._down(replica_id, watched, cause, is_gone=False)
            return
        self._on_snapshot(replica_id, snapshot)

    def _miss(self, replica_id: str, watched: Watched) -> None:
        if watched.down_cause or self._watched.get(replica_id) is not watched:
            return
        silent_s = time.monotonic() - watched.answered_s
        if self._is_polling and silent_s >= self._hang_s:
            self._down(replica_id, watched, f"no answer in {silent_s:.0f} s", is_gone=False)
        else:
            self._on_missing(replica_id, False)

    def _reject(self, replica_id: str, watched: Watched, error: ValueError) -> None:
        """A reading that cannot be: the replica serves, so it stays; its telemetry counts as missing."""
        if self._watched.get(replica_id) is not watched:
            return
        watched.answered_s = watched.progress_s = time.monotonic()
        if not watched.has_sent_garbage:
            watched.has_sent_garbage = True
            logger.warning("replica %s: reading refused, further ones only counted (%s)", replica_id, cause_of(error))
        if not watched.down_cause:
            self._on_missing(replica_id, True)

    def _down(self, replica_id: str, watched: Watched, cause: str, is_gone: bool) -> None:
        watched.is_gone |= is_gone
        if watched.down_cause or self._watched.get(replica_id) is not watched:
            return
        watched.down_cause, watched.engine_steps = cause, -1
        logger.warning("replica %s: up -> down (%s)", replica_id, cause)
        self._on_down(replica_id)
        if not watched.is_gone:
            self._begin(replica_id, watched)

    def _up(self, replica_id: str, watched: Watched, cause: str) -> None:
        watched.down_cause = ""
        logger.warning("replica %s: down -> up (%s)", replica_id, cause)
        self._on_up(replica_id)


async def _reading(server: Any, with_engine: bool) -> ReplicaSnapshot:
    if with_engine:
        await server.war_wait_for_engine.remote()
    snapshot: ReplicaSnapshot = await server.war_snapshot.remote()
    return snapshot


def _log_failure(task: asyncio.Task[None]) -> None:
    """A watch that ends with an error of its own must not end unseen."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("watching a replica failed; it is only read once a step now", exc_info=task.exception())
