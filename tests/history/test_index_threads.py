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


def run_for(seconds, *works):
    workers = [Worker(work) for work in works]
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    for worker in workers:
        worker.stopped.set()
    for worker in workers:
        worker.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return [worker.rounds for worker in workers]


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

    rounds = run_for(4.0, decode, bulk, age)
    assert min(rounds) > 3
    assert history.stats()["evicted_segments"] > 10
    assert history.stats()["bytes"] < 1.3 * (2 << 20)
    history._native.check()
    history.collect()
    history._native.check()
    for key in history.keys().tolist():
        assert len(history.text(key)) == history.info(key).length - history.info(key).first


def test_bulk_ingest_releases_the_gil():
    history = HistoryIndex(vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    texts = [zipf_text(rng, 100_000) for _ in range(3)]
    count = 0

    def tick():
        nonlocal count
        count += 1
        time.sleep(0)

    def bulk():
        history.restore(1, 0, texts[count % 3])

    ticks, _ = run_for(1.0, tick, bulk)
    # While the GIL is held for a whole text there are only a few dozen.
    assert ticks > 1000
