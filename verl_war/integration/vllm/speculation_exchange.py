"""Text of other replicas into the history of this worker and back, and its files, beside the decode path."""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path

from verl_war.history import persistence
from verl_war.history.sharing import Inbox, Outbox
from verl_war.history.store import HistoryStore

logger = logging.getLogger(__name__)

BURST_S = 1.0
"""Seconds' worth of the bound on bytes per second that may go out at once after a pause."""

MAX_WAITING_BATCHES = 64
"""Batches that may wait to be taken in; further ones are dropped: late text of siblings is of little use."""


class HistoryExchange:
    """One worker's sending and receiving side. Receiving and saving run in a thread, mostly without the GIL."""

    def __init__(self, store: HistoryStore, bytes_per_s: float) -> None:
        """Start the thread.

        Args:
            store: The worker's history.
            bytes_per_s: Bound on what is sent.

        Raises:
            ValueError: The bound is too small.
        """
        identity = {"vocab_size": store.vocab_size, "fingerprint": store.fingerprint}
        self._outbox = Outbox(store.index, bytes_per_s=bytes_per_s, burst_bytes=bytes_per_s * BURST_S, **identity)
        self._inbox = Inbox(store.index, **identity)
        self._store = store
        self._jobs: queue.Queue[bytes | Path] = queue.Queue(MAX_WAITING_BATCHES)
        self.dropped_batches = 0
        self.refused_batches = 0
        self.saved_bytes = 0
        self.failed_saves = 0
        threading.Thread(target=self._work, name="war-history", daemon=True).start()

    def take(self, max_bytes: int) -> bytes:
        """New text of this worker, at most ``max_bytes``; empty when there is none or the rate is used up."""
        return self._outbox.take(max_bytes, time.monotonic())

    def apply(self, batch: bytes) -> None:
        """Take in text of another worker, later."""
        try:
            self._jobs.put_nowait(batch)
        except queue.Full:
            self.dropped_batches += 1

    def save(self, path: str) -> None:
        """Write the history to a file, later."""
        try:
            self._jobs.put_nowait(Path(path))
        except queue.Full:
            self._fail_save(path, f"{MAX_WAITING_BATCHES} batches of other replicas wait to be taken in")

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            "sent_bytes": self._outbox.sent_bytes,
            "sent_tokens": self._outbox.sent_tokens,
            "received_bytes": self._inbox.received_bytes,
            "received_tokens": self._inbox.received_tokens,
            "dropped_batches": self.dropped_batches,
            "refused_batches": self.refused_batches,
            "saved_bytes": self.saved_bytes,
            "failed_saves": self.failed_saves,
        }

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, Path):
                self._save(job)
            else:
                self._receive(job)

    def _receive(self, batch: bytes) -> None:
        try:
            self._inbox.apply(batch)
        except Exception:  # the thread must live on, and text of other replicas is only an offer
            if self.refused_batches == 0:
                logger.exception("history of another replica cannot be used; this and later ones are counted")
            self.refused_batches += 1

    def _save(self, path: Path) -> None:
        try:
            self.saved_bytes = persistence.save(self._store, path)
        except Exception as error:  # the thread must live on; drafts do not need the file
            self._fail_save(path, error)

    def _fail_save(self, path: str | Path, cause: object) -> None:
        if self.failed_saves == 0:
            logger.error("the history cannot be saved to %s (%s); this and later failures are counted", path, cause)
        self.failed_saves += 1
