"""Prompts of an agent loop worker that died are reported as failed: verl would wait for them for ever.

verl hands prompts to its workers and then only looks at the status that each worker writes. A worker that is killed
writes none any more, and the trainer polls without end (verl/trainer/ppo/v1/replay_buffer.py, 0.9.1, `sample`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from verl_war.integration.verl import step_metrics
from verl_war.integration.verl.failures import cause_of

logger = logging.getLogger(__name__)

PROMPTS_KEPT = 100_000
"""Prompts of each worker that are remembered: far more than any trainer has under way."""

PING_EVERY_S = 5.0
"""How late a step notices a dead worker; it would not notice at all otherwise."""


class WorkerWatch:
    """Watches the agent loop workers of a trainer from a thread of its process.

    Args:
        workers: Their actors.
        fail_prompts: Reports prompts as failed, those that are not finished.
    """

    def __init__(
        self, workers: Iterable[Any], fail_prompts: Callable[[set[str]], int], ping_every_s: float = PING_EVERY_S
    ) -> None:
        self._fail_prompts = fail_prompts
        self._ping_every_s = ping_every_s
        self._prompts: dict[Any, deque[str]] = {worker: deque(maxlen=PROMPTS_KEPT) for worker in workers}
        self._stop = threading.Event()
        self._failed_reports = 0
        self._thread = threading.Thread(target=self._watch, name="war-worker-watch", daemon=True)
        self._thread.start()

    def on_dispatch(self, worker: Any, uids: Iterable[str]) -> None:
        """These prompts are about to be handed to a worker."""
        self._prompts[worker].extend(uids)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        alive = list(self._prompts)
        unreported: list[Any] = []
        while (alive or unreported) and not self._stop.wait(self._ping_every_s):
            for worker in list(alive):
                try:
                    ray.get(worker.__ray_ready__.remote(), timeout=self._ping_every_s)
                except (ActorUnavailableError, TimeoutError):
                    continue  # busy, or a broken connection that may heal
                except RayActorError as error:
                    alive.remove(worker)
                    unreported.append(worker)
                    logger.error(
                        "agent loop worker: up -> down (%s); its unfinished prompts are reported as failed, and verl "
                        "stops when it hands out the next ones",
                        cause_of(error),
                    )
                except RayError as error:  # nothing that says that it is dead
                    logger.debug("an agent loop worker could not be asked whether it lives (%s)", cause_of(error))
            unreported = [worker for worker in unreported if not self._report(worker)]

    def _report(self, worker: Any) -> bool:
        """Report a dead worker's prompts; whether that succeeded."""
        try:
            failed = self._fail_prompts(set(self._prompts[worker]))
        # Whatever it was: TransferQueue lets through RuntimeError, errors of Ray, of ZeroMQ and of its own bookkeeping,
        # and verl waits for these prompts for ever, so the thread must live and try on.
        except Exception:
            step_metrics.count("war/worker_reports_failed")
            if not self._failed_reports:
                logger.exception("prompts of a dead agent loop worker could not be reported as failed; tried again")
            self._failed_reports += 1
            return False
        logger.error(
            "%d prompts of a dead agent loop worker are reported as failed (after %d tries that failed)",
            *(failed, self._failed_reports),
        )
        self._failed_reports = 0
        return True


def fail_prompts(uids: set[str]) -> int:
    """Set the status of those of the prompts that nobody finished; returns how many they were."""
    failed = 0
    partitions: Mapping[str, Mapping[str, Mapping[str, Any]]] = tq.kv_list() or {}
    for partition_id, tags in partitions.items():
        for uid in uids & tags.keys():
            if tags[uid].get("is_prompt") and tags[uid].get("status") in ("pending", "running"):
                tq.kv_put(key=uid, partition_id=partition_id, tag={"status": "failure"})
                failed += 1
    return failed
