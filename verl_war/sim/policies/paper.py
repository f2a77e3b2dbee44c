"""The scheduler of the WAR paper, as it is described: a threshold, a four-term score and a window per replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_war.core.types import Turn, TurnResult
from verl_war.sim.kv_cache import BLOCK_TOKENS
from verl_war.sim.policies.base import PolicyContext, Start
from verl_war.sim.policies.routing import PrefixRouting

SCHEDULE_THRESHOLD = 16
"""Live requests per replica from which the fleet is scheduled. The paper's own value is of its fleet; this is the one
that it gives for speculation."""

WAIT_LIMIT_S = 60.0
"""Waiting counts nothing up to here and more than all else beyond: the sandbox's time to live is at stake."""

TURNS_WEIGHT = 1e6
HIT_WEIGHT = 1e3
"""The paper gives the order of the terms; these keep it: turns by the hundred, hits from 0 to 1, requests by the
hundred."""

WAIT_WEIGHT = 1e9

SMOOTHING = 0.5
"""`a` of `T <- a * T_obs + (1 - a) * T_old`."""

FIRST_ESTIMATE_TURNS = 10.0
"""Turns of a group of which nothing has ended."""

HIT_TARGET = 0.8
"""Cache hit rate from which a window grows."""

INCREASE = 1.0
DECREASE = 0.5
"""Of the window, in requests and as a factor: additive increase, multiplicative decrease."""

WINDOW_TURNS = 8
"""Turns that return on a replica between two changes of its window."""


@dataclass(slots=True)
class _Window:
    """A replica's concurrency window and what was seen since it last changed."""

    size: float
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    turn: Turn
    since_s: float


class PaperLike(PrefixRouting):
    """WAR's fleet scheduler after its paper.

    With fewer live requests than `SCHEDULE_THRESHOLD` per replica: verl's rule, sticky and fewest requests in flight.
    Otherwise turns queue, and the pair (request, replica) of the greatest score starts, on a replica whose window has
    room, until none has:

        score = wait (0 up to a limit, then large) - estimated turns of the group + cache hit - requests in flight

    each term outweighing all that follow it. Estimates are smoothed over finished siblings. The window of a replica is
    `W = min(max(1, W_hat), inflight + queue / replicas)`, `W_hat` growing by 1 while the hit rate is good and halved
    when it is not; it is at least 1 here, where the formula as given closes an idle replica for a short queue.

    Not given where we read it, and chosen here: the constants above. The direction of the hit rate's test is the one
    that works: a bad rate means too many requests.

    Source: arXiv 2607.17299 v1, sections on the global scheduler, read second-hand.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._windows: dict[str, _Window] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._estimates: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._group: dict[str, str] = {}
        self._prompts: dict[str, int] = {}

    def on_replica_up(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self._windows[replica_id] = _Window(float(SCHEDULE_THRESHOLD))
        super().on_replica_up(replica_id, now_s)
        return self._drain(now_s)

    def on_replica_down(self, replica_id: str, now_s: float) -> Sequence[Start]:
        self._windows.pop(replica_id, None)
        super().on_replica_down(replica_id, now_s)
        return self._drain(now_s)

    def on_turn(self, turn: Turn, now_s: float) -> Sequence[Start]:
        self._group[turn.trajectory_id] = turn.group_id
        self._waiting[turn.trajectory_id] = _Waiting(turn, now_s)
        return self._drain(now_s)

    def on_turn_end(
        self, trajectory_id: str, session_id: str, replica_id: str, result: TurnResult, now_s: float
    ) -> Sequence[Start]:
        super().on_turn_end(trajectory_id, session_id, replica_id, result, now_s)
        if not result.failed:
            self._turns[trajectory_id] = self._turns.get(trajectory_id, 0) + 1
            self._learn(replica_id, self._prompts.get(trajectory_id, 0), result)
        return self._drain(now_s)

    def on_trajectory_end(self, trajectory_id: str, failed: bool, now_s: float) -> Sequence[Start]:
        super().on_trajectory_end(trajectory_id, failed, now_s)
        self._waiting.pop(trajectory_id, None)
        self._prompts.pop(trajectory_id, None)
        group, turns = self._group.pop(trajectory_id, ""), self._turns.pop(trajectory_id, 0)
        if turns and not failed:
            self._estimates[group] = SMOOTHING * turns + (1 - SMOOTHING) * self.estimated_turns(group)
        return self._drain(now_s)

    def on_tick(self, now_s: float) -> Sequence[Start]:
        return self._drain(now_s)

    def choose(self, turn: Turn, now_s: float) -> str:
        """verl's rule, for a fleet that is not loaded."""
        return self.home.get(turn.trajectory_id) or self.fewest(self.inflight)

    def estimated_turns(self, group_id: str) -> float:
        """Turns of a trajectory of the group."""
        return self._estimates.get(group_id, FIRST_ESTIMATE_TURNS)

    def score(self, turn: Turn, replica_id: str, waited_s: float) -> float:
        """Score of serving the turn on the replica; the greatest wins."""
        blocks = max(1.0, turn.prompt_tokens / BLOCK_TOKENS)
        hit = min(1.0, self._view.matched(replica_id, turn.block_hashes) / blocks)
        wait = waited_s if waited_s > WAIT_LIMIT_S else 0.0
        turns = self.estimated_turns(turn.group_id)
        return WAIT_WEIGHT * wait - TURNS_WEIGHT * turns + HIT_WEIGHT * hit - self.inflight[replica_id]

    def window(self, replica_id: str) -> float:
        """Requests that may be in flight on a replica."""
        room = self.inflight[replica_id] + len(self._waiting) / len(self.inflight)
        return max(1.0, min(max(1.0, self._windows[replica_id].size), room))

    def begun(self, turn: Turn, replica_id: str) -> None:
        self._view.record(replica_id, turn.block_hashes)
        self._prompts[turn.trajectory_id] = turn.prompt_tokens

    def _drain(self, now_s: float) -> list[Start]:
        starts: list[Start] = []
        while self._waiting and self.inflight:
            chosen = self._next(now_s)
            if chosen is None:
                break
            turn, replica_id = chosen
            del self._waiting[turn.trajectory_id]
            starts.append(self.start(turn, replica_id))
        return starts

    def _next(self, now_s: float) -> tuple[Turn, str] | None:
        """The turn to start now and where; None when all have to wait."""
        live = sum(self.inflight.values()) + len(self._waiting)
        if live < SCHEDULE_THRESHOLD * len(self.inflight):
            turn = next(iter(self._waiting.values())).turn
            return turn, self.choose(turn, now_s)
        open_ones = [name for name in self.inflight if self.inflight[name] < self.window(name)]
        pairs = [(waiting, name) for waiting in self._waiting.values() for name in open_ones]
        if not pairs:
            return None
        best, replica_id = max(pairs, key=lambda pair: self.score(pair[0].turn, pair[1], now_s - pair[0].since_s))
        return best.turn, replica_id

    def _learn(self, replica_id: str, prompt_tokens: int, result: TurnResult) -> None:
        window = self._windows.get(replica_id)
        if window is None or result.num_cached_tokens is None:
            return
        window.turns += 1
        window.prompt_tokens += prompt_tokens
        window.cached_tokens += result.num_cached_tokens
        if window.turns < WINDOW_TURNS:
            return
        good = window.cached_tokens >= HIT_TARGET * window.prompt_tokens
        size = window.size + INCREASE if good else max(1.0, window.size * DECREASE)
        self._windows[replica_id] = _Window(size)
