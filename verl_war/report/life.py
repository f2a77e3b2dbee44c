"""The life of one trajectory: where its time went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

State = Literal["generating", "held", "tool"]
"""A turn is in flight; none is, but one is held; neither: a tool runs, or the agent loop works."""

STATES: tuple[State, ...] = ("generating", "held", "tool")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one state, on `replica_id` if turns are in flight."""

    state: State
    begin_s: float
    end_s: float
    replica_id: str = ""


@dataclass(slots=True)
class _Running:
    session_id: str
    replica_id: str
    begin_s: float
    prompt_tokens: int


@dataclass(slots=True)
class Life:
    """A trajectory from its first turn on.

    Attributes:
        begin_s: When it asked for its first turn.
        end_s: When it ended; the last event's time while it lives.
        turns: Turns that started.
        seconds: Time in each state.
        longest_s: Longest stretch in each state.
        holds: Turns that were held.
        moves: Turns that started elsewhere than the one before.
        completion_tokens: Tokens generated.
        computed_prompt_tokens: Prompt tokens that no cache had, as far as the engines said.
        on_replicas: Replica -> (seconds of turns, tokens generated) there.
        spans: Its states in order.
    """

    trajectory_id: str
    validate: bool
    begin_s: float
    end_s: float
    failed: bool = False
    turns: int = 0
    holds: int = 0
    moves: int = 0
    completion_tokens: int = 0
    computed_prompt_tokens: int = 0
    home: str = ""
    seconds: dict[State, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    longest_s: dict[State, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    on_replicas: dict[str, tuple[float, int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    asked: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Session -> time and prompt tokens of its turn that has not started."""
    sessions: set[str] = field(default_factory=set)
    running: list[_Running] = field(default_factory=list)

    @property
    def state(self) -> State:
        """What it does now."""
        return "generating" if self.running else "held" if self.asked else "tool"

    def ask(self, session_id: str, prompt_tokens: int, now_s: float) -> None:
        """It asks for a turn."""
        self._until(now_s)
        self.sessions.add(session_id)
        self.asked[session_id] = (now_s, prompt_tokens)

    def start(self, session_id: str, replica_id: str, now_s: float) -> float:
        """A turn starts; returns how long it was held, in seconds."""
        self._until(now_s)
        asked_s, prompt_tokens = self.asked.pop(session_id, (now_s, 0))
        self.turns += 1
        self.holds += now_s > asked_s
        self.moves += self.home not in ("", replica_id)
        self.home = replica_id
        self.running.append(_Running(session_id, replica_id, now_s, prompt_tokens))
        return now_s - asked_s

    def end_turn(self, session_id: str, replica_id: str, tokens: int, cached: int | None, now_s: float) -> int | None:
        """A turn ends; returns the length of its prompt, None when no such turn is in flight."""
        running = next((it for it in self.running if (it.session_id, it.replica_id) == (session_id, replica_id)), None)
        if running is None:
            return None
        self._until(now_s)
        self.running.remove(running)
        self.completion_tokens += tokens
        if cached is not None:
            self.computed_prompt_tokens += max(0, running.prompt_tokens - cached)
        seconds, before = self.on_replicas.get(replica_id, (0.0, 0))
        self.on_replicas[replica_id] = (seconds + now_s - running.begin_s, before + tokens)
        return running.prompt_tokens

    def give_up(self, session_id: str, now_s: float) -> None:
        """A turn that did not start is not wanted any more."""
        self._until(now_s)
        self.asked.pop(session_id, None)

    def end(self, failed: bool, now_s: float) -> Iterator[str]:
        """It ends. Returns the replicas of the turns that it leaves behind in flight, one for each turn."""
        self._until(now_s)
        self.failed = failed
        self.asked.clear()
        left, self.running = self.running, []
        return (running.replica_id for running in left)

    def _until(self, now_s: float) -> None:
        """Account for the time up to now."""
        state, passed_s = self.state, now_s - self.end_s
        if passed_s > 0:
            replica_id = self.running[0].replica_id if self.running else ""
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.state, last.replica_id) == (state, replica_id):
                self.spans[-1] = Span(state, last.begin_s, now_s, replica_id)
            else:
                self.spans.append(Span(state, self.end_s, now_s, replica_id))
            self.seconds[state] += passed_s
            span = self.spans[-1]
            self.longest_s[state] = max(self.longest_s[state], span.end_s - span.begin_s)
        self.end_s = max(self.end_s, now_s)
