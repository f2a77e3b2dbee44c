"""Sending weights to a replica that broke: the trainer goes on with the others, or says what is wrong.

Stock verl waits for ever: the sender sits in `socket.recv` for an engine that is dead, and its call of the server,
which would tell, is only looked at afterwards (verl/workers/rollout/vllm_rollout/vllm_rollout.py:180, 0.9.1). And a
rank that raises before it has gathered all weights leaves the other ranks waiting in a collective operation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
import zmq
from ray.exceptions import RayError
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from vllm.v1.engine.exceptions import EngineDeadError

from verl_war.core.config import parse_war_config
from verl_war.integration.verl.failures import GONE_ERRORS, cause_of
from verl_war.integration.verl.settings import rollout_war_settings

logger = logging.getLogger(__name__)

LOST_ERRORS = (*GONE_ERRORS, EngineDeadError, asyncio.TimeoutError)


LOOK_EVERY_S = 0.5
"""How long a dead engine goes unnoticed while it is sent weights."""


class PatientSocket:
    """What verl's sender does with its socket; `zmq.Again` is raised when nobody takes or answers for `patience_s`.

    Args:
        socket: Of a training rank.
        patience_s: From each message on.
        is_over: Whether the engine's call has ended, after which it takes and answers nothing.
    """

    def __init__(self, socket: zmq.Socket[bytes], patience_s: float, is_over: Callable[[], bool]) -> None:
        self._socket = socket
        self._patience_s = patience_s
        self._is_over = is_over
        socket.setsockopt(zmq.LINGER, 0)

    def send_pyobj(self, message: Any) -> None:
        """Send; without a receiver, sending waits too."""
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """The engine's answer."""
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def close(self) -> None:
        """Drop what was not taken."""
        self._socket.close()

    def _wait(self, event: int) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            # Before the look: what a call leaves behind at its end is there by then.
            is_last_look = self._is_over() or time.monotonic() >= deadline_s
            if self._socket.poll(1000 * min(LOOK_EVERY_S, self._patience_s), event):
                return
            if is_last_look:
                raise zmq.Again


class PatientSender(BucketedWeightSender):  # type: ignore[misc]
    """verl's sender with a `PatientSocket`."""

    def __init__(self, patience_s: float, is_over: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._patience_s = patience_s
        self._is_over = is_over

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = PatientSocket(self.socket, self._patience_s, self._is_over)


class WarServerAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter of one training rank to its replica; without `custom.war` it is nothing else than that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = rollout_war_settings(self.config)
        self._hang_s = None if settings is None else parse_war_config(settings).failures.replica_hang_s

    async def resume(self, tags: list[str]) -> None:
        """verl's, unless the replica is lost."""
        if self.config.free_cache_engine and not (self._hang_s is not None and await self._is_lost()):
            await super().resume(tags)

    async def release(self) -> None:
        """verl's, unless the replica is lost."""
        if self.config.free_cache_engine and not (self._hang_s is not None and await self._is_lost()):
            await super().release()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send the weights. A lost replica gets none, and never serves again: it would serve old ones.

        Raises:
            RuntimeError: The replica works but refuses the weights; the message names it.
        """
        if self._hang_s is None or wire_format != "named_tensors":
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        refusal: BaseException | None = None
        if not await self._is_lost():
            refusal = await self._send(weights, global_steps, kwargs)
        # Whatever became of this replica, gathering each tensor takes all ranks.
        async for _ in ensure_async_iterator(weights):
            pass
        if refusal is not None:
            raise RuntimeError(
                f"replica {self.replica_rank} refused the weights of step {global_steps} ({cause_of(refusal)}); its "
                f"server's log has the whole story"
            ) from refusal

    async def _send(self, weights: Any, global_steps: int | None, kwargs: dict[str, Any]) -> BaseException | None:
        """verl's `update_weights` with an end to its patience. Returns what a working replica has against it."""
        assert self._hang_s is not None
        call = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        bucket_size_mb = self.config.checkpoint_engine.update_weights_bucket_megabytes
        sender = PatientSender(
            self._hang_s, lambda: call is not None and bool(ray.wait([call], timeout=0)[0]),
            zmq_handle=self.zmq_handle, bucket_size_mb=bucket_size_mb, use_shm=self.use_shm,
        )  # fmt: skip
        try:
            await sender.async_send_weights(weights)
            if call is not None:
                await asyncio.wait_for(call, self._hang_s)
            if self._has_server:
                await asyncio.wait_for(self.server_handle.clear_kv_cache.remote(), self._hang_s)
                if global_steps is not None:
                    await asyncio.wait_for(self.server_handle.set_global_steps.remote(global_steps), self._hang_s)
        except zmq.Again as error:
            return await self._why_silent(call, error)
        except LOST_ERRORS as error:
            self._give_up(error, self.server_handle)
        return None

    async def _why_silent(self, call: Any, silence: zmq.Again) -> BaseException | None:
        """The engine took nothing: its answer to the call may say why."""
        try:
            if call is not None:
                await asyncio.wait_for(call, 1.0)
        except LOST_ERRORS:
            pass
        except RayError as error:
            return error
        self._give_up(silence, self.server_handle)
        return None

    async def _is_lost(self) -> bool:
        """Whether the replica's server or engine is gone or hangs. Every rank of a replica finds the same."""
        server = None
        try:
            # Of the replica's first node: only there is an engine that answers.
            server = ray.get_actor(f"{self._get_server_name_prefix()}server_{self.replica_rank}_0")
            await asyncio.wait_for(server.war_check_alive.remote(), self._hang_s)
        except ValueError:
            logger.error("replica %d: gets no weights (its server is gone)", self.replica_rank)
            return True
        except LOST_ERRORS as error:
            # Only by the rank that would send to it: another may be late itself.
            self._give_up(error, server if self._has_server else None)
            return True
        return False

    def _give_up(self, error: BaseException, server: Any) -> None:
        logger.error(
            "replica %d: up -> down for good (%s); it did not get the weights", self.replica_rank, cause_of(error)
        )
        if server is not None:
            ray.kill(server)
