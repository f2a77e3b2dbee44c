"""Several threads at once: nothing breaks, and the decode path is not held up."""

import threading
import time

import numpy as np

from verl_war.history.index import HistoryIndex

VOCAB = 300


class Worker(threading.Thread):
    """Runs `work` until stopped; keeps what it raised."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.work, self.stopped, self.error, self.rounds = work, threading.Event(), None, 0

    def run(self):
        try:
            while not self.stopped.is_set():
                self.work()
                self.rounds += 1
        except BaseException as error:
            self.error = error


def run_until(rounds, *works, limit_s=120.0):
    """Run all `works` at once until each was done this often."""
    workers = [Worker(work) for work in works]
    for worker in workers:
        worker.start()
    end = time.monotonic() + limit_s
    while any(w.rounds < rounds and w.error is None for w in workers) and time.monotonic() < end:
        time.sleep(0.01)
    for worker in workers:
        worker.stopped.set()
    for worker in workers:
        worker.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    assert min(worker.rounds for worker in workers) >= rounds


def zipf_text(rng, length):
    return (rng.zipf(1.3, length) % VOCAB).astype(np.int32)


def test_random_work_on_all_calls_at_once_with_eviction_all_the_time():
    history = HistoryIndex(vocab_size=VOCAB, max_bytes=2 << 20)
    next_key = iter(range(10**9))
    step = iter(range(10**9))

    rngs, live = [np.random.default_rng(seed) for seed in range(3)], []

    def decode():
        rng = rngs[0]
        while len(live) < 8:
            live.append(next(next_key))
            history.begin(live[-1], live[-1] % 3, 0, zipf_text(rng, 100))
        keys = np.array(live)
        lengths = rng.integers(0, 20, len(live))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        history.extend_batch(keys, np.full(len(live), -1), offsets, zipf_text(rng, offsets[-1]))
        batch = history.draft_batch(keys, np.full(len(live), 8, np.int32))
        assert len(batch.tokens) == batch.offsets[-1]
        assert ((0 <= batch.tokens) & (batch.tokens < VOCAB)).all()
        assert ((0 <= batch.probs) & (batch.probs <= 1)).all()
        if history.info(live[0]).length > 1500:
            history.finish(live.pop(0))

    def bulk():
        history.restore(rngs[1].integers(0, 3), 0, zipf_text(rngs[1], 5000))

    def age():
        history.set_step(next(step), 10**6)
        history.collect((0.0, 1.0, None)[rngs[2].integers(3)])

    run_until(60, decode, bulk, age)
    assert history.stats()["evicted_segments"] > 10
    assert history.stats()["bytes"] < 1.3 * (2 << 20)
    history._native.check()
    history.collect()
    history._native.check()
    for key in history.keys().tolist():
        assert len(history.text(key)) == history.info(key).length - history.info(key).first


def test_bulk_ingest_releases_the_gil():
    history = HistoryIndex(vocab_size=VOCAB)
    text = zipf_text(np.random.default_rng(0), 500_000)
    inside, ticks = False, 0

    def tick():
        nonlocal ticks
        ticks += inside
        time.sleep(0)

    def bulk():
        nonlocal inside
        inside = True
        history.restore(1, 0, text)
        inside = False

    run_until(3, tick, bulk)
    assert ticks > 50  # next to none while the GIL is held
