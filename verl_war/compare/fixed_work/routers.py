"""Router and client of an arm: verl's own, WAR's, or a policy of the simulator driven live.

`PolicyRouter` lets a rule of somebody else decide behind the very protocol of WAR's router, with WAR's client before
it: a turn that the rule holds is an answer that comes later. So arms differ in the rule alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray

from verl_war.compare.fixed_work.arms import Arm
from verl_war.core.config import WarConfig
from verl_war.core.types import ReplicaSnapshot, Turn, TurnResult
from verl_war.integration.verl.router_mail import Mailbox
from verl_war.integration.verl.router_protocol import Answer, Message, News, Pool, unpack_result, unpack_turn
from verl_war.integration.verl.router_turns import Turns
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.policies.base import Policy, PolicyContext, Start
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.simulator import SNAPSHOT_INTERVAL_S, TICK_INTERVAL_S
from verl_war.sim.trace import TrajectorySpec

MAX_CONCURRENCY = 10_000


class LivePolicy:
    """A policy of the simulator with the events of `WorkloadManager` that `Turns` sends.

    Args:
        policy: Decides.
        replicas: The pool; it never changes.
        begin_s: Monotonic time that is 0 for the policy, as the simulator's clock begins.
    """

    def __init__(self, policy: Policy, replicas: Sequence[str], begin_s: float) -> None:
        self.inflight = dict.fromkeys(replicas, 0)
        self._policy = policy
        self._begin_s = begin_s
        for replica_id in replicas:
            policy.on_replica_up(replica_id, 0.0)

    def on_step_begin(self, policy_step: int, num_trajectories: int, now_s: float, group_size: int) -> list[Start]:
        """So many trajectories are about to start."""
        return self._count(self._policy.on_step_begin(policy_step, num_trajectories, self._since(now_s), group_size))

    def on_turn(self, turn: Turn, now_s: float) -> list[Start]:
        """A client wants to run a turn."""
        return self._count(self._policy.on_turn(turn, self._since(now_s)))

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> list[Start]:
        """A turn returned or failed."""
        self.inflight[replica_id] -= 1
        starts = self._policy.on_turn_end(trajectory_id, session_id, replica_id, result, self._since(now_s))
        return self._count(starts)

    def on_turn_abandoned(self, session_id: str, now_s: float) -> list[Start]:
        """The client of a held turn went away; a replay's session is its trajectory, which ends with it."""
        return self.on_trajectory_end(session_id, True, now_s)

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> list[Start]:
        """A trajectory ended."""
        return self._count(self._policy.on_trajectory_end(trajectory_id, failed, self._since(now_s)))

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> list[Start]:
        """An engine's readings."""
        return self._count(self._policy.on_snapshot(replica_id, snapshot, self._since(now_s)))

    def on_tick(self, now_s: float) -> list[Start]:
        """Time has passed."""
        return self._count(self._policy.on_tick(self._since(now_s)))

    def on_decision_time(self, seconds: float) -> None:
        """What a decision takes is measured elsewhere (`scripts/bench_router.py`)."""

    def _since(self, now_s: float) -> float:
        return now_s - self._begin_s

    def _count(self, starts: Sequence[Start]) -> list[Start]:
        for start in starts:
            self.inflight[start.replica_id] += 1
        return list(starts)


