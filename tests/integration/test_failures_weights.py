"""Weights for replicas that broke: nobody waits for ever, and every rank gathers every tensor."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.asyncio(loop_scope="module")]


class Server:
    """What a training rank asks of its replica's server."""

    def __init__(self, answer=None):
        self.answer = answer
        self.steps = []
        self.got_all = asyncio.Event()

    async def war_check_alive(self):
        if self.answer == "dead engine":
            from verl_war.integration.verl.failures import ReplicaFailedError

            raise ReplicaFailedError("the vLLM engine of replica 0 is dead")

    async def collective_rpc(self, method, timeout, args, kwargs):
        if self.answer == "refusal":
            raise ValueError("size mismatch for layer 0")
        if self.answer == "death":
            from vllm.v1.engine.exceptions import EngineDeadError

            await asyncio.sleep(1.0)
            raise EngineDeadError
        if self.answer == "silence":
            await asyncio.sleep(3600)
        await self.got_all.wait()

    async def has_got_all(self):
        self.got_all.set()

    async def clear_kv_cache(self):
        pass

    async def set_global_steps(self, global_steps):
        self.steps.append(global_steps)

    async def seen(self):
        return self.steps


def receiver(address, server):
    """The engine's side of the transfer: takes everything."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.REP)
    socket.connect(address)
    while True:
        message = socket.recv_pyobj()
        socket.send(b"")
        if message.get("is_last"):
            server.has_got_all.remote()
            socket.close()
            return


def adapter(name, tmp_path, hang_s=1.0):
    import verl.workers.rollout.base  # noqa: F401
    from verl.workers.rollout.base import get_rollout_class

    cls = get_rollout_class("vllm")
    it = cls.__new__(cls)
    it._hang_s = hang_s
    it.replica_rank, it.rollout_rank, it._has_server, it.server_handle = 0, 0, True, None
    it._pd_role, it.node_rank, it.use_shm = None, 0, True
    it.zmq_handle = f"ipc://{tmp_path}/socket"
    it.config = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1), get=lambda key, default: name
    )
    return it


def weights(gathered, count=6):
    import torch

    for number in range(count):
        gathered.append(number)
        yield f"layer{number}", torch.full((100_000,), float(number))


async def make(cluster, tmp_path, answer):
    name = f"weights{abs(hash(str(tmp_path)))}"
    server = cluster.remote(num_cpus=0)(Server).options(name=f"{name}_server_0_0").remote(answer)
    await server.__ray_ready__.remote()
    return adapter(name, tmp_path), server


async def test_a_working_replica_gets_them(cluster, tmp_path):
    it, server = await make(cluster, tmp_path, None)
    thread = threading.Thread(target=receiver, args=(it.zmq_handle, server))
    thread.start()
    gathered = []
    await it.update_weights(weights(gathered), global_steps=4)
    thread.join()
    assert gathered == list(range(6)) and await server.seen.remote() == [4]


async def test_a_replica_whose_server_is_gone_is_left_out(cluster, tmp_path, caplog):
    it, server = await make(cluster, tmp_path, None)
    cluster.kill(server)
    await asyncio.sleep(0.5)
    gathered = []
    await it.update_weights(weights(gathered), global_steps=4)
    assert gathered == list(range(6)) and "replica 0" in caplog.text


@pytest.mark.parametrize(
    ("answer", "hang_s"),
    [("dead engine", 3600.0), ("silence", 1.0), ("death", 3600.0)],
)
async def test_a_replica_that_cannot_take_them_never_serves_again(cluster, tmp_path, caplog, answer, hang_s):
    from ray.exceptions import RayActorError

    it, server = await make(cluster, tmp_path, answer)
    it._hang_s = hang_s
    assert it.server_handle is None, "it may break before anything was sent to it"
    gathered = []
    await asyncio.wait_for(it.update_weights(weights(gathered), global_steps=4), 30)
    assert gathered == list(range(6))
    assert "replica 0: up -> down for good" in caplog.text
    with pytest.raises(RayActorError):
        await server.seen.remote()


async def test_a_replica_that_refuses_them_stops_the_run_with_its_reason(cluster, tmp_path):
    it, _ = await make(cluster, tmp_path, "refusal")
    it._hang_s = 3600.0
    gathered = []
    with pytest.raises(RuntimeError, match="replica 0 refused the weights of step 4.*size mismatch for layer 0"):
        await asyncio.wait_for(it.update_weights(weights(gathered), global_steps=4), 30)
    assert gathered == list(range(6)), "the other ranks were not left alone"


@pytest.mark.parametrize("end", ["killed", "hangs"])
async def test_what_the_trainer_asks_of_a_lost_replica_is_left_out(cluster, caplog, end):
    from verl_war.integration.verl.replica import WarReplica

    class Asleep:
        async def sleep(self):
            await asyncio.sleep(3600 if end == "hangs" else 0)

        async def wait_for_requests_to_drain(self):
            pass

        async def abort_all_requests(self, reject_request):
            return {"aborted_count": 1, "request_ids": ["x"]}

    server = cluster.remote(num_cpus=0)(Asleep).remote()
    replica = WarReplica.__new__(WarReplica)
    replica.replica_rank, replica.servers, replica._hang_s, replica._is_lost = 3, [server], 20.0, False
    assert (await replica.abort_all_requests())["aborted_count"] == 1
    replica._hang_s = 1.0
    if end == "killed":
        cluster.kill(server)
    await replica.sleep()
    assert "replica 3: up -> down for good" in caplog.text and "when asked to sleep" in caplog.text
    assert (await replica.abort_all_requests(reject_request=True))["aborted_count"] == 0
    await replica.resume_generation()


async def test_without_war_the_adapter_is_verls_own():
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    from verl_war.integration.verl.server_adapter import WarServerAdapter

    assert issubclass(WarServerAdapter, ServerAdapter)
    called = []

    async def update_weights(self, weights, **kwargs):
        called.append(kwargs)

    it = WarServerAdapter.__new__(WarServerAdapter)
    it._hang_s = None
    original, ServerAdapter.update_weights = ServerAdapter.update_weights, update_weights
    try:
        await it.update_weights([], global_steps=1)
    finally:
        ServerAdapter.update_weights = original
    assert called == [{"global_steps": 1, "wire_format": "named_tensors"}]
