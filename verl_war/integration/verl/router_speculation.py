"""How the engines speculate: asked for by the router about once a second, and once a step for the metrics.

What an answer costs: the engine's main thread reads its counters between two steps, 17 us of a core (measured with
2 million tokens of text in the index), and takes and answers the call; the router spends half a millisecond on it, as
on a snapshot. At one question a second neither shows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayError

from verl_war.core.speculation_report import reading_of
from verl_war.core.types import SpeculationReading
from verl_war.integration.verl.failures import GONE_ERRORS, cause_of

logger = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
"""Regimes last for at least some seconds; oftener would only make the curves of a report smoother."""

ASKS_PER_S = 100
"""Most questions that the router asks in a second, a twentieth of its time: of 1,000 replicas each is asked every 10 s.
"""


class SpeculationWatch:
    """Asks the servers of the pool.

    Args:
        servers: Gives the pool as it is: replica id -> handle of its server.
        on_reading: Called with every sound answer of `run`.
    """

    def __init__(
        self,
        servers: Callable[[], Mapping[str, Any]],
        on_reading: Callable[[str, SpeculationReading], None],
    ) -> None:
        self._servers = servers
        self._on_reading = on_reading
        self._asked: dict[str, tuple[Any, asyncio.Task[None]]] = {}
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Ask all servers in turn, for ever. Who has not answered yet is not asked again, and nobody is waited for."""
        while True:
            servers = dict(self._servers())
            pause_s = max(ASK_EVERY_S / max(1, len(servers)), 1 / ASKS_PER_S)
            for name in [name for name in self._asked if name not in servers]:
                self._asked.pop(name)[1].cancel()
            for name, server in servers.items():
                self._ask(name, server)
                await asyncio.sleep(pause_s)
            if not servers:
                await asyncio.sleep(ASK_EVERY_S)

    async def read_all(self, servers: Mapping[str, Any], timeout_s: float) -> dict[str, dict[str, Any] | None]:
        """Counters of these replicas; None for one that gives none in time."""
        calls = {name: asyncio.ensure_future(it.war_speculation_stats.remote()) for name, it in servers.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        stats: dict[str, dict[str, Any] | None] = {}
        for name, call in calls.items():
            is_told = call.done() and not call.cancelled() and call.exception() is None
            stats[name] = call.result() if is_told else None
            call.cancel()
        return stats

    def _ask(self, name: str, server: Any) -> None:
        last_server, last = self._asked.get(name, (None, None))
        if last is not None and not last.done():
            if last_server is server:
                return
            last.cancel()
        self._asked[name] = (server, asyncio.create_task(self._answer(name, server)))

    async def _answer(self, name: str, server: Any) -> None:
        """One reading. A server that fails misses it: the router's health watch and the clients see to that."""
        try:
            report = await server.war_speculation_stats.remote()
        except (RayError, *GONE_ERRORS) as error:
            logger.debug("replica %s gives no numbers of its speculation (%s)", name, cause_of(error))
            return
        if report is None or self._servers().get(name) is not server:
            return
        try:
            reading = reading_of(report)
        except (KeyError, TypeError, ValueError) as error:
            if name not in self._refused:
                self._refused.add(name)
                logger.warning("replica %s: numbers of its speculation refused, also later ones (%s)", name, error)
            return
        self._on_reading(name, reading)
