"""The text of every trajectory in the draft index: one segment each, kept across its turns, never built twice."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from verl_war.history.index import NO_GROUP, DraftBatch, SegmentInfo, stable_id
from verl_war.integration.vllm.proposer import EXTRA_ARGS_KEY

logger = logging.getLogger(__name__)

MAX_OPEN_SEGMENTS = 8192
"""Segments of trajectories between two turns that are kept open; beyond it the longest idle one is finished. A
trajectory that comes back later pays for reading its context once more."""


class DraftIndex(Protocol):
    """What is used of `verl_war.history.index.HistoryIndex`; its docstrings apply."""

    def extend(self, key: int, tokens: npt.ArrayLike, start: int | None = None) -> int: ...
    def extend_batch(self, keys: Any, starts: Any, offsets: Any, tokens: Any) -> None: ...
    def draft_batch(self, keys: Any, max_tokens: Any, min_prob: float = 0.1) -> DraftBatch: ...
    def set_acceptance(self, table: npt.ArrayLike) -> None: ...
    def info(self, key: int) -> SegmentInfo: ...
    def stats(self) -> dict[str, int]: ...
    def __contains__(self, key: int) -> bool: ...


class DraftStore(Protocol):
    """What is used of `verl_war.history.store.HistoryStore`; its docstrings apply."""

    @property
    def index(self) -> DraftIndex: ...
    def sync(self, key: int, group: int, policy_step: int, context: npt.ArrayLike) -> int: ...
    def finish(self, key: int) -> bool: ...
    def set_reward(self, key: int, reward: float) -> None: ...
    def on_step(self, policy_step: int, collect: bool = True) -> None: ...
    def stats(self) -> dict[str, int]: ...


@dataclass(slots=True)
class LiveRequest:
    """One vLLM request, that is one turn of a trajectory.

    Attributes:
        name: Trajectory, or the request itself when the turn told none.
        group: Number of the prompt group; `NO_GROUP` when it is to be derived from the first prompt.
        step: Policy step, -1 when unknown.
        prompt: Context that was sent.
        outputs: The model runner's own list of generated tokens: it grows by itself, and outlives the request.
        limit_tokens: Longest context that the request can reach.
        free_tokens: Context length from which the request may end (`min_tokens`). No draft reaches over it: vLLM bans
            the end also from the token behind the drafts (`MinTokensLogitsProcessor.apply`, 0.27.1), which would
            change what is sampled there.
        stop_ids: Tokens behind which the request ends.
        key: Segment in the index, -1 before there is one.
        known: Tokens of this context that the segment holds.
        refused: The index does not take this text; the request gets no drafts.
        ended_at: Length of the context behind a stop token, -1 before there is one.
    """

    name: str
    group: int
    step: int
    prompt: npt.NDArray[np.int32]
    outputs: list[int]
    limit_tokens: int
    free_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    key: int = -1
    known: int = 0
    refused: bool = False
    ended_at: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens of the context now."""
        return self.ended_at if self.ended_at >= 0 else len(self.prompt) + len(self.outputs)

    def find_end(self) -> None:
        """Notice a stop token in the outputs that the segment does not hold.

        With drafts the model runner's list can go on behind one: those tokens were verified in the same step, and
        nobody but the scheduler knows that they are not part of the answer.
        """
        if self.ended_at < 0 and self.stop_ids:
            start = max(0, self.known - len(self.prompt))
            at = next((i for i, token in enumerate(self.outputs[start:], start) if token in self.stop_ids), None)
            if at is not None:
                self.ended_at = len(self.prompt) + at + 1

    def context(self, start: int = 0) -> npt.NDArray[np.int32]:
        """Tokens of the context from offset ``start`` on."""
        prompt_tokens = len(self.prompt)
        end = self.num_tokens - prompt_tokens
        outputs = np.asarray(self.outputs[max(0, start - prompt_tokens) : end], dtype=np.int32)
        return outputs if start >= prompt_tokens else np.concatenate((self.prompt[start:], outputs))


def describe(req_id: str, extra_args: Mapping[str, Any] | None) -> tuple[str, int, int]:
    """Name, group and policy step of a turn from what its client sent along.

    `group` must name the prompt alike in every step to make earlier steps usable; left out, the first prompt does.

    Raises:
        ValueError: That is not what a client of WAR sends.
    """
    told = (extra_args or {}).get(EXTRA_ARGS_KEY) or {}
    step = told.get("step", -1) if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or type(step) is not int or not -1 <= step < 1 << 31:
        raise ValueError(
            f"extra_args[{EXTRA_ARGS_KEY!r}]={told!r:.200} must be a mapping with names for `trajectory` and `group` "
            f"and a number of at least -1 for `step`; expected what WAR's client sends, or nothing"
        )
    name = told.get("trajectory")
    group = told.get("group")
    return str(name) if name else f"request:{req_id}", stable_id(str(group)) if group else NO_GROUP, step


