"""The way of WAR's numbers into verl's logger: the trainer's process asks the router once a step."""

from __future__ import annotations

from typing import Any

import ray

_router: Any = None
_timeout_s: float = 0.0


def attach(router: Any, timeout_s: float) -> None:
    """Remember the router of this trainer process. Called by the agent loop manager, which lives in it."""
    global _router, _timeout_s
    _router, _timeout_s = router, timeout_s


def consume() -> dict[str, float]:
    """`war/*` metrics since the last call; empty when this run does not use WAR.

    Raises:
        ray.exceptions.RayError: The router or an engine is gone, or did not answer in time.
    """
    if _router is None:
        return {}
    # The router's own time-out fires first and names the cause; this one only covers a dead router.
    return ray.get(_router.step_metrics.remote(), timeout=2 * _timeout_s)
