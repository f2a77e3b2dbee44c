"""Text of a worker's requests against a simulated engine: what is kept, and what is drafted from; no vLLM needed."""

import random

import numpy as np
import pytest

from tests.integration.draft_engine import STOP, VOCAB, Engine, flush, kept, tokens, war
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.history import index as history
from verl_war.integration.vllm.speculation_text import describe, prompt_group


def test_own_text_is_drafted_and_accepted():
    engine, span = Engine(), tokens(0, 40)
    engine.add("a", span, span[5:] + span[:20])
    steps = engine.run()
    assert steps < 25, "55 tokens, all of them in the prompt"
    flush(engine)
    assert kept(engine, "request:a") == engine.text("a")
    report = engine.speculation.report()
    assert report["accepted_tokens"] > 30 and report["source/own/accepted_tokens"] == report["accepted_tokens"]
    assert report["mean_acceptance_length"] > 2


def test_siblings_and_earlier_steps_draft():
    engine, prompt, answer = Engine(), tokens(1, 20), tokens(2, 60)
    engine.add("a", prompt, answer, war("t1", group=None))
    engine.run()
    engine.add("b", prompt, answer, war("t2", group=None))
    engine.run()
    assert engine.speculation.report()["source/siblings/accepted_tokens"] > 40
    engine.speculation.on_policy_step(2, {})
    engine.add("c", prompt, answer, war("t3", group=None, step=2))
    engine.run()
    assert engine.speculation.report()["source/earlier_steps/accepted_tokens"] > 40


def test_turns_continue_one_segment():
    engine = Engine()
    context = tokens(3, 30)
    for turn in range(4):
        said = tokens(10 + turn, 20)
        engine.add(f"r{turn}", context, said, war("t"))
        engine.run()
        context = context + said + tokens(20 + turn, 15)  # a tool's output
    engine.add("last", context, tokens(99, 3), war("t"))
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("last")
    stats = engine.index.stats()
    assert stats["segments"] == 1 and stats["tokens"] == len(engine.text("last"))
    assert engine.store.stats()["edited"] == 0


def test_retokenised_context_starts_a_new_segment():
    engine, context = Engine(), tokens(4, 30)
    engine.add("a", context, tokens(5, 20), war("t"))
    engine.run()
    changed = engine.text("a")
    changed[35] = (changed[35] + 1) % VOCAB
    engine.add("b", changed + [1, 2, 3], tokens(6, 10), war("t"))
    engine.run()
    flush(engine)
    assert engine.store.stats()["edited"] == 1
    assert kept(engine, "t") == engine.text("b")


@pytest.mark.parametrize("mode", ["always", "off"])
def test_what_was_verified_behind_a_stop_token_is_no_text(mode):
    engine = Engine()
    answer, behind = [*tokens(2, 14), STOP], tokens(3, 10)
    engine.add("sibling", tokens(1, 20), answer + behind, war("s"))
    engine.run()
    engine.stop_ids = frozenset([STOP])  # the sibling went on behind it
    engine.add("turn1", tokens(1, 20), answer + behind, war("t"))
    while STOP not in engine.requests["turn1"]["outputs"]:
        engine.step()
    if mode == "off":
        engine.speculation.change({"mode": "off"})
    said = engine.requests["turn1"]["outputs"]
    assert len(said) > len(answer), "no draft reached over the stop token: this test shows nothing"
    engine.remove("turn1")
    engine.step()
    context = [*tokens(1, 20), *answer]
    if mode == "always":
        assert kept(engine, "t") == context
    engine.add("turn2", [*context, *tokens(4, 15)], tokens(5, 10), war("t"))
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("turn2")
    assert engine.store.stats()["edited"] == 0, "the context was read anew"


def test_trimmed_answer_starts_a_new_segment():
    """The next turn's context may lack tokens that the engine generated behind a stop string."""
    engine, context = Engine(), tokens(4, 30)
    engine.add("a", context, tokens(5, 20), war("t"))
    engine.run()
    engine.add("b", engine.text("a")[:-4], tokens(6, 10), war("t"))
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("b")


