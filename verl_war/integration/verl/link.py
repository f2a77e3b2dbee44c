"""One process's line to the router. Messages of one moment travel together, and a router that dies is joined again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayActorError, RayError

from verl_war.core.config import WarConfig
from verl_war.core.types import Turn, TurnResult
from verl_war.integration.verl.failures import RouterNotConfiguredError, cause_of
from verl_war.integration.verl.router_protocol import Answer, Grant, Message, Pool, Waiting, pack_result, pack_turn

logger = logging.getLogger(__name__)

ROUTER_RETURN_S = 60.0
"""How long a dead router may take to be there again: Ray starts its process within seconds."""

MAX_BATCH = 512
"""Messages of one call: enough to make its overhead small, few enough that the first need not wait for the last."""

ROUTER_LOST_ERRORS = (RayActorError, RouterNotConfiguredError)


class RouterLink:
    """Sends messages to the router in batches, one batch at a time.

    One call carries whatever has come up while the one before was under way: alone a turn is sent at once, and a
    thousand that start together cost a few calls.
    """

    def __init__(self, router: Any, config: WarConfig, full_determinism: bool) -> None:
        self.router = router
        self._config = config
        self._full_determinism = full_determinism
        self._patience_s = config.admission.max_hold_s + config.failures.turn_deadline_s
        self._owner = uuid4().hex
        self._outbox: list[tuple[Message, asyncio.Future[Answer] | None, Turn | None]] = []
        self._sending: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._is_joined = False
        self._pool: Pool | None = None
        self._is_pool_old = False
        self._loss_of: dict[str, asyncio.Future[None]] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._heard = 0
        self._listening: asyncio.Task[None] | None = None

    async def acquire(self, turn: Turn) -> tuple[str, Any, int]:
        """Ask for a turn and wait until it may run. Cancelled, it gives back what the router grants.

        Returns:
            Replica id, handle of its server, engine priority.

        Raises:
            RuntimeError: No replica can serve it.
            RayActorError: The router is dead and does not come back.
            TimeoutError: It does not answer.
        """
        while True:
            try:
                if not self._is_joined:
                    await self._join()
                grant = await asyncio.wait_for(self._ask(turn), self._patience_s)
                server = await self._server_of(grant, turn)
                if server is not None:
                    return grant.replica_id, server, grant.priority
                # It left, or broke, before this process heard of the grant, and nobody would tell of it again.
                self._give_back(grant, turn)
            except ROUTER_LOST_ERRORS as error:
                await self._join(error)
            except asyncio.TimeoutError:
                raise TimeoutError(
                    f"the router held a turn of trajectory {turn.trajectory_id} for {self._patience_s:.0f} s, longer "
                    f"than admission.max_hold_s and failures.turn_deadline_s together allow: its process hangs"
                ) from None

    def end_turn(self, turn: Turn, replica_id: str, result: TurnResult) -> None:
        """Tell the router that a turn ended. Does not wait."""
        self._post(("turn_end", turn.trajectory_id, turn.session_id, replica_id, *pack_result(result)))

    def end_trajectory(self, trajectory_id: str, failed: bool) -> None:
        """Tell the router that a trajectory ended. Does not wait."""
        self._post(("trajectory_end", trajectory_id, failed))

    def loss_of(self, replica_id: str) -> asyncio.Future[None]:
        """Done when the router takes this replica out of the pool because it broke. Shared: not to be cancelled."""
        loss = self._loss_of.get(replica_id)
        if loss is None:
            loss = self._loss_of[replica_id] = asyncio.get_running_loop().create_future()
        return loss

    async def report_replica(self, replica_id: str, cause: str, is_gone: bool) -> None:
        """Tell the router that a turn failed on a replica, and wait for what it does about it."""
        try:
            await self.router.report_replica.remote(replica_id, cause, is_gone)
        except ROUTER_LOST_ERRORS:
            pass  # the turn is asked for again next, which finds the router dead and waits for it

    async def _ask(self, turn: Turn) -> Grant:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._post(("turn", *pack_turn(turn)), answer, turn)
        granted = await answer
        if isinstance(granted, Exception):
            raise granted
        if isinstance(granted, Grant):
            return granted
        return await self._wait(granted.ticket, turn)

    async def _wait(self, ticket: int, turn: Turn) -> Grant:
        """Wait for the answer to a held turn."""
        try:
            answer = await asyncio.shield(self._answer_to(ticket))
        except asyncio.CancelledError:
            self._give_up(ticket, turn)
            raise
        self._answers.pop(ticket, None)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Grant)
        return answer

    async def _server_of(self, grant: Grant, turn: Turn) -> Any:
        """Handle of the granted replica's server; None when it is not in the pool any more."""
        try:
            if self._pool is None or grant.replica_id not in self._pool.servers:
                await self._refresh_pool()
            while self._is_pool_old:
                await self._refresh_pool()
        except asyncio.CancelledError:
            self._give_back(grant, turn)
            raise
        return None if self._pool is None else self._pool.servers.get(grant.replica_id)

    def _answer_to(self, ticket: int) -> asyncio.Future[Answer]:
        """Answer to a held turn; it may come before the ticket does."""
        answer = self._answers.get(ticket)
        if answer is None:
            answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        return answer

    def _give_up(self, ticket: int, turn: Turn) -> None:
        """A held turn was cancelled. Its answer comes nevertheless, and if it is a grant it goes back."""

        def give_back(done: asyncio.Future[Answer]) -> None:
            self._answers.pop(ticket, None)
            self._give_back(done.result(), turn)

        answer = self._answer_to(ticket)
        if not answer.done():
            self._post(("give_up", ticket))
        answer.add_done_callback(give_back)

    def _give_back(self, answer: Answer, turn: Turn) -> None:
        if isinstance(answer, Grant):
            self.end_turn(turn, answer.replica_id, TurnResult(failed=True))

    def _post(self, message: Message, answer: asyncio.Future[Answer] | None = None, turn: Turn | None = None) -> None:
        self._outbox.append((message, answer, turn))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while self._outbox:
            batch, self._outbox = self._outbox[:MAX_BATCH], self._outbox[MAX_BATCH:]
            asked = [(turn, answer) for _, answer, turn in batch if answer is not None and turn is not None]
            try:
                stamp, answers = await self.router.exchange.remote(self._owner, [message for message, _, _ in batch])
                if self._pool is None or stamp != (self._pool.router, self._pool.version):
                    await self._refresh_pool()
            except (RayError, RouterNotConfiguredError) as error:
                self._is_joined = False
                # Ends are lost with the router that counted them; turns are asked for again.
                answers = [error] * len(asked)
            for (turn, answer), its_answer in zip(asked, answers, strict=True):
                self._settle(turn, answer, its_answer)

    def _settle(self, turn: Turn, answer: asyncio.Future[Answer], its_answer: Answer) -> None:
        if not answer.done():
            answer.set_result(its_answer)
        elif isinstance(its_answer, Waiting):
            self._give_up(its_answer.ticket, turn)
        else:
            self._give_back(its_answer, turn)

    async def _listen(self) -> None:
        """Take the router's news, all that there is with one call. Ends with the router; joining begins anew."""
        try:
            while True:
                self._heard, news = await self.router.news.remote(self._owner, self._heard)
                for kind, subject, *rest in news:
                    if kind == "lost":
                        self._on_loss(subject)
                    elif not self._answer_to(subject).done():
                        self._answer_to(subject).set_result(*rest)
        except ROUTER_LOST_ERRORS as error:
            self._listening = None
            try:
                # The end of a run takes the router first, when nobody needs it any more.
                await self._join(error, is_missed=bool(self._answers or self._outbox))
            except RayError as final:
                self._on_new_router(final)
        except RayError as error:
            logger.exception("router: its news cannot be heard")
            self._on_new_router(error)

    def _on_loss(self, replica_id: str) -> None:
        self._is_pool_old = True
        loss = self._loss_of.pop(replica_id, None)
        if loss is not None:
            loss.set_result(None)

    def _on_new_router(self, error: Exception) -> None:
        """What was held is held no more; it is asked for again."""
        self._heard = 0
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(error)

    async def _refresh_pool(self) -> None:
        self._is_pool_old = False
        pool = await self.router.pool.remote()
        if self._pool is not None and pool.router != self._pool.router:
            # Another process met it first, and it has its settings from there.
            await self._join(RouterNotConfiguredError("the router was started again"))
            return
        self._pool = pool

    async def _join(self, error: BaseException | None = None, is_missed: bool = True) -> None:
        """Join the router, or wait until it is there again; all turns of the process wait for the same attempt."""
        if self._joining is None or self._joining.done():
            self._joining = asyncio.ensure_future(self._join_until(error, is_missed))
        await asyncio.shield(self._joining)

    async def _join_until(self, error: BaseException | None, is_missed: bool) -> None:
        if error is not None:
            logger.log(logging.WARNING if is_missed else logging.INFO, "router: up -> down (%s)", cause_of(error))
        deadline_s = time.monotonic() + ROUTER_RETURN_S
        handle = _own_actor()
        known = "" if self._pool is None else self._pool.router
        while True:
            try:
                self._pool = await self.router.join.remote(
                    self._config, self._full_determinism, self._owner, handle, self._pool
                )
                break
            except RayActorError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(1.0)
        if known and self._pool.router != known:
            self._on_new_router(RouterNotConfiguredError("the router was started again"))
        self._is_joined = True
        if self._listening is None or self._listening.done():
            self._listening = asyncio.ensure_future(self._listen())
        if error is not None:
            logger.warning("router: down -> up (started again by Ray; %d replicas)", len(self._pool.servers))


def _own_actor() -> Any:
    """The actor that this process is; None in a driver."""
    if not ray.is_initialized():  # asking for the context would start a cluster
        return None
    context = ray.get_runtime_context()
    return context.current_actor if context.get_actor_id() is not None else None
