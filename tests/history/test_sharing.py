"""Text between replicas: encoding, rate, and every disorder that a transport can make."""

import random

import numpy as np
import pytest

from verl_war.history.index import SOURCES, HistoryIndex
from verl_war.history.persistence import HistoryError
from verl_war.history.sharing import Inbox, Outbox, decode, encode

VOCAB = 1000
NAME = "qwen-a"


def text(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def outbox(index, bytes_per_s=1e9, burst_bytes=1e9):
    return Outbox(index, vocab_size=VOCAB, fingerprint=NAME, bytes_per_s=bytes_per_s, burst_bytes=burst_bytes)


def inbox(index):
    return Inbox(index, vocab_size=VOCAB, fingerprint=NAME)


def pair():
    return HistoryIndex(vocab_size=VOCAB), HistoryIndex(vocab_size=VOCAB)


def test_a_live_sibling_on_another_replica_drafts():
    here, there = pair()
    out, into = outbox(there), inbox(here)
    tokens = text(0, 400)
    there.begin(1, 7, 3, tokens[:100])
    here.begin(2, 7, 3, tokens[:100])
    for end in range(120, 400, 20):
        there.extend(1, tokens[end - 20 : end])
        into.apply(out.take(10**6, float(end)))
        draft = here.draft(2, 4)
        assert draft.tokens.tolist() == tokens[100:104].tolist()
        assert SOURCES[draft.source] == "siblings"
    there.finish(1)
    into.apply(out.take(10**6, 500.0))
    assert out.take(10**6, 600.0) == b""
    remote = here.keys().tolist()[1]
    assert not here.info(remote).live
    assert here.text(remote).tolist() == tokens[100 - 64 : 380].tolist()  # and the end of the prompt
    assert into.rows == {"applied": 15, "duplicate": 0, "gap": 0, "conflict": 0, "refused": 0}
    assert out.sent_tokens == into.received_tokens == 64 + 280
    assert out.sent_bytes == into.received_bytes


@pytest.mark.parametrize("vocab_size", [1000, 1 << 16, 150_000, 1 << 24, (1 << 24) + 5])
def test_encoding(vocab_size):
    index = HistoryIndex(vocab_size=vocab_size)
    for key in range(3):
        index.begin(key, key - 1, key - 1, [])
        index.extend(key, [0, vocab_size - 1, key])
    index.finish(1)
    deltas = index.take_new(1000)
    back = decode(encode(deltas, NAME, vocab_size), NAME, vocab_size)
    for a, b in zip(deltas, back, strict=True):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()


def test_damaged_and_foreign_batches_change_nothing():
    here, there = pair()
    there.begin(1, 7, 3, text(0, 50))
    batch = outbox(there).take(10**6, 0.0)
    into = inbox(here)
    for bad, message in [
        (batch[:10], "has 10 bytes"),
        (batch[:-1], "is damaged"),
        (batch[:-1] + b"\xff", "is damaged"),
        (b"XXXX" + batch[4:], "all replicas must run the same version"),
        (batch[:4] + b"\x09" + batch[5:], "format b'VWDL' 9"),
    ]:
        with pytest.raises(HistoryError, match=message):
            into.apply(bad)
    with pytest.raises(HistoryError, match="another tokenizer or model than 'llama'"):
        Inbox(here, vocab_size=VOCAB, fingerprint="llama").apply(batch)
    with pytest.raises(HistoryError, match="token ids outside 0 to 9"):
        Inbox(here, vocab_size=10, fingerprint=NAME).apply(batch)
    deltas = decode(batch, NAME, VOCAB)
    with pytest.raises(HistoryError, match="keys, groups or steps that cannot be"):
        into.apply(encode(deltas._replace(keys=deltas.keys | (1 << 61)), NAME, VOCAB))
    assert len(here) == 0 and sum(into.rows.values()) == 0


def test_rate_and_batch_size_are_bounded():
    here, there = pair()
    for key in range(50):
        there.begin(key, key, 0, [])
        there.extend(key, text(key, 1000))
    out, into = outbox(there, bytes_per_s=10_000.0, burst_bytes=5_000.0), inbox(here)
    now, total = 0.0, 0
    while (batch := out.take(3_000, now)) or now < 5.0:
        assert len(batch) <= 3_000
        into.apply(batch)
        total += len(batch)
        now += 0.1
        assert total <= 5_000 + 10_000 * now
        if now > 30:
            break
    assert sum(here.info(key).length for key in here.keys().tolist()) == 50_000
    assert total < 50_000 * 2 * 1.25  # two bytes per token and the rows
    assert now == pytest.approx(total / 10_000, rel=0.15)
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        outbox(there, bytes_per_s=0)


def test_duplicates_overlaps_gaps_and_restarts():
    here, there = pair()
    out, into = outbox(there), inbox(here)
    tokens = text(0, 600)
    there.begin(1, 7, 0, [])
    batches = []
    for start in range(0, 600, 100):
        there.extend(1, tokens[start : start + 100])
        batches.append(out.take(10**6, 0.0))
    for batch in (batches[0], batches[0], batches[1], batches[0]):
        into.apply(batch)
    assert into.rows["applied"] == 2 and into.rows["duplicate"] == 2
    into.apply(batches[3])  # batch 2 was lost
    assert into.rows["gap"] == 1
    _, again = pair()
    again.begin(1, 7, 0, [])
    again.extend(1, tokens)
    into.apply(outbox(again).take(10**6, 0.0))  # [0, 600) over [300, 400)
    assert into.rows["applied"] == 3
    lengths = sorted(here.info(key).length for key in here.keys().tolist())
    assert lengths == [200, 300]
    there.drop(1)
    there.begin(1, 7, 0, [])
    there.extend(1, text(5, 700))  # the trajectory was begun anew
    into.apply(out.take(10**6, 0.0))
    assert into.rows["conflict"] == 1
    assert len(here) == 3
    here._native.check()


def test_a_trajectory_that_changes_its_replica():
    a, b = pair()
    to_a, to_b = inbox(a), inbox(b)
    out_a, out_b = outbox(a), outbox(b)
    tokens = text(0, 900)
    a.begin(1, 7, 0, tokens[:100])
    a.extend(1, tokens[100:300])
    to_b.apply(out_a.take(10**6, 0.0))
    b.begin(1, 7, 0, tokens[:400])  # the next turn runs there; the copy from a does not stand in the way
    b.extend(1, tokens[400:500])
    to_a.apply(out_b.take(10**6, 0.0))
    assert a.info(1).length == 300 and a.info(1).live, "text of others never touches one's own"
    a.extend(1, tokens[:700], start=0)  # and back again
    assert out_b.take(10**6, 0.0) == b"", "what came from elsewhere is not sent on"
    a.begin(2, 7, 0, tokens[:450])
    assert a.draft(2, 4).tokens.tolist() == tokens[450:454].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_any_loss_and_repetition_leaves_only_true_text(seed):
    rng = random.Random(seed)
    here, there = pair()
    out, into = outbox(there), inbox(here)
    texts = {key: text(key, 2000) for key in range(5)}
    sent = []
    for key in texts:
        there.begin(key, 1, 0, [])
    for _ in range(200):
        key = rng.randrange(5)
        length = there.info(key).length
        there.extend(key, texts[key][length : length + rng.randrange(30)])
        sent.append(out.take(rng.randrange(100, 2000), 0.0))
        for batch in rng.sample(sent[-4:], rng.randrange(min(4, len(sent)))):
            into.apply(batch)
    here._native.check()
    everything = {key: values.tobytes() for key, values in texts.items()}
    for key in here.keys().tolist():
        kept = here.text(key).tobytes()
        assert any(kept in whole for whole in everything.values())


def test_text_that_was_set_aside_goes_nowhere():
    """Its key is this index's own; sent along, it would have the whole batch refused."""
    here, there = pair()
    out, into = outbox(there), inbox(here)
    there.begin(1, 7, 3, text(0, 50))
    there.begin(2, 7, 3, text(1, 50))
    into.apply(out.take(10**6, 0.0))
    there.extend(1, text(2, 30))
    there.retire(1)
    there.begin(1, 7, 3, text(3, 60))
    into.apply(out.take(10**6, 1.0))
    assert into.rows["refused"] == 0 and into.rows["conflict"] == 1
    remote = {int(key): here.text(int(key)).tolist() for key in here.keys()}
    assert text(3, 60).tolist() in remote.values() and text(1, 50).tolist() in remote.values()


def test_text_of_others_whose_end_was_lost_is_forgotten_and_leaves_room():
    """A batch with the ends of a step's trajectories can be lost; memory must come back all the same."""
    here = HistoryIndex(vocab_size=VOCAB, max_bytes=1 << 20)
    there = HistoryIndex(vocab_size=VOCAB)
    out, into = outbox(there), inbox(here)
    for step in range(12):
        for key in range(100 * step, 100 * step + 10):
            there.begin(key, key % 3, step, text(key, 800))
        into.apply(out.take(10**7, float(step)))
        for key in range(100 * step, 100 * step + 10):
            there.finish(key)
        out.take(10**7, float(step))  # never arrives
        here.set_step(step, 2)
        here.collect()
        here.begin(10**6 + step, 1, step, text(-step - 1 & 0xFFFF, 500))
        assert here.info(10**6 + step).length == 500, "no room for text of this replica"
        here.finish(10**6 + step)
    stats = here.stats()
    assert stats["refused_tokens"] == 0 and stats["live_segments"] <= 40


def test_text_of_a_later_step_is_of_an_earlier_run_and_ages_with_this_one():
    here = HistoryIndex(vocab_size=VOCAB)
    key = here.restore(1, 500, text(1, 300))
    here.set_step(10, 2)
    assert here.info(key).step == 10
    here.set_step(13, 2)
    assert key not in here