class TurnEnds:
    """Tells requests that ended from those that left the batch to come back, preempted."""

    def __init__(self) -> None:
        self._left: dict[str, LiveRequest] = {}

    def leave(self, req_id: str, request: LiveRequest) -> None:
        """A request is not in the batch any more, or may not be when the engine next computes."""
        self._left[req_id] = request

    def settle(self, present: Container[str], is_alive: Callable[[str], bool]) -> list[int]:
        """Generated tokens of those that have ended since the last call.

        Args:
            present: Requests in the batch.
            is_alive: Whether the engine still has a request.
        """
        ended = []
        for req_id, request in list(self._left.items()):
            if req_id in present:
                del self._left[req_id]
            elif not is_alive(req_id):
                del self._left[req_id]
                ended.append(request.num_tokens - len(request.prompt))
        return ended


class TrajectoryTexts:
    """Opens, continues and closes segments. Called from the worker's main thread only."""

    def __init__(self, store: DraftStore) -> None:
        self.store = store
        self.index = store.index
        self.refused_requests = 0
        self._open: OrderedDict[str, int] = OrderedDict()
        self._busy: set[str] = set()
        self._continued: set[str] = set()
        self._backlog: OrderedDict[str, LiveRequest] = OrderedDict()

    def arrive(self, req_id: str, request: LiveRequest) -> None:
        """A request entered the batch, for the first time or after a preemption."""
        if request.name in self._busy:  # two live requests of one trajectory: each keeps its own text
            request.name = f"{request.name}/{req_id}"
        self._busy.add(request.name)

    def leave(self, request: LiveRequest) -> None:
        """A request left the batch: finished, aborted or preempted. Its text is taken over when there is time."""
        self._busy.discard(request.name)
        if not request.refused:
            self._backlog[request.name] = request

    def work_off(self, until_s: float, clock: Callable[[], float]) -> None:
        """Take over the text of requests that left, until ``clock()`` reaches ``until_s``."""
        while self._backlog and clock() < until_s:
            _, request = self._backlog.popitem(last=False)
            self.catch_up(request)

    @property
    def backlog(self) -> int:
        """Requests whose text waits to be taken over."""
        return len(self._backlog)

    def catch_up(self, request: LiveRequest) -> None:
        """Make the segment hold the whole context of ``request``, opening it first if need be."""
        if request.refused:
            return
        request.find_end()
        try:
            if request.key < 0:
                waiting = self._backlog.pop(request.name, None)
                if waiting is not None and waiting is not request:
                    self.catch_up(waiting)
                self._open_segment(request)
            elif request.known > request.num_tokens:  # the engine took tokens back: a failed KV transfer
                self._open_segment(request)
            if request.known < request.num_tokens:
                tail = request.context(request.known)
                self.index.extend(request.key, tail, start=request.known)
                request.known += len(tail)
        except (ValueError, KeyError) as error:
            self.refuse(request, error)

    def refuse(self, request: LiveRequest, error: Exception) -> None:
        """Give up on the text of one request; it goes on without drafts."""
        self.note_refusal(error)
        request.refused = True
        if self._open.get(request.name) == request.key:
            del self._open[request.name]

    def note_refusal(self, error: Exception) -> None:
        """A request goes on without drafts."""
        if self.refused_requests == 0:
            logger.warning("drafting refuses requests, which go on without (this one and later ones): %s", error)
        self.refused_requests += 1

    def set_rewards(self, rewards: Mapping[str, float]) -> None:
        """What trajectories were worth, by name."""
        for name, reward in rewards.items():
            self.store.set_reward(stable_id(name), reward)

    def finish_idle(self) -> int:
        """Close the segments that were not continued since the call before, as at every weight update.

        A trajectory may be in a tool call, or its turn cut short, while the weights change: it gets one more step.
        """
        idle = [name for name in self._open if name not in self._busy and name not in self._continued]
        for name in idle:
            self._finish(name)
        self._continued.clear()
        return len(idle)

    def _open_segment(self, request: LiveRequest) -> None:
        key = stable_id(request.name)
        if key in self.index:  # known from an earlier turn or from before a preemption
            group, context = self.index.info(key).group, request.context()
        else:
            group, context = request.group, request.prompt
        if group == NO_GROUP:
            group = prompt_group(request.prompt)
        self.store.sync(key, group, request.step, context)
        self._take(request, key, known=len(context))

    def _take(self, request: LiveRequest, key: int, known: int) -> None:
        request.key = key
        request.known = known
        self._open[request.name] = key
        self._open.move_to_end(request.name)
        self._continued.add(request.name)
        if len(self._open) > MAX_OPEN_SEGMENTS:
            oldest = next((name for name in self._open if name not in self._busy), None)
            if oldest is not None:
                self._finish(oldest)

    def _finish(self, name: str) -> None:
        key = self._open.pop(name)
        self._continued.discard(name)
        if key in self.index and self.index.info(key).live:
            self.store.finish(key)


def prompt_group(prompt: npt.NDArray[np.int32]) -> int:
    """Group number of a first prompt, the same on every replica and in every epoch."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
