"""Weight transfer to rollout replicas in other processes through Ray's object store.

verl's transports for the trainer mode `separate_async` need NCCL, NIXL or Mooncake. This one needs nothing
but Ray, so that the mode also runs on machines without a GPU. Selected by:

    actor_rollout_ref.rollout.checkpoint_engine.backend=object_store
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_war.integration.verl.object_store_engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

Bucket = dict[str, torch.Tensor]


@ray.remote(num_cpus=0)
class Mailbox:
    """Hands the buckets of one weight update, in order, to any number of receivers."""

    def __init__(self) -> None:
        self._buckets: list[Any] = []
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, refs: list[Any]) -> None:
        """Add one bucket, given as a list of one reference so that it is not fetched here."""
        async with self._changed:
            self._buckets.append(refs)
            self._changed.notify_all()

    async def close(self) -> None:
        """State that no bucket follows."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def get(self, index: int) -> list[Any] | None:
        """Bucket number `index` as soon as it is there; None when there are no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or index < len(self._buckets))
            return self._buckets[index] if index < len(self._buckets) else None


@CheckpointEngineRegistry.register("object_store")
class ObjectStoreCheckpointEngine(CheckpointEngine):
    """Actor rank 0 puts buckets of at most `bucket_size` bytes (or one larger tensor) in the object store."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._mailbox: Any = None

    def prepare(self) -> dict[str, Any]:
        """Rank 0 opens the mailbox of this update."""
        return {"mailbox": Mailbox.remote() if self.is_master else None}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everybody gets rank 0's mailbox."""
        mailbox = metadata[0]["mailbox"]
        if mailbox is None:
            raise RuntimeError("actor rank 0 opened no mailbox; the object_store engine expects it to be the master")
        return {"mailbox": [mailbox] * actor_wg_world_size}, {"mailbox": [mailbox] * rollout_world_size}

    def init_process_group(self, mailbox: Any) -> None:
        """Take over the mailbox of this update."""
        self._mailbox = mailbox

    def finalize(self) -> None:
        """Free the update's buckets."""
        if self.is_master:
            ray.kill(self._mailbox)
        self._mailbox = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Send all weights. Every actor rank must come along: gathering each tensor is collective."""
        bucket: Bucket = {}
        bucket_bytes = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_master:
                continue
            if bucket and bucket_bytes + tensor.nbytes > self.bucket_size:
                await self._post(bucket)
                bucket, bucket_bytes = {}, 0
            bucket[name] = tensor.detach().to("cpu", copy=True)
            bucket_bytes += tensor.nbytes
        if self.is_master:
            await self._post(bucket)
            await self._mailbox.close.remote()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every weight of this update, in the order sent."""
        index = 0
        while (refs := await self._mailbox.get.remote(index)) is not None:
            bucket: Bucket = await refs[0]
            for name, tensor in bucket.items():
                yield name, tensor
            index += 1

    async def _post(self, bucket: Bucket) -> None:
        await self._mailbox.put.remote([ray.put(bucket)])
