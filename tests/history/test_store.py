"""What the store keeps; saving and loading; configuration."""

import json
import logging

import numpy as np
import pytest

from verl_war.core.history_config import HISTORY_KEY, HistoryConfig
from verl_war.history import persistence
from verl_war.history.index import SOURCES
from verl_war.history.persistence import HistoryError, load, save
from verl_war.history.store import HistoryStore

VOCAB = 1000


def text(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def store(fingerprint="qwen-a", vocab_size=VOCAB, **config):
    return HistoryStore(HistoryConfig(**config), vocab_size=vocab_size, fingerprint=fingerprint)


def play(history, key, group, step, tokens, prompt=20, reward=None):
    history.begin(key, group, step, tokens[:prompt])
    history.append(key, tokens[prompt:])
    if reward is not None:
        history.set_reward(key, reward)
    return history.finish(key)


BAD_SETTINGS = [
    ({"max_bytes": 1000}, "max_bytes=1000 must be between 1048576 and"),
    ({"max_bytes": 1.5e9}, "max_bytes=1500000000.0 is float; expected int"),
    ({"window_steps": -1}, "window_steps=-1 must be between 0 and"),
    ({"window_steps": True}, "window_steps=True is bool; expected int"),
    ({"sources": ("own", "sibling")}, "sources=.* has the unknown name 'sibling'; allowed: own, siblings"),
    ({"sources": "own"}, "sources='own' must be a list of names"),
    ({"min_match_own": 9}, "min_match_own=9 must be between 1 and 8"),
    ({"max_match_tokens": 2}, "max_match_tokens=2 must be at least the largest min_match"),
    ({"max_match_tokens": 300}, "max_match_tokens=300 must be between 1 and 256"),
    ({"age_decay": 0.0}, "age_decay=0.0 must be between 0.01 and 1.0"),
    ({"age_decay": float("nan")}, "age_decay=nan must be"),
    ({"vote_prior": "2"}, "vote_prior='2' is str; expected float"),
    ({"keep_per_group": 0}, "keep_per_group=0 must be"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused_by_their_full_name(settings, message):
    with pytest.raises(ValueError, match=f"{HISTORY_KEY}.{message}"):
        HistoryConfig(**settings)


def test_a_trajectory_over_turns_is_extended_and_never_rebuilt():
    history, tokens = store(), text(0, 500)
    assert history.sync(1, 7, 0, tokens[:100]) == 0
    history.append(1, tokens[100:150])
    assert history.sync(1, 7, 0, tokens[:220]) == 150  # a tool output came
    history.append(1, tokens[220:300])
    assert history.index.info(1).length == 300
    assert history.stats()["segments"] == 1
    assert history.index.text(1).tolist() == tokens[:300].tolist()


def test_an_edited_context_begins_anew_and_the_old_text_still_drafts():
    history, tokens = store(), text(0, 500)
    history.sync(1, 7, 0, tokens[:100])
    history.append(1, tokens[100:200])
    edited = np.concatenate([tokens[:100], tokens[180:200], text(1, 30)])
    history.sync(1, 7, 0, edited)
    assert history.index.text(1).tolist() == edited.tolist()
    assert history.stats()["edited"] == 1 and history.stats()["segments"] == 2
    history.begin(2, 7, 0, tokens[:150])
    draft = history.index.draft(2, 4)
    assert draft.tokens.tolist() == tokens[150:154].tolist()
    assert SOURCES[draft.source] == "siblings"


def test_a_finished_trajectory_that_goes_on_begins_anew():
    history, tokens = store(), text(0, 300)
    play(history, 1, 7, 0, tokens[:200])
    assert history.sync(1, 7, 0, tokens[:250]) == 0
    assert history.index.info(1).live and history.stats()["edited"] == 0


def test_what_is_forgotten_at_the_end_and_with_age():
    history = store(min_kept_tokens=10, window_steps=2, keep_per_group=3)
    assert not play(history, 1, 7, 0, text(1, 25))
    for key in range(2, 8):
        assert play(history, key, 7, 0, text(key, 60), reward=[None, 0.5, 0.0, 1.0, 0.1, 0.9][key - 2])
    history.on_step(1)
    assert history.index.keys().tolist() == [3, 5, 7]  # the best rewarded
    assert history.reward(5) == 1.0 and history.reward(2) is None
    play(history, 8, 7, 1, text(8, 60))
    history.begin(9, 8, 0, text(9, 60))  # its client is gone
    history.on_step(3)
    assert history.index.keys().tolist() == [8, 9]
    assert not history.index.info(9).live
    history.on_step(9)
    assert len(history.index) == 0
    assert {name: history.stats()[name] for name in ("too_short", "over_group_limit", "abandoned")} == {
        "too_short": 1,
        "over_group_limit": 3,
        "abandoned": 1,
    }


def test_a_weight_update_forgets_nothing():
    history, tokens = store(), text(0, 300)
    play(history, 1, 7, 0, tokens)
    history.begin(2, 7, 0, tokens[:100])
    for step in (1, 2, 3):
        history.on_step(step)
        assert history.index.draft(2, 4).tokens.tolist() == tokens[100:104].tolist()


def filled(**config):
    history = store(**config)
    for key in range(20):
        play(history, key, key // 4, key // 8, text(key, 300 + 40 * key), prompt=280)
    history.begin(99, 3, 2, text(99, 50))
    history.on_step(2)
    return history


def same_drafts(first, second):
    for key in range(20):
        for history in (first, second):
            history.begin(1000 + key, key // 4, 2, text(key, 290))
        a, b = first.index.draft(1000 + key, 8), second.index.draft(1000 + key, 8)
        assert len(a.tokens) > 0
        assert a.tokens.tolist() == b.tokens.tolist() and a.source == b.source and a.score == b.score


def test_saved_and_loaded_history_drafts_the_same(tmp_path):
    history, resumed = filled(), store()
    size = save(history, tmp_path / "history.bin")
    assert size == (tmp_path / "history.bin").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["history.bin"]
    assert load(resumed, tmp_path / "history.bin") == 21, "text that is still growing is saved too"
    assert resumed.policy_step == 2
    same_drafts(history, resumed)
    assert len(resumed.index.take_new(10**6).keys) == 20, "only what began here is shared, not what was loaded"


def test_a_small_store_loads_the_newest_of_a_large_file(tmp_path):
    large = store()
    for key in range(60):
        play(large, key, key, key // 10, text(key, 2000))
    save(large, tmp_path / "h")
    small = store(max_bytes=1 << 20, window_steps=100)
    load(small, tmp_path / "h")
    assert small.stats()["bytes"] <= 1 << 20
    steps = [small.index.info(key).step for key in small.index.keys().tolist()]
    assert len(steps) > 15 and min(steps) >= 3
    assert small.stats()["refused_tokens"] == 0


@pytest.mark.parametrize(("fingerprint", "vocab_size"), [("llama", VOCAB), ("qwen-a", 2 * VOCAB)])
def test_history_of_another_tokenizer_is_refused(tmp_path, fingerprint, vocab_size):
    save(filled(), tmp_path / "h")
    with pytest.raises(HistoryError, match="of tokenizer/model 'qwen-a' with 1000 token ids.* garbage"):
        load(store(fingerprint, vocab_size), tmp_path / "h", on_damage="discard")


def damaged(data, how):
    return {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "cut in the header": data[:20],
        "one bit": data[:3000] + bytes([data[3000] ^ 4]) + data[3001:],
        "checksum": data[:-1] + bytes([data[-1] ^ 1]),
        "longer": data + b"x",
        "other file": b"PK\x03\x04" + data[4:],
        "huge header": data[:12] + b"\xff\xff\xff\x7f" + data[16:],
    }[how]


@pytest.mark.parametrize(
    "how", ["empty", "cut", "cut in the header", "one bit", "checksum", "longer", "other file", "huge header"]
)
def test_a_damaged_file_is_an_error_or_a_clean_start(tmp_path, how, caplog):
    path = tmp_path / "h"
    save(filled(), path)
    path.write_bytes(damaged(path.read_bytes(), how))
    history = store()
    with pytest.raises(HistoryError, match="is damaged: .*on_damage='discard'"):
        load(history, path)
    with caplog.at_level(logging.WARNING):
        assert load(history, path, on_damage="discard") == 0
    assert "starting with an empty history" in caplog.text
    assert len(history.index) == 0


SOUND = {"fingerprint": "qwen-a", "vocab_size": VOCAB, "policy_step": 3, "texts": [[1, 2, 2]]}


@pytest.mark.parametrize(
    "change",
    [
        {"policy_step": None},
        {"policy_step": 2.5},
        {"policy_step": 1 << 70},
        {"fingerprint": 5},
        {"texts": [[1.5, 2, 2]]},
        {"texts": [[1, 1 << 70, 2]]},
        {"texts": [[1, -2, 2]]},
        {"texts": [[1, 2, 2.0]]},
        {"texts": [[1, 2, -1], [1, 2, 3]]},
        {"texts": [[1, 2]]},
        {"texts": 5},
    ],
    ids=repr,
)
def test_a_wrong_header_is_damage_although_its_checksum_fits(tmp_path, change):
    path, tokens = tmp_path / "h", np.asarray([1, 2], dtype=np.int32)
    persistence._write(path, json.dumps(SOUND).encode(), [tokens])
    assert load(store(), path) == 1
    persistence._write(path, json.dumps({**SOUND, **change}).encode(), [tokens])
    with pytest.raises(HistoryError, match="is damaged: its header"):
        load(store(), path)
    assert load(store(), path, on_damage="discard") == 0


def test_another_format_version_is_refused(tmp_path):
    path = tmp_path / "h"
    save(filled(), path)
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\x09" + data[9:])
    with pytest.raises(HistoryError, match="format version 9, this version of verl_war reads 1"):
        load(store(), path)


def test_a_failed_save_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "h"
    save(filled(), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(store(), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["h"]
    with pytest.raises(ValueError, match="on_damage='ignore'"):
        load(store(), path, on_damage="ignore")


def test_a_reward_may_come_after_the_end_and_decides_what_stays():
    history = store(min_kept_tokens=1, keep_per_group=1)
    for key in (1, 2):
        assert play(history, key, 7, 0, text(key, 60))
    history.set_reward(1, 0.9)
    history.set_reward(99, 1.0)  # evicted meanwhile: ignored
    history.on_step(1)
    assert history.index.keys().tolist() == [1]