@pytest.mark.parametrize("mode", ["always", "off", "auto"])
def test_preempted_and_resumed_requests_keep_their_text(mode):
    engine = Engine(SpeculationLimits(mode=mode))
    engine.add("a", tokens(1, 30), tokens(2, 50), war("t"))
    engine.add("b", tokens(3, 30), tokens(4, 90), war("u"))
    for _ in range(10):
        engine.step()
    before = len(engine.requests["a"]["outputs"])
    engine.remove("a")
    for _ in range(5):
        engine.step()
    engine.batch.append("a")
    engine.requests["a"]["prefill_steps"] = 3  # the context is computed anew, in chunks
    engine.step()
    assert len(engine.requests["a"]["outputs"]) == before
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("a") and kept(engine, "u") == engine.text("b")
    assert engine.store.stats()["edited"] == 0


def test_lengths_of_turns_are_known_when_they_have_ended():
    """A preempted one is counted when it has ended, and the last ones of a step in the next."""
    engine, seen = Engine(), []
    engine.speculation.planner.turn_lengths.observe = seen.append
    for number, length in enumerate((5, 40)):
        engine.add(f"r{number}", tokens(number, 20), tokens(10 + number, length))
    engine.step()
    engine.remove("r1", preempted=True)
    engine.run()
    engine.batch.append("r1")
    engine.preempted.clear()
    engine.run()
    engine.speculation.on_policy_step(2, {})
    engine.add("next", tokens(5, 20), tokens(6, 3))
    engine.step()
    assert seen == [5, 40]


def test_who_has_generated_much_is_told_to_the_planner():
    engine, told = Engine(SpeculationLimits(mode="always")), []
    allocate = engine.speculation.planner.allocate
    engine.speculation.planner.allocate = lambda *arguments: told.append(arguments[4]) or allocate(*arguments)
    text = tokens(1, 30)
    engine.add("r0", text + text, text)
    for _ in range(3):
        engine.step()
    assert [generated for (generated,) in told] == [len(engine.requests["r0"]["outputs"])] or told[0] == [1]
    assert all(later > earlier for (earlier,), (later,) in zip(told, told[1:], strict=False)) and told


def test_text_generated_while_off_is_filled_in():
    engine = Engine(SpeculationLimits(mode="off"))
    answer = tokens(2, 60)
    engine.add("a", tokens(1, 30), answer, war("t"))
    for _ in range(20):
        engine.step()
    assert engine.index.stats()["tokens"] == 0 and engine.speculation.counts.lookups == 0
    engine.speculation.change({"mode": "always"})
    engine.step()
    assert kept(engine, "t") == engine.text("a")
    engine.speculation.change({"mode": "off"})
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("a"), "taken over when the request left"


def test_requests_without_identity_and_of_the_same_trajectory_do_not_mix():
    engine = Engine()
    engine.add("a", tokens(1, 20), tokens(2, 20), war("t"))
    engine.add("b", tokens(3, 20), tokens(4, 20), war("t"))
    engine.add("c", tokens(5, 20), tokens(6, 20))
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("a")
    assert kept(engine, "t/b") == engine.text("b")
    assert kept(engine, "request:c") == engine.text("c")


def test_rows_may_move_and_all_may_finish_in_one_step():
    engine, rng = Engine(), random.Random(0)
    for i in range(12):
        engine.add(f"r{i}", tokens(i, 20), tokens(100 + i, 40), war(f"t{i}"))
    for _ in range(10):
        rng.shuffle(engine.batch)
        engine.step()
    for i in range(0, 12, 2):
        engine.remove(f"r{i}")
    engine.step()
    for req_id in list(engine.batch):
        engine.remove(req_id)
    assert engine.step() == []
    engine.speculation.texts.work_off(float("inf"), engine.clock)
    for i in range(12):
        assert kept(engine, f"t{i}") == engine.text(f"r{i}")


@pytest.mark.parametrize("prompt", [[7], [VOCAB - 1, 0]])
def test_tiny_prompts(prompt):
    engine = Engine()
    engine.add("a", prompt, [3] * 50)
    assert engine.run() < 50


def test_tokens_outside_the_vocabulary_cost_only_that_request_its_drafts():
    engine, span = Engine(), tokens(0, 40)
    engine.add("bad", [*span, VOCAB + 5], span)
    engine.add("late", span, [*span[5:15], -1, *span[20:30]])
    engine.add("good", span, span[5:])
    engine.run()
    assert engine.speculation.texts.refused_requests == 2
    assert engine.speculation.report()["accepted_tokens"] > 20
    flush(engine)
    assert kept(engine, "request:good") == engine.text("good")


