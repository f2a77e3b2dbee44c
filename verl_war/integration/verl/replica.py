"""WAR's vLLM replica and server: verl's own, plus telemetry and a check that all patches are in force."""

from __future__ import annotations

import argparse
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.v1.engine.exceptions import EngineDeadError

from verl_war.core.types import ReplicaSnapshot
from verl_war.integration.verl.failures import ReplicaFailedError
from verl_war.integration.verl.settings import rollout_war_settings
from verl_war.integration.vllm import telemetry


class WarHttpServer(vLLMHttpServer):
    """Server of one replica."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        telemetry.activate(export_prometheus=not self.config.disable_log_stats)

    def _get_worker_extension_cls(self) -> str:
        return "verl_war.integration.vllm.worker.WarWorkerExtension"

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine, then compare what its workers have patched with what they must have.

        Raises:
            RuntimeError: A worker runs without a patch; the message names it.
        """
        await super().run_server(args)
        await self.engine.collective_rpc("war_check_patches")

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """verl's; a dead engine is told from a request that it refuses.

        Raises:
            ReplicaFailedError: The engine is dead.
        """
        try:
            return await super().generate(*args, **kwargs)
        except EngineDeadError as error:
            raise self._dead() from error

    async def war_snapshot(self) -> ReplicaSnapshot:
        """Readings of the engine, for the router.

        Raises:
            ReplicaFailedError: The engine is dead: its last readings are of no use.
        """
        if self.engine.errored:
            raise self._dead()
        return telemetry.snapshot(has_requests=self.engine.output_processor.has_unfinished_requests())

    def _dead(self) -> ReplicaFailedError:
        return ReplicaFailedError(f"the vLLM engine of replica {self.replica_rank} is dead; its own log says why")


class WarReplica(vLLMReplica):
    """Registered in place of verl's vLLM replica; without `custom.war` it is nothing else than that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serves_policy = not (self.is_reward_model or self.is_teacher_model)
        if serves_policy and rollout_war_settings(self.config) is not None:
            self.server_class = ray.remote(WarHttpServer)
