"""WAR's vLLM replica and server: verl's own, plus telemetry, a check that all patches are in force, and survival.

A replica that breaks costs the run that replica: what the trainer asks of all replicas between rollouts, the others do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.v1.engine.exceptions import EngineDeadError

from verl_war.core.config import parse_war_config
from verl_war.core.types import ReplicaSnapshot
from verl_war.integration.profile_file import read_profile
from verl_war.integration.verl import replica_history
from verl_war.integration.verl.failures import GONE_ERRORS, ReplicaFailedError, cause_of
from verl_war.integration.verl.settings import rollout_war_settings
from verl_war.integration.vllm import telemetry
from verl_war.integration.vllm.proposer import engine_options

logger = logging.getLogger(__name__)


class WarHttpServer(vLLMHttpServer):
    """Server of one replica."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        self._war_config = parse_war_config(rollout_war_settings(self.config))
        self._history: replica_history.ReplicaHistory | None = None
        self._turns: dict[str, asyncio.Task[Any] | None] = {}
        telemetry.activate(export_prometheus=not self.config.disable_log_stats)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        speculation = self._war_config.speculation
        if speculation.enabled:
            settings = replica_history.engine_settings(speculation, read_profile(self._war_config.profile_path))
            options = engine_options(settings, speculation.max_draft_tokens)
            others = engine_kwargs.get("additional_config") or {}
            others = json.loads(others) if isinstance(others, str) else dict(others)
            engine_kwargs.update(options, additional_config={**others, **options["additional_config"]})

    def _get_worker_extension_cls(self) -> str:
        return "verl_war.integration.vllm.worker.WarWorkerExtension"

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine, then compare what its workers have patched with what they must have.

        Raises:
            RuntimeError: A worker runs without a patch; the message names it.
        """
        await super().run_server(args)
        await self.engine.collective_rpc("war_check_patches")
        if self._war_config.speculation.enabled:
            history = replica_history.ReplicaHistory(self.engine, self._war_config.speculation, self.replica_rank)
            await history.load()
            self._history = history

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's; the history ages with the policy."""
        await super().set_global_steps(global_steps)
        if self._history is not None:
            await self._history.on_policy_step(global_steps)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """verl's; a dead engine is told from a request that it refuses.

        Raises:
            ReplicaFailedError: The engine is dead.
        """
        request_id = kwargs.get("request_id", "")
        self._turns[request_id] = asyncio.current_task()
        try:
            return await super().generate(*args, **kwargs)
        except EngineDeadError as error:
            raise self._dead() from error
        finally:
            self._turns.pop(request_id, None)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """verl's, by vLLM's own means.

        verl 0.9.1 looks a request up under the name that it gave it (`vllm_async_server.py:1060`), but vLLM keeps it
        under a name of its own (`InputProcessor.assign_request_id`, 0.27.1), so that verl's finds none and the engine
        goes on with a turn that nobody waits for.
        """
        if self.node_rank != 0:
            return {"aborted": False, "request_id": request_id}
        is_known = request_id in self.engine.output_processor.external_req_ids
        waiting = self._turns.get(request_id)
        if is_known:
            await self.engine.abort(request_id)
            if reset_prefix_cache:
                await self.clear_kv_cache()
        elif waiting is not None:  # behind verl's gate, or on its way to the engine
            waiting.cancel()
        return {"aborted": is_known or waiting is not None, "request_id": request_id}

    async def war_snapshot(self) -> ReplicaSnapshot:
        """Readings of the engine, for the router.

        Raises:
            ReplicaFailedError: The engine is dead: its last readings are of no use.
        """
        await self.war_check_alive()
        return telemetry.snapshot(self.engine.output_processor.get_num_unfinished_requests())

    async def war_share_with(self, peers: list[Any]) -> None:
        """Send new text of this replica to these servers from now on."""
        if self._history is not None:
            self._history.share_with(peers)

    async def war_history_apply(self, batch: bytes) -> None:
        """Take in text of another replica."""
        if self._history is not None:
            await self._history.apply(batch)

    async def war_history_reward(self, session_id: str, reward: float) -> None:
        """What a conversation of this replica was worth."""
        if self._history is not None:
            self._history.note_reward(session_id, reward)

    async def war_speculation_stats(self) -> dict[str, Any] | None:
        """Counters of speculation; None when this engine does not speculate.

        Raises:
            ReplicaFailedError: The engine is dead.
        """
        await self.war_check_alive()
        return None if self._history is None else await self._history.stats()

    async def war_check_alive(self) -> None:
        """Answer while the engine can serve.

        Raises:
            ReplicaFailedError: The engine is dead.
        """
        if self.engine.errored:
            raise self._dead()

    async def war_wait_for_engine(self) -> None:
        """Answer when the engine does: this process goes on while that one hangs.

        Raises:
            ReplicaFailedError: The engine is dead.
        """
        try:
            await self.engine.collective_rpc("check_health")
        except EngineDeadError as error:
            raise self._dead() from error

    def _dead(self) -> ReplicaFailedError:
        return ReplicaFailedError(f"the vLLM engine of replica {self.replica_rank} is dead; its own log says why")


class WarReplica(vLLMReplica):
    """Registered in place of verl's vLLM replica; without `custom.war` it is nothing else than that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serves_policy = not (self.is_reward_model or self.is_teacher_model)
        settings = rollout_war_settings(self.config) if serves_policy else None
        self._hang_s: float | None = None
        self._is_lost = False
        if settings is not None:
            self.server_class = ray.remote(WarHttpServer)
            self._hang_s = parse_war_config(settings).failures.replica_hang_s

    async def sleep(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().sleep)

    async def wake_up(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().wake_up)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """verl's, unless the replica is lost: then there are none."""
        aborted = await self._unless_lost(super().abort_all_requests, reject_request=reject_request)
        return aborted or {"aborted_count": 0, "request_ids": [], "server_results": []}

    async def resume_generation(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().resume_generation)

    async def clear_kv_cache(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().clear_kv_cache)

    async def release_kv_cache(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().release_kv_cache)

    async def resume_kv_cache(self) -> None:
        """verl's, unless the replica is lost."""
        await self._unless_lost(super().resume_kv_cache)

    async def _unless_lost(self, call: Callable[..., Awaitable[Any]], **arguments: Any) -> Any:
        """What the trainer asks of every replica. One that cannot do it misses it, and so must never serve again."""
        if self._hang_s is None:
            return await call(**arguments)
        if self._is_lost:
            return None
        try:
            return await asyncio.wait_for(call(**arguments), self._hang_s)
        except (*GONE_ERRORS, EngineDeadError, asyncio.TimeoutError) as error:
            self._is_lost = True
            logger.error(
                "replica %d: up -> down for good (%s when asked to %s); the run goes on without it",
                *(self.replica_rank, cause_of(error), call.__name__),
            )
            for server in self.servers:
                ray.kill(server)
            return None