def test_open_segments_are_bounded(monkeypatch):
    monkeypatch.setattr("verl_war.integration.vllm.speculation_text.MAX_OPEN_SEGMENTS", 5)
    engine = Engine()
    for i in range(20):
        engine.add(f"r{i}", tokens(i, 10), tokens(50 + i, 10), war(f"t{i}"))
        engine.run()
    flush(engine)
    assert engine.index.stats()["live_segments"] <= 6
    engine.add("again", engine.text("r19"), tokens(77, 10), war("t19"))
    engine.run()
    flush(engine)
    assert kept(engine, "t19") == engine.text("again")


def test_weight_update_closes_idle_segments_and_forgets_old_steps():
    engine = Engine()
    engine.add("a", tokens(1, 20), tokens(2, 20), war("t", step=1))
    engine.run()
    engine.speculation.on_policy_step(2, {})
    assert engine.index.info(history.stable_id("t")).live, "it may be in a tool call"
    assert kept(engine, "t") == engine.text("a")
    engine.speculation.on_policy_step(3, {})
    assert not engine.index.info(history.stable_id("t")).live
    engine.speculation.on_policy_step(9, {})
    engine.index.collect()
    assert len(engine.index) == 0


def test_rewards_reach_the_text_that_they_belong_to():
    engine = Engine()
    engine.add("a", tokens(1, 20), tokens(2, 20), war("t", step=1))
    engine.run()
    engine.speculation.on_policy_step(2, {"t": 0.75, "never seen": 1.0})  # before its text is finished
    assert engine.store.reward(history.stable_id("t")) == 0.75
    engine.speculation.on_policy_step(3, {})
    assert engine.store.reward(history.stable_id("t")) == 0.75
    assert not engine.index.info(history.stable_id("t")).live


def test_requests_that_go_on_over_a_weight_update_keep_their_segment():
    engine = Engine()
    engine.add("a", tokens(1, 20), tokens(2, 60), war("t", step=1))
    for step in range(2, 5):
        for _ in range(5):
            engine.step()
        engine.speculation.on_policy_step(step, {})
    engine.run()
    flush(engine)
    assert kept(engine, "t") == engine.text("a") and len(engine.index) == 1


def test_identity_of_turns():
    assert describe("r", None) == describe("r", {}) == ("request:r", history.NO_GROUP, -1)
    assert describe("r", {"war": {"trajectory": "t", "group": "g", "step": 4}}) == ("t", history.stable_id("g"), 4)
    for garbage in ("abc", [1], {"step": "x"}, {"step": None}, {"step": 1.5}, {"step": -7}, {"step": 1 << 70}):
        with pytest.raises(ValueError, match="must be a mapping with names for `trajectory` and `group`"):
            describe("r", {"war": garbage})
    first = np.array([1, 2, 3], dtype=np.int32)
    assert prompt_group(first) == prompt_group(first.copy()) != prompt_group(first[:2])


def test_steps_are_measured_unless_they_read_prompts_also_when_requests_have_left(monkeypatch):
    engine = Engine(SpeculationLimits())
    measured = []
    monkeypatch.setattr(engine.speculation.planner, "observe_step", lambda **step: measured.append(step["rows"]))
    for i in range(4):
        engine.add(f"r{i}", tokens(i, 20), tokens(10 + i, 30), war(f"t{i}"))
    engine.step()  # reads all four prompts
    engine.step()
    assert measured == [4]
    engine.remove("r0")
    engine.step()
    engine.remove("r1")
    engine.step()
    assert measured == [4, 3, 2]
    engine.add("r4", tokens(4, 20), tokens(14, 30), war("t4"))
    engine.step()
    assert measured == [4, 3, 2], "it read a prompt"
    engine.requests["r2"]["prefill_steps"] = 2
    engine.step()
    engine.step()
    assert measured == [4, 3, 2], "a prompt was read in two steps"
    for req_id in list(engine.batch):
        engine.remove(req_id)
    engine.step()
    engine.add("r5", tokens(5, 20), tokens(15, 30), war("t5"))
    engine.step()
    assert measured == [4, 3, 2], "the engine waited meanwhile"
