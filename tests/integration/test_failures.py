"""Processes that are killed, stopped or slow, with real Ray actors: the step completes and nothing leaks."""

import asyncio
import os
import signal
import time

import pytest

from tests.integration.local_actor import FakeServer

pytestmark = [pytest.mark.upstream, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = {
    "scheduling": {"enabled": True},
    "admission": {"enabled": True, "wait_for_thrash": False},
    "failures": {"replica_hang_s": 20.0, "turn_deadline_s": 60.0},
}


class Server(FakeServer):
    """A server of its own process whose engine takes `delay_s` for a turn."""

    def __init__(self, **options):
        import verl.workers.rollout.replica  # noqa: F401  (takes its time, and would take it from the event loop)

        super().__init__(**options)

    async def pid(self):
        return os.getpid()

    async def count(self):
        return len(self.served)


class Worker:
    """A process of agent loops: trajectories of several turns, each with a tool call between."""

    def __init__(self, router, settings):
        from omegaconf import OmegaConf
        from verl.workers.rollout.llm_server import LLMServerClient

        from verl_war.integration.verl.client import war_client_of

        rollout = {"name": "vllm", "full_determinism": False, "custom": {"war": settings}}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.client = war_client_of(LLMServerClient(config=config, load_balancer_handle=router))

    async def pid(self):
        return os.getpid()

    async def run(self, trajectories, turns, prefix="t"):
        """Returns how many trajectories got all their turns, and what the others met."""
        outcomes = await asyncio.gather(
            *(self._trajectory(f"{prefix}{i}", turns) for i in range(trajectories)), return_exceptions=True
        )
        failures = [f"{type(error).__name__}: {error}" for error in outcomes if error is not None]
        return trajectories - len(failures), failures

    async def _trajectory(self, name, turns):
        prompt = list(range(100))
        failed = True
        try:
            for _ in range(turns):
                output = await self.client.generate(name, prompt_ids=prompt, sampling_params={})
                assert output.token_ids == [7, 8]
                prompt += [*output.token_ids, *range(30)]
                await asyncio.sleep(0.05)
            failed = False
        finally:
            self.client.end_trajectory(name, failed)


class Fleet:
    def __init__(self, ray, count=3, settings=SETTINGS, **server):
        from verl_war.integration.verl.router import WarRouterActor

        actor = ray.remote(num_cpus=0, max_concurrency=1000)(Server)
        self.servers = {f"r{i}": actor.remote(kv_capacity_tokens=100_000, **server) for i in range(count)}
        self.router = WarRouterActor.remote(self.servers, {})
        self.worker = ray.remote(num_cpus=0, max_concurrency=1000)(Worker).remote(self.router, settings)
        self.pids = {name: ray.get(server.pid.remote()) for name, server in self.servers.items()}
        ray.get(self.worker.run.remote(1, 1, "warm-up"))

    async def served(self, at_least):
        """Wait until this many turns were begun at the servers that can say so."""
        for _ in range(600):
            counts = await asyncio.gather(
                *(server.count.remote() for server in self.servers.values()), return_exceptions=True
            )
            if sum(count for count in counts if isinstance(count, int)) >= at_least:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the turns do not begin")

    async def nothing_is_left(self):
        for _ in range(200):
            if await self.router.get_total_inflight.remote() == 0:
                break
            await asyncio.sleep(0.05)
        assert await self.router.get_total_inflight.remote() == 0
        metrics = await self.router.step_metrics.remote()
        assert metrics["war/trajectories_live"] == 0
        return metrics

    def close(self, ray):
        for actor in (self.worker, self.router, *self.servers.values()):
            ray.kill(actor)


@pytest.fixture
def fleet(cluster):
    fleets = []

    def make(**kwargs):
        fleets.append(Fleet(cluster, **kwargs))
        return fleets[-1]

    yield make
    for made in fleets:
        made.close(cluster)


@pytest.mark.parametrize("when", ["mid-turn", "between turns"])
async def test_a_killed_server_costs_no_trajectory(fleet, when):
    it = fleet(delay_s=0.5 if when == "mid-turn" else 0.0)
    run = it.worker.run.remote(24, 4)
    await it.served(30)
    os.kill(it.pids["r1"], signal.SIGKILL)
    assert await asyncio.wait_for(run, 120) == (24, [])
    assert set(await it.router.get_all_servers.remote()) == {"r0", "r2"}
    assert (await it.nothing_is_left())["war/replicas_lost"] == 1


async def test_when_every_server_is_killed_all_trajectories_fail_soon(fleet):
    it = fleet(delay_s=0.5)
    run = it.worker.run.remote(12, 100)
    await it.served(20)
    for pid in it.pids.values():
        os.kill(pid, signal.SIGKILL)
    completed, failures = await asyncio.wait_for(run, 60)
    assert completed == 0 and all("No available servers in load balancer" in failure for failure in failures)
    assert (await it.nothing_is_left())["war/trajectories_failed"] == 12


async def test_a_killed_router_is_joined_again(fleet):
    it = fleet(delay_s=0.2)
    pid = await it.router.__ray_call__.remote(lambda self: os.getpid())
    run = it.worker.run.remote(24, 6)
    await it.served(40)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(run, 120) == (24, [])
    assert set(await it.router.get_all_servers.remote()) == {"r0", "r1", "r2"}
    assert await it.router.__ray_call__.remote(lambda self: os.getpid()) != pid
    await it.nothing_is_left()


async def test_a_stopped_server_leaves_the_pool_and_returns(fleet):
    it = fleet(delay_s=0.2, settings={**SETTINGS, "failures": {"replica_hang_s": 6.0}})
    run = it.worker.run.remote(24, 6)
    await it.served(40)
    os.kill(it.pids["r1"], signal.SIGSTOP)
    try:
        for _ in range(400):
            if set(await it.router.get_all_servers.remote()) == {"r0", "r2"}:
                break
            await asyncio.sleep(0.05)
        assert set(await it.router.get_all_servers.remote()) == {"r0", "r2"}
        assert await asyncio.wait_for(run, 120) == (24, []), "its turns were asked again"
    finally:
        os.kill(it.pids["r1"], signal.SIGCONT)
    for _ in range(400):
        if "r1" in await it.router.get_all_servers.remote():
            break
        await asyncio.sleep(0.05)
    assert "r1" in await it.router.get_all_servers.remote()
    await it.nothing_is_left()


async def test_a_turn_on_a_stopped_server_is_asked_again_after_its_deadline(fleet):
    settings = {**SETTINGS, "failures": {"replica_hang_s": 1.0, "turn_deadline_s": 4.0}}
    it = fleet(count=2, settings=settings, delay_s=0.2)
    run = it.worker.run.remote(8, 4)
    await it.served(12)
    os.kill(it.pids["r1"], signal.SIGSTOP)
    try:
        assert await asyncio.wait_for(run, 120) == (8, [])
    finally:
        os.kill(it.pids["r1"], signal.SIGCONT)


async def test_a_slow_server_gets_fewer_turns(cluster, fleet):
    it = fleet(count=2, delay_s=0.1)
    cluster.get(it.servers["r1"].__ray_call__.remote(lambda self: setattr(self, "delay_s", 0.4)))
    assert await asyncio.wait_for(it.worker.run.remote(16, 20), 120) == (16, [])
    metrics = await it.nothing_is_left()
    counts = await asyncio.gather(*(server.count.remote() for server in it.servers.values()))
    print("slowness", [metrics[f"war/replica/{i}/slowness"] for i in range(2)], "turns", counts)
    assert metrics["war/replica/1/slowness"] > 1.5 * metrics["war/replica/0/slowness"]


async def test_a_killed_worker_gives_back_what_it_holds(fleet):
    it = fleet(delay_s=1.0)
    pid = await it.worker.pid.remote()
    run = it.worker.run.remote(12, 100)
    await it.served(12)
    assert await it.router.get_total_inflight.remote() > 0
    os.kill(pid, signal.SIGKILL)
    begin_s = time.monotonic()
    metrics = await it.nothing_is_left()
    assert metrics["war/trajectories_failed"] == 12 and time.monotonic() - begin_s < 15
    from ray.exceptions import RayActorError

    with pytest.raises(RayActorError):
        await run


async def test_a_step_gets_its_metrics_from_a_router_that_was_started_again(fleet, monkeypatch):
    from verl_war.core.config import parse_war_config
    from verl_war.integration.verl import step_metrics

    it = fleet(count=1)
    monkeypatch.setattr(step_metrics, "_router", None)
    monkeypatch.setattr(step_metrics, "_settings", step_metrics._settings)
    assert step_metrics.consume() == {}, "a run without WAR"
    step_metrics.attach(it.router, parse_war_config(SETTINGS), False)
    assert (await asyncio.to_thread(step_metrics.consume))["war/turns"] == 1
    os.kill(await it.router.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
    metrics = await asyncio.wait_for(asyncio.to_thread(step_metrics.consume), 60)
    assert metrics["war/turns"] == 0 and "war/replicas_lost" in metrics
