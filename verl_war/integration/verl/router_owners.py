"""Whose trajectories they are: when a process of agent loops dies, what it holds at the router is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from verl_war.integration.verl.failures import cause_of

logger = logging.getLogger(__name__)

PING_EVERY_S = 5.0
"""A dead process keeps KV reserved for at most this long; one ping costs its worker nothing that shows."""


class Owners:
    """Processes that run agent loops, and the live trajectories of each.

    Args:
        on_dead: Called with the trajectories of a process that died.
    """

    def __init__(self, on_dead: Callable[[str, list[str]], None], ping_every_s: float = PING_EVERY_S) -> None:
        self._on_dead = on_dead
        self._ping_every_s = ping_every_s
        self._owner_of: dict[str, str] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def join(self, owner: str, handle: Any) -> None:
        """Watch a process; `handle` is its actor, None where it is none (a driver, whose death ends the job)."""
        if handle is not None and owner not in self._watches:
            self._watches[owner] = asyncio.create_task(self._watch(owner, handle))

    def note(self, owner: str, trajectory_id: str) -> None:
        """A trajectory of this process has a turn."""
        self._owner_of[trajectory_id] = owner

    def forget(self, trajectory_id: str) -> None:
        """A trajectory ended."""
        self._owner_of.pop(trajectory_id, None)

    def trajectories(self, owner: str) -> list[str]:
        """Live trajectories of a process."""
        return [trajectory for trajectory, its_owner in self._owner_of.items() if its_owner == owner]

    async def _watch(self, owner: str, handle: Any) -> None:
        while True:
            try:
                await handle.__ray_ready__.remote()
            except ActorUnavailableError:
                pass  # a broken connection, which may heal: Ray says ActorDiedError when the process is gone
            except RayActorError as error:
                del self._watches[owner]
                lost = self.trajectories(owner)
                logger.warning("agent loop worker %s: up -> down (%s), %d trajectories given back",
                               owner, cause_of(error), len(lost))  # fmt: skip
                for trajectory_id in lost:
                    self.forget(trajectory_id)
                self._on_dead(owner, lost)
                return
            await asyncio.sleep(self._ping_every_s)
