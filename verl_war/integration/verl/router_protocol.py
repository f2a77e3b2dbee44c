"""What WAR's clients and its router say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_war.core.types import Turn, TurnResult


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas that serve.

    Attributes:
        version: Counts the changes; the higher one is the later one.
        servers: Replica id -> handle of its server.
        is_elastic: Whether verl ever took a replica out in good order: it may bring it back.
        router: Name of the router's process; another one has other tickets and has forgotten all turns.
    """

    version: int
    servers: Mapping[str, Any] = field(default_factory=dict)
    is_elastic: bool = False
    router: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """A turn may start: on this replica, at this engine priority."""

    replica_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A turn is held; its answer comes with the news."""

    ticket: int


Answer = Grant | Waiting | Exception
"""To a turn that was asked for."""

News = tuple[Any, ...]
"""("answer", ticket, Grant or Exception) or ("lost", replica id)."""

Message = tuple[Any, ...]
"""("turn", *packed Turn), ("turn_end", trajectory id, session id, replica id, *packed TurnResult), ("trajectory_end",
trajectory id, failed) or ("give_up", ticket)."""


def pack_turn(turn: Turn) -> tuple[Any, ...]:
    """A turn as plain values: a dataclass with slots costs 13 us to unpickle, a tenth of a decision."""
    return (
        *(turn.session_id, turn.trajectory_id, turn.group_id, turn.policy_step),
        *(turn.prompt_tokens, turn.block_hashes, turn.priority, turn.validate),
    )


def unpack_turn(
    session_id: str, trajectory_id: str, group_id: str, policy_step: int, prompt_tokens: int,
    block_hashes: Sequence[int], priority: int, validate: bool,
) -> Turn:  # fmt: skip
    """What `pack_turn` packed."""
    return Turn(
        session_id=session_id,
        trajectory_id=trajectory_id,
        group_id=group_id,
        policy_step=policy_step,
        prompt_tokens=prompt_tokens,
        block_hashes=block_hashes,
        priority=priority,
        validate=validate,
    )


def pack_result(result: TurnResult) -> tuple[Any, ...]:
    """A result as plain values."""
    return result.completion_tokens, result.num_cached_tokens, result.aborted, result.failed


def unpack_result(completion_tokens: int, num_cached_tokens: int | None, aborted: bool, failed: bool) -> TurnResult:
    """What `pack_result` packed."""
    return TurnResult(
        completion_tokens=completion_tokens, num_cached_tokens=num_cached_tokens, aborted=aborted, failed=failed
    )
