"""What the tests of router and client share."""

import asyncio
import os
import tempfile

import pytest

from tests.integration.local_actor import FakeServer, LocalActor


class Rig:
    """A router with fake replicas and clients, all in this process."""

    def __init__(self, replicas=2, settings=None, **server):
        from verl_war.integration.verl.router import WarRouter

        self.settings = settings or {}
        self.servers = {f"r{i}": LocalActor(FakeServer(**server)) for i in range(replicas)}
        self.war_router = WarRouter(self.servers, {})
        self.router = LocalActor(self.war_router)

    def client(self, kind="LLMServerClient"):
        from omegaconf import OmegaConf
        from verl.workers.rollout import llm_server

        from verl_war.integration.verl.client import war_client_of

        rollout = {"name": "vllm", "full_determinism": False, "custom": {"war": self.settings}}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        return war_client_of(getattr(llm_server, kind)(config=config, load_balancer_handle=self.router))

    @property
    def manager(self):
        return self.war_router._manager

    def served(self):
        return {name: len(server.target.served) for name, server in self.servers.items()}

    async def close(self):
        """End the router's background tasks."""
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                task.cancel()


@pytest.fixture
async def make_rig():
    rigs = []

    def make(*args, **kwargs):
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


ALWAYS_LOADED = {"regime": {"enter_kv_share": 0.0, "leave_kv_share": 0.0}}
ADMISSION = {"admission": {"enabled": True, "wait_for_thrash": False}, "scheduling": {"enabled": True}, **ALWAYS_LOADED}


async def until(condition, timeout_s=10.0):
    """Wait for something that background tasks bring about."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of our own."""
    import ray

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with tempfile.TemporaryDirectory(prefix="war") as directory:
        ray.init(num_cpus=16, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=directory,
                 _system_config={"worker_niceness": 0},
                 log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}})  # fmt: skip
        yield ray
        ray.shutdown()
