"""What counts as a failure of the machinery, as opposed to one of the request or of the agent loop."""

from __future__ import annotations

from ray.exceptions import ObjectLostError, RayActorError


class ReplicaFailedError(RuntimeError):
    """The engine behind a server is gone. Raised by the server, which itself still answers."""


class TurnDeadlineError(RuntimeError):
    """A replica took longer for a turn than `failures.turn_deadline_s`."""


class ReplicaLostError(RuntimeError):
    """The router took a replica out of the pool while a turn ran on it."""


class TurnAbortedError(RuntimeError):
    """An engine gave a turn up although nobody asked for it; what it had generated is not a complete answer."""


class RouterNotConfiguredError(RuntimeError):
    """The router was restarted and has no settings yet, or was used before it got any."""


GONE_ERRORS = (RayActorError, ReplicaFailedError, ObjectLostError)
"""Raised by a call of a server whose process, node or engine is gone. `ActorUnavailableError`, a broken connection
that may heal, is among them: callers look for it first."""

TURN_ERRORS = (*GONE_ERRORS, ReplicaLostError, TurnDeadlineError, TurnAbortedError)
"""After these the same turn is asked again elsewhere. Everything else (a prompt that is too long, say) would fail
there too."""

NO_SERVERS = "No available servers in load balancer"
"""verl's words, on which its asynchronous client waits (verl/workers/rollout/llm_server.py, 0.9.1)."""


def cause_of(error: BaseException) -> str:
    """One sentence about an error for a log; Ray's own messages are tracebacks and pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    line = lines[0] if isinstance(error, RayActorError) else lines[-1]
    return f"{type(error).__name__}: {line.split('. ')[0]}"[:300]
