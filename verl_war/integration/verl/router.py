"""The router: one Ray actor for the fleet around the core's `WorkloadManager`.

It satisfies verl's `RequestLoadBalancer` (verl/workers/rollout/router.py, 0.9.1). WAR's own clients use `exchange`,
which carries the messages of many trajectories at once. Nothing in it blocks: every method is a coroutine on the
actor's event loop, and what waits is a future that a later event resolves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray

from verl_war.core.config import WarConfig
from verl_war.core.manager import WorkloadManager
from verl_war.core.peers import peers_of
from verl_war.core.speculation_report import SpeculationReport
from verl_war.core.types import Placement, ReplicaSnapshot, SpeculationReading, Turn, TurnResult
from verl_war.integration.profile_file import read_profile
from verl_war.integration.verl.failures import RouterNotConfiguredError
from verl_war.integration.verl.journal import Journal
from verl_war.integration.verl.router_health import ReplicaHealth
from verl_war.integration.verl.router_mail import Item, Mailbox
from verl_war.integration.verl.router_owners import Owners
from verl_war.integration.verl.router_protocol import Answer, Message, News, Pool, Waiting, unpack_result, unpack_turn
from verl_war.integration.verl.router_speculation import SpeculationWatch
from verl_war.integration.verl.router_turns import Turns

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 200_000
"""Calls that the actor holds at once; at least the trajectories that may wait for a turn."""

MESSAGES_AT_A_STRETCH = 64
"""Messages after which others get their turn: about 10 ms."""

TICK_EVERY_S = 0.5
"""How late a held turn may notice that it is overdue."""


class WarRouter:
    """Places turns on replicas.

    Args:
        servers: Replica id (`host:port`) -> handle of its server actor. May be empty at first.
        router_config: The router YAML; WAR's settings come with `configure` instead, since verl
            gives a router no access to the rollout's configuration.
    """

    def __init__(self, servers: dict[str, Any], router_config: dict[str, Any]) -> None:
        self._pool = Pool(0, dict(servers), router=uuid4().hex)
        self._manager: WorkloadManager | None = None
        self._config = WarConfig()
        self._full_determinism = False
        self._journal: Journal | None = None
        self._turns: Turns | None = None
        self._handles = dict(servers)
        self._mailboxes: dict[str, Mailbox] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._speculation = SpeculationReport()
        self._speculation_watch = SpeculationWatch(lambda: self._pool.servers, self._on_speculation)
        self._told_peers: dict[str, list[str]] = {}
        self._process_time_s = time.process_time()
        self._resting: set[str] = set()
        """Replicas that left the pool in good order, as hybrid ones do while they train."""
        self._owners = Owners(self._on_owner_dead)
        self._health = self._make_health(0.0)

    async def configure(self, config: WarConfig, full_determinism: bool) -> None:
        """Start deciding with these settings. Called once, before the first turn.

        Raises:
            RuntimeError: The router is configured already.
        """
        if self._manager is not None:
            raise RuntimeError("WarRouter is configured already; each agent loop manager needs a router of its own")
        self._config, self._full_determinism = config, full_determinism
        profile = read_profile(config.profile_path)
        if config.journal_path is not None:
            self._journal = Journal(config, full_determinism, profile)
            self._manager = self._journal.manager
            self._tasks.append(asyncio.create_task(self._journal.write_every_second()))
        else:
            self._manager = WorkloadManager(config, full_determinism, profile)
        self._turns = Turns(
            self._manager, config.failures.turn_deadline_s, self._may_return, self._may_fill, self._mailbox_of
        )
        self._health = self._make_health(config.failures.replica_hang_s)
        for replica_id, server in self._pool.servers.items():
            self._health.add(replica_id, server)
            self._turns.deliver(self._manager.on_replica_up(replica_id, time.monotonic()))
        self._tell_peers()
        if self._is_deciding or self._journal is not None:
            self._health.start_polling()
        if self._is_deciding:
            self._tasks.append(asyncio.create_task(self._tick()))
        if config.speculation.enabled:
            self._tasks.append(asyncio.create_task(self._speculation_watch.run()))

    async def join(self, config: WarConfig, full_determinism: bool, owner: str, handle: Any, pool: Pool | None) -> Pool:
        """A process of agent loops is there, for the first time or after the router was restarted.

        A restarted router takes its settings and its pool from the clients: Ray gives it the servers of its
        beginning, and whoever has seen a later pool brings that one along.

        Args:
            config: Settings, for a router that has none.
            full_determinism: `rollout.full_determinism` of verl.
            owner: Name of the process.
            handle: Its actor, None when it is none.
            pool: The pool as the process last saw it.

        Returns:
            The pool as it is now.
        """
        if self._manager is None:
            await self.configure(config, full_determinism)
            logger.warning("router: unconfigured -> deciding (settings came from agent loop worker %s)", owner)
        if pool is not None and pool.version > self._pool.version:
            await self.remove_servers([name for name in self._pool.servers if name not in pool.servers])
            await self.add_servers({name: it for name, it in pool.servers.items() if name not in self._pool.servers})
            self._pool = replace(pool, router=self._pool.router)
        if self._is_deciding:
            self._owners.join(owner, handle)
        return self._pool

    async def begin_step(self, policy_step: int, num_trajectories: int, group_size: int) -> None:
        """So many trajectories are about to start, `group_size` of each prompt."""
        manager = self._require_manager()
        self._deliver(manager.on_step_begin(policy_step, num_trajectories, time.monotonic(), group_size))

    async def exchange(self, owner: str, messages: Sequence[Message]) -> tuple[tuple[str, int], list[Answer]]:
        """Take in what a process has to say, in order.

        Returns:
            This router and the version of its pool, and for every turn asked for: its grant, the ticket of a held
            turn, or the error that it met.
        """
        turns = self._require_turns()
        answers: list[Answer] = []
        for number, (kind, *arguments) in enumerate(messages, start=1):
            if number % MESSAGES_AT_A_STRETCH == 0:
                await asyncio.sleep(0)
            if kind == "turn":
                turn = unpack_turn(*arguments)
                self._owners.note(owner, turn.trajectory_id)
                answers.append(turns.ask(owner, turn))
            elif kind == "turn_end":
                turns.end_turn(*arguments[:3], unpack_result(*arguments[3:]))
            elif kind == "trajectory_end":
                await self.end_trajectory(*arguments)
            elif kind == "give_up":
                turns.give_up(owner, *arguments)
            else:
                raise ValueError(f"message {kind!r} is unknown; expected turn, turn_end, trajectory_end or give_up")
        return (self._pool.router, self._pool.version), answers

    async def news(self, owner: str, acknowledged: int) -> tuple[int, list[News]]:
        """Wait for what a process is to be told: answers to its held turns, and replicas that broke.

        Args:
            owner: Name of the process.
            acknowledged: How many pieces of news it has had.

        Returns:
            How many it has had with these, and these.
        """
        self._require_turns()
        return await self._mailbox_of(owner).take(acknowledged)

    async def pool(self) -> Pool:
        """The replicas that serve now."""
        return self._pool

    async def report_replica(self, replica_id: str, cause: str, is_gone: bool) -> bool:
        """A client's turn failed on a replica. Returns whether the replica is in the pool nevertheless."""
        self._require_turns()
        if is_gone:
            self._health.report_gone(replica_id, cause)
            return False
        return await self._health.verify(replica_id, cause)

    async def acquire_server(self, request_id: str, turn: Turn | None = None) -> tuple[str, Any, int]:
        """Place a turn; verl's protocol.

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
        turns = self._require_turns()
        answer = turns.ask("", turn)
        if isinstance(answer, Waiting):
            answer = await turns.wait(answer.ticket)
        if isinstance(answer, Exception):
            raise answer
        return answer.replica_id, self._handles[answer.replica_id], answer.priority

    async def release_server(self, server_id: str, request_id: str, trajectory_id: str, result: TurnResult) -> None:
        """A turn ended on `server_id`; verl's protocol."""
        self._require_turns().end_turn(trajectory_id, request_id, server_id, result)

    async def end_trajectory(self, trajectory_id: str, failed: bool) -> None:
        """A trajectory ended; its KV is not needed any more."""
        turns = self._require_turns()
        self._owners.forget(trajectory_id)
        turns.end_trajectory(trajectory_id, failed)

    async def step_metrics(self) -> dict[str, float]:
        """Read all engines and return the metrics since the last call.

        verl calls for them once a step, right after it has updated the weights of all replicas.
        """
        manager = self._require_manager()
        timeout_s, is_speculating = self._config.metrics_timeout_s, self._config.speculation.enabled
        names = (*self._pool.servers, *self._resting) if is_speculating else ()
        # At the same time: whoever asks waits for little more than one time-out.
        _, speculation = await asyncio.gather(
            self._health.read_all(timeout_s),
            self._speculation_watch.read_all({name: self._handles[name] for name in names}, timeout_s),
        )
        manager.on_weights_updated(time.monotonic())
        used_s = time.process_time()
        manager.on_process_time(used_s - self._process_time_s)
        self._process_time_s = used_s
        metrics = manager.report()
        if is_speculating:
            self._resting = {name for name in self._resting if speculation.get(name) is not None}
            asked = [*self._pool.servers, *self._resting]
            metrics |= self._speculation.report({name: speculation.get(name) for name in asked})
        if self._journal is not None:
            await self._journal.write()
        return metrics

    async def require_acquire_fields(self) -> list[str]:
        """Part of verl's protocol; WAR's client sends a `Turn` instead."""
        return []

    async def require_release_fields(self) -> list[str]:
        """Part of verl's protocol; WAR's client names the trajectory and the result itself."""
        return ["request_id"]

    async def add_servers(self, servers: dict[str, Any]) -> None:
        """Put replicas in the pool. One that is known to be broken joins when it answers."""
        for replica_id, server in servers.items():
            self._handles[replica_id] = server
            self._resting.discard(replica_id)
            if self._manager is None or self._health.add(replica_id, server):
                self._join_pool(replica_id)
        self._tell_peers()
        logger.info("replicas %s joined the pool: %d in all", list(servers), len(self._pool.servers))

    async def remove_servers(self, server_ids: list[str]) -> None:
        """Take replicas out of the pool; turns in flight on them end as usual."""
        for replica_id in server_ids:
            self._health.remove(replica_id)
            if replica_id in self._pool.servers:
                self._resting.add(replica_id)
            self._leave_pool(replica_id, is_lost=False)
        self._tell_peers()
        logger.info("replicas %s left the pool: %d remain", server_ids, len(self._pool.servers))

    async def get_all_servers(self) -> list[str]:
        """Ids of the replicas in the pool."""
        return list(self._pool.servers)

    async def get_status(self) -> dict[str, Any]:
        """State for debugging, with the keys that verl's own balancer gives."""
        inflight = self._inflight()
        return {
            "servers": inflight,
            "total_inflight": sum(inflight.values()),
            "active_servers": len(inflight),
            "registered_handles": list(self._pool.servers),
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Let every session be placed anew at its next turn."""
        cleared = self._manager.forget_sessions() if self._manager is not None else 0
        logger.info("stickiness of %d sessions dropped", cleared)
        return {"cleared_entries": cleared, "server_loads": self._inflight()}

    async def get_total_inflight(self) -> int:
        """Turns being generated on the replicas of the pool."""
        return sum(self._inflight().values())

    @property
    def _is_deciding(self) -> bool:
        """Whether anything needs watching: with every feature off the router is as passive as verl's."""
        return self._config.scheduling.enabled or self._config.admission.enabled

    def _tell_peers(self) -> None:
        """Tell replicas whom to send history to, where that changed."""
        speculation = self._config.speculation
        if self._manager is None or not speculation.enabled or speculation.share_peers == 0:
            return
        peers = peers_of(list(self._pool.servers), speculation.share_peers)
        peers |= {name: [] for name in self._told_peers if name not in peers}  # who left sends nothing any more
        for name, others in peers.items():
            if self._told_peers.get(name) != others:
                self._handles[name].war_share_with.remote([self._handles[other] for other in others])
        self._told_peers = {name: others for name, others in peers.items() if others}

    def _mailbox_of(self, owner: str) -> Mailbox:
        mailbox = self._mailboxes.get(owner)
        if mailbox is None:
            mailbox = self._mailboxes[owner] = Mailbox()
        return mailbox

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_EVERY_S)
            self._require_turns().tick(time.monotonic())

    def _make_health(self, hang_s: float) -> ReplicaHealth:
        return ReplicaHealth(
            hang_s, self._on_snapshot, self._on_missing, self._on_down, self._on_up,
            is_calm=lambda: self._is_deciding and self._manager is not None and not self._manager.is_loaded,
        )  # fmt: skip

    def _may_return(self) -> bool:
        """Whether a replica that broke can go on. verl's own clients wait for those that verl takes out."""
        return self._health.may_return()

    def _may_fill(self) -> bool:
        """Whether an empty pool can get a replica again."""
        return self._pool.is_elastic or self._may_return()

    def _join_pool(self, replica_id: str) -> None:
        servers = {**self._pool.servers, replica_id: self._handles[replica_id]}
        self._pool = replace(self._pool, version=self._pool.version + 1, servers=servers)
        if self._manager is not None:
            self._deliver(self._manager.on_replica_up(replica_id, time.monotonic()))

    def _leave_pool(self, replica_id: str, is_lost: bool) -> None:
        servers = {name: server for name, server in self._pool.servers.items() if name != replica_id}
        is_elastic = self._pool.is_elastic or not is_lost
        self._pool = replace(self._pool, version=self._pool.version + 1, servers=servers, is_elastic=is_elastic)
        if self._manager is not None:
            self._deliver(self._manager.on_replica_down(replica_id, time.monotonic(), is_lost))

    def _on_down(self, replica_id: str) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.put(Item(("lost", replica_id)))
        self._leave_pool(replica_id, is_lost=True)
        self._tell_peers()

    def _on_up(self, replica_id: str) -> None:
        self._join_pool(replica_id)
        self._tell_peers()

    def _on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot) -> None:
        self._deliver(self._require_manager().on_snapshot(replica_id, snapshot, time.monotonic()))

    def _on_speculation(self, replica_id: str, reading: SpeculationReading) -> None:
        self._deliver(self._require_manager().on_speculation(replica_id, reading, time.monotonic()))

    def _on_missing(self, replica_id: str, is_rejected: bool) -> None:
        self._deliver(self._require_manager().on_snapshot_missing(replica_id, time.monotonic(), is_rejected))

    def _on_owner_dead(self, owner: str, trajectory_ids: list[str]) -> None:
        turns = self._require_turns()
        turns.forget_owner(owner)
        self._mailboxes.pop(owner, None)
        for trajectory_id in trajectory_ids:
            turns.end_trajectory(trajectory_id, failed=True)

    def _deliver(self, placements: Iterable[Placement]) -> None:
        self._require_turns().deliver(placements)

    def _inflight(self) -> dict[str, int]:
        return self._manager.inflight if self._manager is not None else dict.fromkeys(self._pool.servers, 0)

    def _require_manager(self) -> WorkloadManager:
        if self._manager is None:
            raise RouterNotConfiguredError("WarRouter was used before configure(): create it through rollout=war")
        return self._manager

    def _require_turns(self) -> Turns:
        if self._turns is None:
            raise RouterNotConfiguredError("WarRouter was used before configure(): create it through rollout=war")
        return self._turns


WarRouterActor = ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENCY, max_restarts=-1)(WarRouter)
"""What `router_class` of war_router.yaml names; verl accepts a ready actor class. Ray starts it again when its process
dies; `join` tells how it gets its state back."""
