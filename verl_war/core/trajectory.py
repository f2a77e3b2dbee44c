"""What the manager keeps of a trajectory while it lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_war.core.types import Turn


@dataclass(slots=True)
class PendingTurn:
    """A turn that was started and did not end."""

    turn: Turn
    replica_id: str
    believed_tokens: int
    retained_since_s: float | None
    """When the conversation's last turn ended, if its KV was left alone since; None when it was not."""
    begin_s: float
    predicted_s: float | None
    """What the price said that the turn takes; None where nothing was priced."""


@dataclass(slots=True)
class Trajectory:
    """A trajectory whose first turn was asked for and whose end was not told.

    Attributes:
        begin_s: When it asked for its first turn.
        turns: Turns that were started.
        updates_idle: Weight updates since it last asked for a turn or had one under way.
    """

    begin_s: float
    group_id: str
    validate: bool
    turns: int = 0
    updates_idle: int = 0
    sessions: dict[str, None] = field(default_factory=dict)
    """A set that keeps its order: the order of a set of strings differs between processes, and with it the decisions
    that a replayed journal leads to."""
    pending: list[PendingTurn] = field(default_factory=list)

    def take_pending(self, session_id: str, replica_id: str) -> PendingTurn | None:
        """Remove and return the oldest matching turn; an agent loop may have several under way at once."""
        for position, pending in enumerate(self.pending):
            if pending.turn.session_id == session_id and pending.replica_id == replica_id:
                return self.pending.pop(position)
        return None
