"""Weights through Ray's object store: every receiver gets every tensor, in order, whatever the bucket size."""

import pytest

pytestmark = pytest.mark.upstream

SIZES = {"tiny": 3, "large": 5000, "scalar": 1, "next": 700}
"""Elements of each float32 tensor; `large` is bigger than the small bucket."""


@pytest.fixture(scope="module")
def ray_session():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.mark.parametrize("bucket_bytes", [1000, 1_000_000])
async def test_all_receivers_get_all_weights(ray_session, bucket_bytes):
    import asyncio

    import torch
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from verl_war.integration.verl import object_store_engine  # noqa: F401  (registers itself)

    weights = {name: torch.arange(size, dtype=torch.float32) for name, size in SIZES.items()}
    sender = CheckpointEngineRegistry.new("object_store", bucket_size=bucket_bytes, is_master=True)
    idle_actor, *receivers = (CheckpointEngineRegistry.new("object_store", bucket_size=bucket_bytes) for _ in range(3))
    metadata = [engine.prepare() for engine in (sender, idle_actor, *receivers)]
    actors, rollouts = type(sender).build_topology(2, len(receivers), metadata)
    for engine, mailbox in zip((sender, idle_actor), actors["mailbox"], strict=True):
        engine.init_process_group(mailbox=mailbox)
    for engine, mailbox in zip(receivers, rollouts["mailbox"], strict=True):
        engine.init_process_group(mailbox=mailbox)

    async def receive(engine):
        return [(name, tensor) async for name, tensor in engine.receive_weights()]

    async def send(engine):
        await engine.send_weights((name, tensor) for name, tensor in weights.items())

    _, _, *received = await asyncio.gather(send(sender), send(idle_actor), *map(receive, receivers))
    for pairs in received:
        assert [name for name, _ in pairs] == list(weights)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in pairs)
    for engine in (idle_actor, *receivers, sender):
        engine.finalize()
