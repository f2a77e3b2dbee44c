"""Prompts of an agent loop worker that is killed end as failed, so that verl's sampler goes on."""

import asyncio
import os
import signal

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.asyncio(loop_scope="module")]


class Worker:
    async def pid(self):
        return os.getpid()


async def test_unfinished_prompts_of_a_dead_worker_are_reported(cluster, caplog):
    from verl_war.integration.verl.worker_watch import WorkerWatch

    workers = [cluster.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    pids = [await worker.pid.remote() for worker in workers]
    failed, refusals = [], [RuntimeError("the queue does not answer")]

    def report(uids):
        if refusals:
            raise refusals.pop()
        failed.append(uids)
        return len(uids)

    watch = WorkerWatch(workers, report, ping_every_s=0.2)
    watch.on_dispatch(workers[0], ["a", "b"])
    watch.on_dispatch(workers[1], ["c"])
    await asyncio.sleep(1.0)
    assert failed == []
    os.kill(pids[0], signal.SIGKILL)
    for _ in range(100):
        if failed:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    assert failed == [{"a", "b"}], "once, and only its own"
    assert "the queue does not answer" in caplog.text, "a report that fails is tried again"
    await asyncio.to_thread(watch.stop)


async def test_verls_sampler_goes_on_when_a_prompt_is_reported(cluster):
    """With the real TransferQueue and the real sampler: what two workers would write, one of them dying."""
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_war.integration.verl.worker_watch import fail_prompts

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}] * 3
        tq.kv_batch_put(keys=["done", "begun", "waiting"], partition_id="train", tags=tags)
        tq.kv_put(key="begun", partition_id="train", tag={"status": "running"})
        for session in range(2):
            fields = TensorDict({"x": torch.zeros(1, 2)}, batch_size=1)
            tq.kv_batch_put(
                keys=[f"done_{session}_0"], fields=fields, tags=[{"status": "success"}], partition_id="train"
            )
        tq.kv_put(key="done", partition_id="train", tag={"status": "finished"})

        buffer = ReplayBuffer("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}), poll_interval=0.05)
        sampling = asyncio.ensure_future(asyncio.to_thread(buffer.sample, 1, "train", 3))
        await asyncio.sleep(1.0)
        assert not sampling.done(), "verl waits for prompts whose worker is dead"
        assert await asyncio.to_thread(fail_prompts, {"done", "begun", "waiting", "forgotten"}) == 2
        batch, _ = await asyncio.wait_for(sampling, 30)
        assert sorted(batch.keys) == ["done_0_0", "done_1_0"], "nothing of the failed prompts is trained on"
    finally:
        tq.close()
