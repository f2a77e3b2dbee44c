"""What a replica's server does for the history that its engine drafts from: ageing, exchange with others, files.

All of it goes through `collective_rpc`, which the engine runs between two of its steps. While turns are generated these
calls are short: a thread of the worker takes in other replicas' text and writes files. Reading a file and forgetting
old text take longer; the first happens before any request, the second when the weights change.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from vllm.v1.engine.exceptions import EngineDeadError

from verl_war.core.config import SpeculationConfig
from verl_war.core.machine_profile import MachineProfile
from verl_war.core.speculation_limits import SPECULATION_KEY, SpeculationLimits
from verl_war.integration.verl.failures import cause_of

logger = logging.getLogger(__name__)

SHARE_EVERY_S = 0.5
"""Siblings are together for minutes; text half a second old serves them as well."""

MAX_BATCH_BYTES = 1 << 18
"""Text taken at once: packing 130,000 tokens keeps the engine for less than a millisecond."""


class Engine(Protocol):
    """What is used of vLLM's `AsyncLLM`."""

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...


def engine_settings(config: SpeculationConfig, profile: MachineProfile | None = None) -> dict[str, Any]:
    """The part of the settings that the engine's workers need, as `proposer.engine_options` takes it."""
    limits = {field.name: getattr(config, field.name) for field in dataclasses.fields(SpeculationLimits)}
    settings = {**limits, "history": dataclasses.asdict(config.history), "share_bytes_per_s": config.share_bytes_per_s}
    return settings if profile is None else {**settings, "step_time": dataclasses.asdict(profile.step_time)}


class ReplicaHistory:
    """History of one replica.

    Args:
        engine: The replica's engine, started with speculation.
        config: `speculation` of WAR's settings.
        replica_rank: Number of the replica; names its file.
    """

    def __init__(self, engine: Engine, config: SpeculationConfig, replica_rank: int) -> None:
        self._engine = engine
        self._config = config
        self._rank = replica_rank
        self._peers: list[Any] = []
        self._arrived: list[tuple[bytes, asyncio.Future[None]]] = []
        self._is_broken = False
        self._sending: dict[Any, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._rewards: dict[str, float] = {}

    async def load(self) -> None:
        """Take up the history of an earlier run, if there is one: the replica's own or else another's.

        Raises:
            RuntimeError: The directory cannot be used.
            Exception: As vLLM passes on the worker's error: the file is damaged and `history_on_damage=error`, or of
                another tokenizer or model.
        """
        if self._config.history_dir is None:
            return
        directory = Path(self._config.history_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = [self._file(), *sorted(directory.glob("replica_*.history"))]
            found = next((path for path in files if path.is_file()), None)
        except OSError as error:
            raise RuntimeError(
                f"{SPECULATION_KEY}.history_dir={self._config.history_dir!r} cannot be used ({error}); expected a "
                f"directory that the servers of all nodes can write to, or null"
            ) from error
        if found is not None:
            texts = await self._call("war_history_load", str(found), self._config.history_on_damage)
            logger.warning("replica %d: history of %d texts taken up from %s", self._rank, max(texts), found)

    async def on_policy_step(self, step: int) -> None:
        """The engine has the weights of policy step `step`."""
        rewards, self._rewards = self._rewards, {}
        await self._call("war_policy_step", step, rewards)
        if self._config.history_dir is not None and step > 0 and step % self._config.history_save_steps == 0:
            await self._call("war_history_save", str(self._file()))

    def note_reward(self, session_id: str, reward: float) -> None:
        """What a conversation was worth; passed on with the next policy step, when it is decided what stays."""
        self._rewards[session_id] = reward

    async def stats(self) -> dict[str, Any] | None:
        """Counters of speculation; see `Speculation.report`."""
        return next((report for report in await self._call("war_speculation_stats") if report is not None), None)

    def share_with(self, peers: Sequence[Any]) -> None:
        """Send new text to these servers from now on."""
        self._peers = list(peers)
        self._sending = {peer: task for peer, task in self._sending.items() if peer in self._peers}
        if self._peers:
            self._begin_sharing()

    async def apply(self, batch: bytes) -> None:
        """Take in text of another replica; returns when the engine has it."""
        if self._is_broken:
            return
        taken = asyncio.get_running_loop().create_future()
        self._arrived.append((batch, taken))
        self._begin_sharing()
        await taken

    def _begin_sharing(self) -> None:
        if not self._is_broken and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._share())
            self._task.add_done_callback(self._on_sharing_over)

    async def _share(self) -> None:
        """Both directions with one call of the engine, whose steps wait for every call."""
        while self._peers or self._arrived:
            await asyncio.sleep(SHARE_EVERY_S)
            arrived, self._arrived = self._arrived, []
            is_taken = False
            try:
                found = await self._call(
                    "war_history_exchange", [batch for batch, _ in arrived], MAX_BATCH_BYTES if self._peers else 0
                )
                is_taken = True
            finally:
                self._is_broken = not is_taken
                for _, taken in arrived:
                    if not taken.done():  # its sender may have gone away
                        taken.set_result(None)
            for batch in filter(None, found):
                try:
                    self._send(await asyncio.to_thread(ray.put, batch))
                except RayError as error:  # the object store is full: this text is not sent
                    logger.debug("history was not sent (%s)", cause_of(error))

    def _on_sharing_over(self, task: asyncio.Task[None]) -> None:
        """Sharing that ends with an error must not end unseen; decoding goes on with the replica's own text."""
        for _, taken in self._arrived if self._is_broken else ():
            taken.cancel()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EngineDeadError):
            logger.error("history is no longer shared by this replica", exc_info=error)

    def _send(self, batch: Any) -> None:
        """Without waiting, and nothing to a server that has not taken the last batch: it is late or broken."""
        for peer in self._peers:
            last = self._sending.get(peer)
            if last is None or last.done():
                self._sending[peer] = asyncio.create_task(_send_to(peer, batch))

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._engine.collective_rpc(method, args=args)

    def _file(self) -> Path:
        return Path(str(self._config.history_dir)) / f"replica_{self._rank}.history"


async def _send_to(peer: Any, batch: Any) -> None:
    try:
        await peer.war_history_apply.remote(batch)
    except RayError as error:  # the router finds out what is wrong with it
        logger.debug("a replica did not take history (%s)", cause_of(error))
