"""Turns that ask to run, and the futures of those that are held. Everything is on the router's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from verl_war.core.manager import WorkloadManager
from verl_war.core.types import Placement, Turn, TurnResult
from verl_war.integration.verl.failures import NO_SERVERS
from verl_war.integration.verl.router_mail import Item, Mailbox
from verl_war.integration.verl.router_protocol import Answer, Grant, Waiting

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""How often a turn that found an empty pool looks again."""


@dataclass(slots=True, eq=False)
class Admission:
    """A turn whose client waits for its grant. One without owner waits at `Turns.wait`, the others for their mail."""

    ticket: int
    owner: str
    turn: Turn
    grant: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """Hands the manager's placements to the clients that wait for them.

    Args:
        manager: The decisions.
        deadline_s: How long a turn waits for a replica to join an empty pool.
        may_return: Whether a replica that broke can go on.
        may_fill: Whether that, or verl, can put a replica in an empty pool.
        mailbox_of: Mailbox of an owner.
    """

    def __init__(
        self,
        manager: WorkloadManager,
        deadline_s: float,
        may_return: Callable[[], bool],
        may_fill: Callable[[], bool],
        mailbox_of: Callable[[str], Mailbox],
    ) -> None:
        self._manager = manager
        self._deadline_s = deadline_s
        self._may_return = may_return
        self._may_fill = may_fill
        self._mailbox_of = mailbox_of
        self._admissions: dict[int, Admission] = {}
        self._of_session: dict[str, Admission] = {}
        self._of_trajectory: dict[str, list[Admission]] = {}
        self._stranded: set[asyncio.Task[None]] = set()
        self._tickets = 0
        self._empty_since_s: float | None = None

    def ask(self, owner: str, turn: Turn) -> Answer:
        """A client wants to run a turn."""
        if turn.session_id in self._of_session:
            # Its session has a held turn. The core knows one at a time; agent loops that send two get them in order.
            return self._strand(owner, turn, self._after_earlier)
        answer, others = self._try(turn)
        if isinstance(answer, RuntimeError) and str(answer) == NO_SERVERS and self._may_return():
            return self._strand(owner, turn, self._until_pool_fills)
        if answer is None:
            admission = self._admission(owner, turn)
            self._hold(admission)
            answer = Waiting(admission.ticket)
        self.deliver(others)
        return answer

    async def wait(self, ticket: int) -> Grant:
        """Wait until a held turn may start.

        Raises:
            RuntimeError: No replica is left that could serve it, or it was given up.
        """
        admission = self._admissions.get(ticket)
        if admission is None:
            raise RuntimeError(f"ticket {ticket} is unknown to the router: its turn was given up or its client is dead")
        try:
            return await asyncio.shield(admission.grant)
        except asyncio.CancelledError:
            self._give_up(admission)
            raise
        finally:
            self._admissions.pop(ticket, None)

    def give_up(self, owner: str, ticket: int) -> None:
        """A client does not want a held turn any more.

        Every ticket is answered once, this one with an error. A grant that was handed out is not answered again: the
        client gives it back.
        """
        admission = self._admissions.get(ticket)
        if admission is not None:
            self._give_up(admission)
            return
        mailbox = self._mailbox_of(owner)
        turn, answer = mailbox.withdraw(ticket) or (None, None)
        if turn is not None and isinstance(answer, Grant):
            self._give_back(turn, answer.replica_id)
        if turn is not None:
            mailbox.put(Item(("answer", ticket, _given_up(turn))))

    def _give_up(self, admission: Admission) -> None:
        if not admission.grant.done():
            is_held = self._of_session.get(admission.turn.session_id) is admission
            self._refuse(admission, _given_up(admission.turn))
            if is_held:
                self.deliver(self._manager.on_turn_abandoned(admission.turn.session_id, time.monotonic()))
        elif admission.grant.exception() is None:
            self._give_back(admission.turn, admission.grant.result().replica_id)

    def end_turn(self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult) -> None:
        """A turn ended on a replica."""
        self.deliver(self._manager.on_turn_end(trajectory_id, session_id, replica_id, result, time.monotonic()))

    def end_trajectory(self, trajectory_id: str, failed: bool) -> None:
        """A trajectory ended; turns of it that are held are given up."""
        for admission in list(self._of_trajectory.get(trajectory_id, ())):
            self._refuse(admission, RuntimeError(f"trajectory {trajectory_id} ended while a turn of it was held"))
        self.deliver(self._manager.on_trajectory_end(trajectory_id, failed, time.monotonic()))

    def forget_owner(self, owner: str) -> None:
        """A client process died: nobody will fetch its grants."""
        for admission in [admission for admission in self._admissions.values() if admission.owner == owner]:
            self.give_up(owner, admission.ticket)

    def deliver(self, placements: Iterable[Placement]) -> None:
        """Let turns start; one that nobody waits for any more is given back, which may start others."""
        queue = deque(placements)
        while queue:
            placement = queue.popleft()
            admission = self._of_session.get(placement.session_id)
            if admission is not None:
                self._unhold(admission)
                self._grant(admission, Grant(placement.replica_id, placement.priority))
                continue
            logger.warning("turn of session %s was placed, but its client is gone: given back", placement.session_id)
            result = TurnResult(failed=True)
            queue.extend(self._manager.on_turn_end(
                placement.trajectory_id, placement.session_id, placement.replica_id, result, time.monotonic()
            ))  # fmt: skip

    def tick(self, now_s: float) -> None:
        """Start what is overdue; refuse what can never start."""
        if self._manager.inflight:
            self._empty_since_s = None
            self.deliver(self._manager.on_tick(now_s))
            return
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if not self._may_fill() or now_s - self._empty_since_s >= self._deadline_s:
            for admission in list(self._of_session.values()):
                self._refuse(admission, RuntimeError(NO_SERVERS))
                self._manager.on_turn_abandoned(admission.turn.session_id, now_s)

    def _try(self, turn: Turn) -> tuple[Grant | Exception | None, list[Placement]]:
        """Ask the manager. Returns the turn's own answer, None when it is held, and what else starts with it."""
        begin_s = time.perf_counter()
        try:
            placements = self._manager.on_turn(turn, time.monotonic())
        except (RuntimeError, ValueError) as error:
            return error, []
        self._manager.on_decision_time(time.perf_counter() - begin_s)
        for position, placement in enumerate(placements):
            if placement.session_id == turn.session_id:
                del placements[position]
                return Grant(placement.replica_id, placement.priority), placements
        return None, placements

    def _admission(self, owner: str, turn: Turn) -> Admission:
        self._tickets += 1
        admission = self._admissions[self._tickets] = Admission(self._tickets, owner, turn)
        return admission

    def _hold(self, admission: Admission) -> None:
        self._of_session[admission.turn.session_id] = admission
        self._of_trajectory.setdefault(admission.turn.trajectory_id, []).append(admission)

    def _unhold(self, admission: Admission) -> None:
        del self._of_session[admission.turn.session_id]
        siblings = self._of_trajectory[admission.turn.trajectory_id]
        siblings.remove(admission)
        if not siblings:
            del self._of_trajectory[admission.turn.trajectory_id]

    def _refuse(self, admission: Admission, error: Exception) -> None:
        """Wake a waiting client with an error."""
        if self._of_session.get(admission.turn.session_id) is admission:
            self._unhold(admission)
        if not admission.grant.done():
            admission.grant.set_exception(error)
            admission.grant.exception()  # marks it as seen: a dead client does not fetch it
            self._mail(admission, error)

    def _grant(self, admission: Admission, grant: Grant) -> None:
        admission.grant.set_result(grant)
        self._mail(admission, grant)

    def _mail(self, admission: Admission, answer: Answer) -> None:
        if admission.owner:
            self._admissions.pop(admission.ticket, None)
            self._mailbox_of(admission.owner).put(Item(("answer", admission.ticket, answer), admission.turn))

    def _give_back(self, turn: Turn, replica_id: str) -> None:
        self.end_turn(turn.trajectory_id, turn.session_id, replica_id, TurnResult(failed=True))

    def _strand(self, owner: str, turn: Turn, until: Callable[[Admission], Awaitable[None]]) -> Waiting:
        admission = self._admission(owner, turn)
        task = asyncio.ensure_future(self._ask_later(admission, until))
        self._stranded.add(task)
        task.add_done_callback(self._stranded.discard)
        return Waiting(admission.ticket)

    async def _ask_later(self, admission: Admission, until: Callable[[Admission], Awaitable[None]]) -> None:
        """Ask for a turn once it can be asked for, unless its client has given up by then."""
        await until(admission)
        if admission.grant.done():
            return
        answer, others = self._try(admission.turn)
        if answer is None:
            self._hold(admission)
        elif isinstance(answer, Grant):
            self._grant(admission, answer)
        else:
            self._refuse(admission, answer)
        self.deliver(others)

    async def _after_earlier(self, admission: Admission) -> None:
        while (earlier := self._of_session.get(admission.turn.session_id)) is not None:
            await asyncio.wait((earlier.grant,))

    async def _until_pool_fills(self, admission: Admission) -> None:
        deadline_s = time.monotonic() + self._deadline_s
        while not self._manager.inflight and self._may_return() and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)


def _given_up(turn: Turn) -> RuntimeError:
    return RuntimeError(f"turn of session {turn.session_id} was given up by its client")