class PolicyRouter:
    """Ray actor: serves WAR's clients with the decisions of a policy.

    Args:
        servers: Replica id -> handle of its server.
        policy: Name in the simulator's registry.
        kv_tokens: KV capacity of a replica.
        specs: The trajectories to come, of which rules may know what the system prompt has in common.
        seed: Of the rule's tie-breaks.
    """

    def __init__(
        self, servers: dict[str, Any], policy: str, kv_tokens: int, specs: tuple[TrajectorySpec, ...], seed: int
    ) -> None:
        self._servers = servers
        hardware = HardwareProfile(name="live", overlapped=False, base_s=1e-3, kv_capacity_tokens=kv_tokens)
        context = PolicyContext(hardware, len(servers), seed, specs)
        self._manager = LivePolicy(POLICIES[policy].variants[0].new_policy(context), list(servers), time.monotonic())
        self._pool = Pool(0, dict(servers), router=uuid4().hex)
        self._mailboxes: dict[str, Mailbox] = {}
        self._turns: Turns | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, config: WarConfig, full_determinism: bool, owner: str, handle: Any, pool: Any) -> Pool:
        """A process of agent loops is there."""
        if self._turns is None:
            deadline_s = config.failures.turn_deadline_s
            never = bool
            self._turns = Turns(self._manager, deadline_s, never, never, self._mailbox_of)  # type: ignore[arg-type]
            self._tasks.append(asyncio.create_task(self._tick()))
            self._tasks += [asyncio.create_task(self._poll(name)) for name in self._servers]
        return self._pool

    async def begin_step(self, policy_step: int, num_trajectories: int, group_size: int) -> None:
        """So many trajectories are about to start."""
        starts = self._manager.on_step_begin(policy_step, num_trajectories, time.monotonic(), group_size)
        self._require_turns().deliver(starts)  # type: ignore[arg-type]

    async def exchange(self, owner: str, messages: Sequence[Message]) -> tuple[tuple[str, int], list[Answer]]:
        """As `WarRouter.exchange`."""
        turns = self._require_turns()
        answers: list[Answer] = []
        for kind, *arguments in messages:
            if kind == "turn":
                answers.append(turns.ask(owner, unpack_turn(*arguments)))
            elif kind == "turn_end":
                turns.end_turn(*arguments[:3], unpack_result(*arguments[3:]))
            elif kind == "trajectory_end":
                turns.end_trajectory(*arguments)
            elif kind == "give_up":
                turns.give_up(owner, *arguments)
            else:
                raise ValueError(f"message {kind!r} is unknown; expected turn, turn_end, trajectory_end or give_up")
        return (self._pool.router, self._pool.version), answers

    async def news(self, owner: str, acknowledged: int) -> tuple[int, list[News]]:
        """As `WarRouter.news`."""
        return await self._mailbox_of(owner).take(acknowledged)

    async def report_replica(self, replica_id: str, cause: str, is_gone: bool) -> bool:
        """A client's turn failed on a replica: the pool of a replay never changes, and the run fails."""
        return True

    async def step_metrics(self) -> dict[str, float]:
        """A policy gives none."""
        return {}

    def _mailbox_of(self, owner: str) -> Mailbox:
        return self._mailboxes.setdefault(owner, Mailbox())

    def _require_turns(self) -> Turns:
        assert self._turns is not None, "a client joins before it asks"
        return self._turns

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self._require_turns().tick(time.monotonic())

    async def _poll(self, replica_id: str) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)
            snapshot = await self._servers[replica_id].war_snapshot.remote()
            starts = self._manager.on_snapshot(replica_id, snapshot, time.monotonic())
            self._require_turns().deliver(starts)  # type: ignore[arg-type]


def make_client(
    arm: Arm, servers: dict[str, Any], kv_tokens: int, specs: Sequence[TrajectorySpec], seed: int
) -> tuple[Any, Any]:
    """Router actor and client of an arm."""
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from verl_war.integration.verl.client import war_client_of
    from verl_war.integration.verl.router import WarRouterActor

    settings = None if arm.settings is None else {**arm.settings, "seed": seed}
    rollout = {"name": "vllm", "full_determinism": False, "custom": {"war": settings}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    if settings is None:
        router = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers)
        return router, LLMServerClient(config=config, load_balancer_handle=router)
    if arm.policy:
        actor = ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENCY)(PolicyRouter)
        router = actor.remote(servers, arm.policy, kv_tokens, tuple(specs), seed)
    else:
        router = WarRouterActor.remote(servers, {})
    return router, war_client_of(LLMServerClient(config=config, load_balancer_handle=router))
