"""Random operations on the native index and on the plain Python one must give the same drafts."""

import random

import numpy as np
import pytest

from tests.history.reference import ReferenceIndex
from verl_war.history.index import MATCH_BUCKETS, HistoryIndex

VOCAB = 50


class Pair:
    """Both indices, driven by the same operations."""

    def __init__(self, rng):
        self.rng = rng
        self.native = HistoryIndex(
            vocab_size=VOCAB, min_match_own=2, min_match_group=3, min_match_global=4, max_candidates=256
        )
        self.reference = ReferenceIndex(min_match=(2, 3, 4), max_candidates=256)
        self.next_key = 0
        self.step = 0
        table = np.array([[rng.random() for _ in MATCH_BUCKETS] for _ in range(4)], np.float32)
        self.native.set_acceptance(table)
        self.reference.table = table

    def live(self):
        return [key for key, text in self.reference.texts.items() if text.live]

    def some_text(self, most):
        """Pieces of known text with errors, so that matches of all lengths occur."""
        texts = list(self.reference.texts.values())
        out = []
        for _ in range(self.rng.randint(1, 4)):
            piece = self.rng.choice(texts).tokens if texts and self.rng.random() < 0.8 else []
            if len(piece) > 3:
                start = self.rng.randrange(len(piece) - 2)
                out += piece[start : start + self.rng.randint(2, max(2, most))]
            else:
                out += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 12))]
        return out[:most]

    def begin(self):
        group = self.rng.choice([-1, 0, 1, 2])
        step = max(-1, self.step - self.rng.choice([0, 0, 0, 1, 2]))
        prompt = self.some_text(self.rng.choice([1, 30, 700]))
        self.native.begin(self.next_key, group, step, prompt)
        self.reference.begin(self.next_key, group, step, prompt)
        self.next_key += 1

    def extend(self):
        keys = self.rng.sample(self.live(), min(len(self.live()), 5))
        rows, sent, starts = [self.some_text(20) for _ in keys], [], []
        for key, row in zip(keys, rows, strict=True):
            known = self.reference.texts[key].tokens
            overlap = self.rng.choice([0, 0, min(3, len(known))])
            starts.append(len(known) - overlap)
            sent.append(known[len(known) - overlap :] + row)
            self.reference.extend(key, row)
        offsets = np.cumsum([0] + [len(row) for row in sent])
        flat = np.array([token for row in sent for token in row], np.int32)
        self.native.extend_batch(np.array(keys, np.int64), np.array(starts, np.int64), offsets, flat)

    def finish(self):
        if len(self.live()) > 2:
            key = self.rng.choice(self.live())
            self.native.finish(key)
            self.reference.finish(key)

    def drop(self):
        key = self.rng.choice(list(self.reference.texts))
        self.native.drop(key)
        self.reference.drop(key)

    def age(self):
        self.step += 1
        self.native.set_step(self.step, 3)
        self.reference.set_step(self.step, 3)

    def collect(self):
        self.native.collect(max_ms=self.rng.choice([0.0, None]))

    def compare(self):
        keys = list(self.reference.texts)
        most = np.array([self.rng.choice([0, 1, 8, 40]) for _ in keys], np.int32)
        min_prob = self.rng.choice([0.0, 0.1, 0.5])
        batch = self.native.draft_batch(np.array(keys, np.int64), most, min_prob)
        for row, key in enumerate(keys):
            self.same(batch.row(row), self.reference.draft(key, int(most[row]), min_prob))
        if keys:
            context = self.some_text(60)
            key = self.rng.choice(keys)
            self.same(self.native.draft(key, 16, 0.05, context), self.reference.draft(key, 16, 0.05, context))

    def same(self, native, reference):
        tokens, probs, match, source, votes, score = reference
        found = (native.tokens.tolist(), native.match_length, native.source, native.votes)
        assert found == (tokens, match, source, votes)
        assert native.probs == pytest.approx(probs, abs=1e-5)
        assert native.score == pytest.approx(score, rel=1e-5)

    def check_texts(self):
        self.native._native.check()
        assert sorted(self.native.keys()) == sorted(self.reference.texts)
        for key, text in self.reference.texts.items():
            info = self.native.info(key)
            assert (info.first, info.length, info.live) == (text.first, len(text.tokens), text.live)
            assert self.native.text(key).tolist() == text.tokens[text.first :]
        assert self.native.stats()["tokens"] == sum(len(t.tokens) - t.first for t in self.reference.texts.values())


@pytest.mark.parametrize("seed", range(12))
def test_drafts_equal_the_reference(seed):
    rng = random.Random(seed)
    pair = Pair(rng)
    for _ in range(3):
        pair.begin()
    operations = [pair.begin] * 3 + [pair.extend] * 10 + [pair.finish] * 2 + [pair.drop, pair.age, pair.collect]
    for i in range(120):
        if not pair.live():
            pair.begin()
        rng.choice(operations)()
        if i % 4 == 0:
            pair.compare()
        if i % 20 == 0:
            pair.check_texts()
    pair.native.collect()
    pair.check_texts()
    pair.compare()
