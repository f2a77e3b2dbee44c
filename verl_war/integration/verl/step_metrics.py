"""The way of WAR's numbers into verl's logger: the trainer's process asks the router once a step."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from verl_war.core.config import WarConfig
from verl_war.core.step_stats import TRAINER_METRICS
from verl_war.integration.verl.failures import RouterNotConfiguredError, cause_of

logger = logging.getLogger(__name__)

ROUTER_RETURN_S = 60.0
"""As for the clients (`link.ROUTER_RETURN_S`)."""

_router: Any = None
_settings: tuple[WarConfig, bool] = (WarConfig(), False)
_counted: deque[str] = deque()
"""Names of `TRAINER_METRICS`, once for each time; threads append to it."""


def count(name: str) -> None:
    """Count one more in a metric of this process. Any thread may."""
    assert name in TRAINER_METRICS, name
    _counted.append(name)


def attach(router: Any, config: WarConfig, full_determinism: bool) -> None:
    """Remember the router of this trainer process. Called by the agent loop manager, which lives in it."""
    global _router, _settings
    _router, _settings = router, (config, full_determinism)


def consume() -> dict[str, float]:
    """`war/*` metrics since the last call; empty when this run does not use WAR.

    A router that Ray has started again knows nothing of this step, so some of its numbers are too small; those of
    speculation it counts from the start of the engines.

    Raises:
        ray.exceptions.RayError: The router is gone for good, or did not answer in time.
    """
    if _router is None:
        return {}
    deadline_s = time.monotonic() + ROUTER_RETURN_S
    while True:
        try:
            # The router's own time-out fires first and names the cause; this one only covers a dead router.
            metrics = ray.get(_router.step_metrics.remote(), timeout=2 * _settings[0].metrics_timeout_s)
            return metrics | _take_counts()
        except (ActorDiedError, ActorUnavailableError) as error:
            if time.monotonic() > deadline_s:
                raise
            logger.warning("router: up -> down (%s)", cause_of(error))
            time.sleep(1.0)
        except RouterNotConfiguredError:
            ray.get(_router.join.remote(*_settings, "trainer", None, None))


def _take_counts() -> dict[str, float]:
    counts = dict.fromkeys(TRAINER_METRICS, 0.0)
    while _counted:
        counts[_counted.popleft()] += 1
    return counts
