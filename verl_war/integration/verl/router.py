"""The router: one Ray actor for the fleet around the core's `WorkloadManager`.

It satisfies verl's `RequestLoadBalancer` (verl/workers/rollout/router.py, 0.9.1). Nothing in it blocks:
every method is a coroutine on the actor's event loop, and only reading the engines awaits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from verl_war.core.config import WarConfig
from verl_war.core.manager import WorkloadManager
from verl_war.core.types import Turn, TurnResult

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 100_000
"""Calls that the actor holds at once; at least the trajectories that may wait for a turn."""


class WarRouter:
    """Places turns on replicas.

    Args:
        servers: Replica id (`host:port`) -> handle of its server actor. May be empty at first.
        router_config: The router YAML; WAR's settings come with `configure` instead, since verl
            gives a router no access to the rollout's configuration.
    """

    def __init__(self, servers: dict[str, Any], router_config: dict[str, Any]) -> None:
        self._servers = dict(servers)
        self._manager: WorkloadManager | None = None
        self._metrics_timeout_s = 0.0

    async def configure(self, config: WarConfig, full_determinism: bool) -> None:
        """Start deciding with these settings. Called once, before the first turn.

        Raises:
            RuntimeError: The router is configured already.
        """
        if self._manager is not None:
            raise RuntimeError("WarRouter is configured already; each agent loop manager needs a router of its own")
        self._manager = WorkloadManager(config, full_determinism)
        self._metrics_timeout_s = config.metrics_timeout_s
        for replica_id in self._servers:
            self._manager.on_replica_up(replica_id, time.monotonic())

    async def acquire_server(self, request_id: str, turn: Turn | None = None) -> tuple[str, Any, int]:
        """Place a turn.

        Returns:
            Replica id, handle of its server, engine priority.

        Raises:
            RuntimeError: No replica is in the pool, or the caller is not WAR's client.
        """
        if turn is None:
            raise RuntimeError(
                f"request {request_id} came without a description of its turn: the router belongs to WAR but the "
                f"client is verl's own. Leave rollout.agent.agent_loop_manager_class as rollout=war sets it."
            )
        manager = self._require_manager()
        begin_s = time.perf_counter()
        (placement,) = manager.on_turn(turn, time.monotonic())
        manager.on_decision_time(time.perf_counter() - begin_s)
        return placement.replica_id, self._servers[placement.replica_id], placement.priority

    async def release_server(self, server_id: str, request_id: str, trajectory_id: str, result: TurnResult) -> None:
        """A turn ended on `server_id`."""
        self._require_manager().on_turn_end(trajectory_id, request_id, server_id, result, time.monotonic())

    async def end_trajectory(self, trajectory_id: str, failed: bool) -> None:
        """A trajectory ended; its KV is not needed any more."""
        self._require_manager().on_trajectory_end(trajectory_id, failed, time.monotonic())

    async def step_metrics(self) -> dict[str, float]:
        """Read all engines and return the metrics since the last call.

        verl calls for them once a step, right after it has updated the weights of all replicas.

        Raises:
            TimeoutError: An engine did not answer within `metrics_timeout_s`.
        """
        manager = self._require_manager()
        pool = dict(self._servers)
        reads = [server.war_snapshot.remote() for server in pool.values()]
        snapshots = await asyncio.wait_for(asyncio.gather(*reads), self._metrics_timeout_s)
        for replica_id, snapshot in zip(pool, snapshots, strict=True):
            manager.on_snapshot(replica_id, snapshot, time.monotonic())
        manager.on_weights_updated(time.monotonic())
        return manager.report()

    async def require_acquire_fields(self) -> list[str]:
        """Part of verl's protocol; WAR's client sends a `Turn` instead."""
        return []

    async def require_release_fields(self) -> list[str]:
        """Part of verl's protocol; WAR's client names the trajectory and the result itself."""
        return ["request_id"]

    async def add_servers(self, servers: dict[str, Any]) -> None:
        """Put replicas in the pool."""
        self._servers.update(servers)
        if self._manager is not None:
            for replica_id in servers:
                self._manager.on_replica_up(replica_id, time.monotonic())
        logger.info("replicas %s joined the pool: %d in all", list(servers), len(self._servers))

    async def remove_servers(self, server_ids: list[str]) -> None:
        """Take replicas out of the pool; turns in flight on them end as usual."""
        for replica_id in server_ids:
            self._servers.pop(replica_id, None)
            if self._manager is not None:
                self._manager.on_replica_down(replica_id, time.monotonic())
        logger.info("replicas %s left the pool: %d remain", server_ids, len(self._servers))

    async def get_all_servers(self) -> list[str]:
        """Ids of the replicas in the pool."""
        return list(self._servers)

    async def get_status(self) -> dict[str, Any]:
        """State for debugging, with the keys that verl's own balancer gives."""
        inflight = self._inflight()
        return {
            "servers": inflight,
            "total_inflight": sum(inflight.values()),
            "active_servers": len(inflight),
            "registered_handles": list(self._servers),
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Let every session be placed anew at its next turn."""
        cleared = self._manager.forget_sessions() if self._manager is not None else 0
        logger.info("stickiness of %d sessions dropped", cleared)
        return {"cleared_entries": cleared, "server_loads": self._inflight()}

    async def get_total_inflight(self) -> int:
        """Turns being generated on the replicas of the pool."""
        return sum(self._inflight().values())

    def _inflight(self) -> dict[str, int]:
        return self._manager.inflight if self._manager is not None else dict.fromkeys(self._servers, 0)

    def _require_manager(self) -> WorkloadManager:
        if self._manager is None:
            raise RuntimeError("WarRouter was used before configure(): create it through rollout=war")
        return self._manager


WarRouterActor = ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENCY)(WarRouter)
"""What `router_class` of war_router.yaml names; verl accepts a ready actor class."""
