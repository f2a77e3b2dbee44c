"""The native index: sources, limits, errors, eviction with real release."""

import numpy as np
import psutil
import pytest

from verl_war.history.index import NO_GROUP, NO_SOURCE, SOURCES, HistoryIndex, match_bucket, stable_id

VOCAB = 1000
MIB = 1 << 20


def text(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def index(**options):
    return HistoryIndex(vocab_size=VOCAB, **options)


def say(history, key, group, step, tokens):
    """A trajectory without a prompt."""
    history.begin(key, group, step, [])
    history.extend(key, tokens)


def source_of(history, key):
    draft = history.draft(key, 4)
    return SOURCES[draft.source] if draft.source != NO_SOURCE else None


def test_own_text_repeats_also_beyond_its_end():
    history = index()
    history.begin(1, NO_GROUP, 0, [9, *[5, 6, 7, 8] * 4])
    draft = history.draft(1, 9)
    assert draft.tokens.tolist() == [5, 6, 7, 8, 5, 6, 7, 8, 5]
    assert draft.source == SOURCES.index("own")


@pytest.mark.parametrize(
    ("group", "step", "source"),
    [(7, 3, "siblings"), (7, 2, "earlier_steps"), (8, 3, "global"), (NO_GROUP, 3, "global")],
)
@pytest.mark.parametrize("finished", [False, True])
def test_sources_are_told_apart(group, step, source, finished):
    history, known = index(), text(0, 200)
    history.begin(1, group, step, known[:50])
    history.extend(1, known[50:])
    if finished:
        history.finish(1)
        history.collect()
    history.begin(2, 7, 3, known[:120])
    draft = history.draft(2, 4)
    assert SOURCES[draft.source] == source
    assert draft.tokens.tolist() == known[120:124].tolist()
    assert draft.match_length == 64 and draft.votes == 1


@pytest.mark.parametrize("off", SOURCES)
def test_a_source_that_is_off_drafts_nothing(off):
    history = index(sources=tuple(name for name in SOURCES if name != off))
    known = text(0, 200)
    group, step = {"siblings": (7, 3), "earlier_steps": (7, 2), "global": (8, 3), "own": (NO_GROUP, 3)}[off]
    if off == "own":
        history.begin(2, 7, 3, [*known[:50], *known[:40]])
    else:
        say(history, 1, group, step, known)
        history.begin(2, 7, 3, known[:120])
    assert source_of(history, 2) is None


def test_no_group_has_no_siblings():
    history, known = index(min_match_global=8), text(0, 100)
    say(history, 1, NO_GROUP, 0, known[:90])
    history.begin(2, NO_GROUP, 0, known[:6])
    assert source_of(history, 2) is None


def test_a_single_match_claims_its_measured_acceptance():
    history, known = index(), text(0, 200)
    table = np.full((4, 12), 0.5, np.float32)
    table[SOURCES.index("siblings"), match_bucket(64)] = 0.25
    history.set_acceptance(table)
    say(history, 1, 7, 0, known)
    history.begin(2, 7, 0, known[:100])
    draft = history.draft(2, 8, min_prob=0.01)
    assert draft.probs.tolist() == [0.25] * 3  # 0.25 ** 4 is under min_prob
    assert draft.score == pytest.approx(0.25 + 0.25**2 + 0.25**3)


def test_votes_that_agree_raise_the_probability_and_others_lower_it():
    history, context = index(vote_prior=2.0), text(0, 30)
    history.set_acceptance(np.full((4, 12), 0.9))
    for key, following in enumerate([1, 1, 1, 2]):
        history.begin(key, 7, 0, [*context, following, 50 + key])
    history.begin(9, 7, 0, context)
    draft = history.draft(9, 1)
    assert draft.tokens.tolist() == [1] and draft.votes == 4
    assert draft.probs[0] == pytest.approx((2 + 2 * 0.9) / (3 + 2))


def test_recent_text_outvotes_old_text():
    history, context = index(age_decay=0.5), text(0, 30)
    history.begin(0, 7, 1, [*context, 1])
    history.begin(1, 7, 1, [*context, 1])
    history.begin(2, 7, 9, [*context, 2])
    history.begin(9, 7, 10, context)
    assert history.draft(9, 1).tokens.tolist() == [2]


def test_prompt_of_a_finished_segment_is_released_and_its_answer_kept():
    history, known = index(), text(0, 5000)
    history.begin(1, 7, 0, known[:4000])
    history.extend(1, known[4000:])
    history.finish(1)
    info = history.info(1)
    assert 4000 - 64 - 256 < info.first <= 4000 - 64 and info.length == 5000 and not info.live
    assert history.text(1).tolist() == known[info.first :].tolist()
    assert history.stats()["tokens"] == 5000 - info.first
    before = history.stats()["bytes"]
    history.collect()
    assert before - history.stats()["bytes"] >= (4000 - 64 - 256) * 16
    history.begin(2, 7, 0, known[:4000])
    assert history.draft(2, 4).tokens.tolist() == known[4000:4004].tolist()


def test_extend_skips_what_is_known_and_reports_gaps_and_differences():
    history, known = index(), text(0, 100)
    history.begin(1, 7, 0, known[:50])
    assert history.extend(1, known[20:80], start=20) == 80
    assert history.extend(1, known[:80], start=0) == 80
    with pytest.raises(ValueError, match=r"start=81 of key=1 leaves a gap: expected 0 to 80"):
        history.extend(1, known[81:], start=81)
    changed = known.copy()
    changed[60] = (changed[60] + 1) % VOCAB
    with pytest.raises(ValueError, match=r"tokens\[60\]=\d+ of key=1 differs .* offset 60"):
        history.extend(1, changed, start=0)
    assert history.common_prefix(1, changed) == 60
    assert history.common_prefix(1, known) == 80
    assert history.info(1).length == 80


BAD_CALLS = {
    "negative token": (lambda h: h.extend(1, [3, -1]), ValueError, r"tokens\[1\]=-1 is outside .* 0 to 999"),
    "token over vocabulary": (lambda h: h.extend(1, [1000]), ValueError, r"tokens\[0\]=1000 is outside"),
    "token over int32": (lambda h: h.extend(1, [0, 2**40]), ValueError, r"tokens\[1\]=1099511627776"),
    "float tokens": (lambda h: h.extend(1, [0.5]), ValueError, "dtype float64; expected"),
    "nested tokens": (lambda h: h.extend(1, [[1]]), ValueError, r"shape \(1, 1\)"),
    "bad prompt": (lambda h: h.begin(5, 0, 0, [VOCAB]), ValueError, r"tokens\[0\]=1000"),
    "unknown key": (lambda h: h.draft(77, 4), KeyError, "key=77 is not in the history"),
    "unknown key in batch": (lambda h: h.draft_batch(np.array([1, 77]), np.array([1, 1], np.int32)), KeyError, "77"),
    "key twice": (lambda h: h.begin(1, 0, 0, []), ValueError, "key=1 exists already"),
    "negative key": (lambda h: h.begin(-1, 0, 0, []), ValueError, "key=-1 must be"),
    "huge key": (lambda h: h.begin(2**61, 0, 0, []), ValueError, "must be under"),
    "negative group": (lambda h: h.begin(5, -2, 0, []), ValueError, "group=-2 must be"),
    "negative step": (lambda h: h.begin(5, 0, -2, []), ValueError, "step=-2 must be"),
    "negative draft": (lambda h: h.draft(1, -1), ValueError, "max_tokens=-1 must be between 0 and 4096"),
    "probability": (lambda h: h.draft(1, 1, 1.5), ValueError, "min_prob=1.5"),
    "NaN": (lambda h: h.draft(1, 1, float("nan")), ValueError, "min_prob=nan"),
    "int64 budget": (lambda h: h.draft_batch(np.array([1]), np.array([1])), ValueError, "max_tokens is .* dtype int32"),
    "unequal": (lambda h: h.draft_batch(np.array([1]), np.zeros(2, np.int32)), ValueError, "1 and 2 entries"),
    "text": (lambda h: h.text(1, 0, 99), ValueError, r"\[0, 99\) of key=1 are not kept; expected within \[0, 4\)"),
    "acceptance": (lambda h: h.set_acceptance(np.full((4, 12), 1.5)), ValueError, "1.5.* at row 0"),
    "shape": (lambda h: h.set_acceptance(np.zeros((4, 3))), ValueError, "4 rows and 12 columns"),
    "window": (lambda h: h.set_step(1, -1), ValueError, "window_steps=-1"),
    "finished": (lambda h: h.extend(2, [1]), ValueError, "key=2 is finished"),
    "finished twice": (lambda h: h.finish(2), ValueError, "key=2 is finished"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_refused_and_change_nothing(case):
    history = index()
    history.begin(1, 7, 0, [1, 2, 3, 4])
    history.begin(2, 7, 0, [1, 2, 3, 4])
    history.finish(2)
    call, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        call(history)
    assert history.info(1).length == 4 and len(history) == 2
    history._native.check()


def test_a_batch_with_one_bad_row_appends_nothing():
    history = index()
    history.begin(1, 7, 0, [1])
    history.begin(2, 7, 0, [1])
    keys, tokens = np.array([1, 2]), np.array([1, 2, 3], np.int32)
    for starts, offsets, found in [
        ([1, 5], [0, 1, 3], "start=5 of key=2"),
        ([1, 1], [0, 2, 1], "offsets run"),
        ([1, 1], [0, 4, 3], "is less than the one before"),
    ]:
        with pytest.raises(ValueError, match=found):
            history.extend_batch(keys, np.array(starts), np.array(offsets), tokens)
    with pytest.raises(ValueError, match="keys has 1 twice"):
        history.extend_batch(np.array([1, 1]), np.array([1, 1]), np.array([0, 1, 3]), tokens)
    assert history.info(1).length == history.info(2).length == 1
    history.extend_batch(keys, np.array([-1, 1]), np.array([0, 1, 3]), tokens)
    assert history.info(1).length == 2 and history.info(2).length == 3


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_tiny_texts(length):
    history = index()
    history.begin(1, 7, 0, [5] * length)
    history.begin(2, 7, 0, [5] * length)
    assert set(history.draft(1, 8).tokens.tolist()) <= {5}
    assert len(history.draft(1, 8, context=[]).tokens) == 0
    history.finish(1)
    history.finish(2)
    history.collect()
    history._native.check()


def test_long_runs_of_one_token_stay_fast_and_right():
    history = index()
    for key in range(4):
        say(history, key, 7, 0, np.full(20_000, 5))
    assert history.draft(0, 100).tokens.tolist() == [5] * 100
    history._native.check()


def test_empty_batch():
    history = index()
    batch = history.draft_batch(np.zeros(0, np.int64), np.zeros(0, np.int32))
    assert batch.offsets.tolist() == [0] and len(batch.tokens) == 0
    history.extend_batch(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int32))


def test_window_forgets_old_finished_text_only():
    history = index()
    for step in range(6):
        history.begin(step, 7, step, text(step, 50))
        if step != 1:
            history.finish(step)
    assert history.set_step(5, window_steps=2) == 2  # 0 and 2; 1 is live
    assert history.keys().tolist() == [1, 3, 4, 5]


def test_eviction_keeps_live_text_and_evicts_the_oldest_step_then_the_least_used():
    history = index(max_bytes=4 * MIB)
    history.begin(0, 1, 0, text(0, 2000))  # live and oldest
    for key in range(1, 81):
        say(history, key, 2, 2 if key <= 40 else 1, text(key, 2000))
        history.finish(key)
    history.begin(1000, 2, 3, text(55, 30))
    assert history.draft(1000, 4).votes == 1  # uses 55
    for key in range(2000, 2040):
        history.begin(key, 3, 3, text(key, 2000))
    history.collect()
    assert history.stats()["evicted_segments"] > 0
    keys = history.keys().tolist()
    assert history.stats()["bytes"] <= 4 * MIB
    assert 0 in keys and 55 in keys
    assert all(key in keys for key in range(1, 41)), "newer step evicted before older"
    assert sum(key in keys for key in range(41, 81)) < 40
    history._native.check()


def test_growing_text_is_refused_when_live_text_alone_exceeds_the_limit():
    history = index(max_bytes=MIB)
    history.begin(1, 7, 0, text(0, 200_000))
    info = history.info(1)
    assert info.frozen and info.length < 100_000
    assert history.stats()["bytes"] <= 1.3 * MIB
    assert history.stats()["refused_tokens"] == 200_000 - info.length
    assert len(history.draft(1, 8).tokens) == 0
    assert history.extend(1, [1, 2], start=200_000) == info.length
    history.drop(1)
    history.collect()
    history.begin(1, 7, 0, text(0, 100))
    assert not history.info(1).frozen
    history._native.check()


def resident_bytes():
    return psutil.Process().memory_info().rss


def test_memory_really_goes_back():
    history = index(max_bytes=256 * MIB)
    empty = resident_bytes()
    tokens = text(0, 2000)
    for key in range(1000):
        say(history, key, key // 8, 0, (tokens + key) % VOCAB)
        history.finish(key)
    full, stats = resident_bytes(), history.stats()
    assert stats["tokens"] == 2_000_000
    assert stats["bytes"] / stats["tokens"] < 60
    assert full - empty == pytest.approx(stats["bytes"], rel=0.2)
    history.set_step(100, 1)
    history.collect()
    assert len(history) == 0 and history.stats()["tokens"] == 0
    assert history.stats()["bytes"] < 3 * MIB
    assert resident_bytes() - empty < 0.1 * (full - empty)
    history._native.check()


def test_stable_id():
    assert stable_id("a") == stable_id("a") != stable_id("b")
    assert all(0 <= stable_id(str(i)) < 2**60 for i in range(100))
