"""What WAR's clients and its router say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas that serve.

    Attributes:
        version: Counts the changes; the higher one is the later one.
        servers: Replica id -> handle of its server.
        is_elastic: Whether verl ever took a replica out in good order: it may bring it back.
    """

    version: int
    servers: Mapping[str, Any] = field(default_factory=dict)
    is_elastic: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A turn may start: on this replica, at this engine priority."""

    replica_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A turn is held; `WarRouter.wait_for_grant(ticket)` returns its grant."""

    ticket: int


Answer = Grant | Waiting | Exception
"""To a turn that was asked for."""

Message = tuple[Any, ...]
"""("turn", Turn), ("turn_end", trajectory id, session id, replica id, TurnResult), ("trajectory_end", trajectory id,
failed) or ("give_up", ticket)."""
