"""Drafts of a worker against a simulated engine: bookkeeping of requests, text and failures; no vLLM needed."""

import random

import numpy as np
import pytest

from verl_war.core.history_config import HistoryConfig
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.history import index as history
from verl_war.history.store import HistoryStore
from verl_war.integration.vllm.speculation import CLASS_MATCHES, KvRoom, Speculation, StepInput, classes_of
from verl_war.integration.vllm.speculation_text import LiveRequest, describe, prompt_group

VOCAB = 500
MAX_MODEL_LEN = 300
STOP = 499
"""Ends a turn; in no other text of these tests."""


class Clock:
    """Time that passes 20 us per look, and whatever an engine step takes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 20e-6
        return self.now


class Engine:
    """vLLM's side: rows, sampled tokens, verification. The 'model' continues a fixed text per request."""

    def __init__(self, limits=None, window_steps=5, step_s=0.02):
        self.clock = Clock()
        self.store = HistoryStore(HistoryConfig(window_steps=window_steps), vocab_size=VOCAB, fingerprint="test")
        self.index = self.store.index
        self.speculation = Speculation(self.store, limits or SpeculationLimits(mode="always"), self.clock)
        self.requests = {}
        self.batch = []
        self.step_s = step_s
        self.drafts = {}
        self.verified = self.rested_steps = 0
        self.stop_ids = frozenset()
        self.kv_capacity, self.kv_free = 10**6, 10**6

    def add(self, req_id, prompt, continuation, extra_args=None, max_tokens=None):
        name, group, step = describe(req_id, extra_args)
        limit = min(MAX_MODEL_LEN, len(prompt) + (max_tokens or len(continuation)))
        self.requests[req_id] = {
            "prompt": list(prompt),
            "truth": list(continuation),
            "outputs": [],
            "make": (name, group, step, limit),
            "prefill_steps": 1,
        }
        self.batch.append(req_id)

    def remove(self, req_id):
        """Finished, aborted or preempted."""
        self.batch.remove(req_id)
        self.drafts.pop(req_id, None)

    def step(self, max_tokens=24):
        sampled, verified = [], []
        for req_id in self.batch:
            request = self.requests[req_id]
            draft = self.drafts.get(req_id, [])
            if request["prefill_steps"] > 1:
                request["prefill_steps"] -= 1
                sampled.append([])
                verified.append(0)
                continue
            left = request["truth"][len(request["outputs"]) :]
            hits = 0
            while hits < min(len(draft), len(left) - 1) and draft[hits] == left[hits]:
                hits += 1
            new = left[: hits + 1]
            request["outputs"] += new
            sampled.append(new)
            verified.append(len(draft))
            self.verified += len(draft)
        self.clock.now += self.step_s * (1 + 0.02 * sum(verified))
        num_tokens = np.array([len(self.requests[r]["prompt"]) + len(self.requests[r]["outputs"]) for r in self.batch])
        given = StepInput(
            req_ids=list(self.batch),
            num_tokens=num_tokens.astype(np.int32),
            sampled=sampled,
            verified_tokens=verified.__getitem__,
            describe=lambda row: self.live(self.batch[row]),
            kv=KvRoom(capacity_tokens=self.kv_capacity, block_tokens=16, free_tokens=lambda: self.kv_free),
        )
        rests = self.speculation.rests(self.batch)
        self.rested_steps += rests
        drafts = [[] for _ in self.batch] if rests else self.speculation.step(given, max_tokens)
        assert len(drafts) == len(self.batch)
        self.drafts = dict(zip(self.batch, drafts, strict=True))
        return drafts

    def live(self, req_id):
        request = self.requests[req_id]
        name, group, step, limit = request["make"]
        prompt = np.array(request["prompt"], dtype=np.int32)
        return LiveRequest(
            name=name, group=group, step=step, prompt=prompt, outputs=request["outputs"], limit_tokens=limit,
            stop_ids=self.stop_ids,
        )  # fmt: skip

    def done(self, req_id):
        request = self.requests[req_id]
        return len(request["outputs"]) >= len(request["truth"])

    def run(self, *, most=500):
        """Until every request has said its text; finished ones leave as in vLLM, in the step after."""
        for steps in range(most):
            if not self.batch:
                return steps
            self.step()
            for req_id in [r for r in self.batch if self.done(r)]:
                self.remove(req_id)
        raise AssertionError("requests do not finish")

    def text(self, req_id):
        request = self.requests[req_id]
        return request["prompt"] + request["outputs"]


def tokens(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def war(trajectory, group="g", step=1):
    return {"war": {"trajectory": trajectory, "group": group, "step": step, "validate": False}}


def kept(engine, name):
    key = history.stable_id(name)
    return engine.index.text(key).tolist()


def flush(engine):
    """Takes over all text that waits; an empty batch tells that everybody has left."""
    engine.step()
    engine.speculation.texts.work_off(float("inf"), engine.clock)


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


@pytest.mark.parametrize(("step_s", "least", "most"), [(0.02, 40, 60), (0.2, 78, 80)])
def test_the_longer_a_step_the_more_text_is_read_in(step_s, least, most):
    """80 contexts come at once, and reading one in takes 20 us at least: 0.5 ms are enough for 25 of them."""
    engine = Engine(step_s=step_s)
    for number in range(80):
        engine.add(f"r{number}", tokens(number, 20), tokens(100 + number, 40))
    lookups = []
    for _ in range(4):
        engine.step()
        lookups.append(engine.speculation.report()["lookups"])
    first, second = [count for count in lookups if count][:2]
    assert first <= 30, "how long a step takes is not known yet"
    assert least <= second - first <= most
    flush(engine)
    assert all(kept(engine, f"request:r{number}") == engine.text(f"r{number}") for number in range(80))


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


def test_drafts_never_exceed_what_the_request_may_still_say():
    engine, span = Engine(), tokens(0, 40)
    engine.add("a", span, span, max_tokens=10)
    engine.add("b", (span * 8)[: MAX_MODEL_LEN - 12], (span * 8)[MAX_MODEL_LEN - 12 :][:12])
    seen = 0
    for _ in range(12):
        for req_id, draft in zip(list(engine.batch), engine.step(max_tokens=5), strict=True):
            limit = engine.requests[req_id]["make"][3]
            assert len(draft) <= min(5, max(0, limit - len(engine.text(req_id)) - 1))
            seen += len(draft)
        for req_id in [r for r in engine.batch if engine.done(r)]:
            engine.remove(req_id)
    assert seen


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


def test_budget_decides_in_auto_mode():
    """Repetitive text: off until a plain step was measured, then on; unpredictable text: off again."""
    engine, span = Engine(SpeculationLimits()), tokens(0, 40)
    engine.add("a", span, span * 6)
    assert engine.run() < 120
    assert engine.speculation.planner.regime == "low"
    engine.add("b", tokens(7, 20), tokens(8, 270))
    engine.run()
    report = engine.speculation.report()
    assert report["drafting_steps"] < 100


def test_shadow_look_ups_keep_acceptance_known_while_off():
    engine, span = Engine(SpeculationLimits(min_gain=10.0)), tokens(0, 40)
    engine.add("a", span, span * 6)
    engine.run(most=300)
    report = engine.speculation.report()
    assert report["drafted_tokens"] == 0 and report["shadow_lookups"] > 3
    assert engine.speculation.planner.acceptance.mix()
    first = max(
        engine.speculation.planner.acceptance.rates(kind)[0] for kind, _ in engine.speculation.planner.acceptance.mix()
    )
    assert first > 0.8


def test_steps_rest_while_drafts_do_not_pay():
    engine = Engine(SpeculationLimits(min_gain=10.0))
    engine.add("a", tokens(0, 20), tokens(1, 250))
    for _ in range(101):
        engine.step()
    assert 70 <= engine.rested_steps <= 75, "one look in four, after the first"
    assert engine.speculation.report()["steps"] == 101
    assert engine.speculation.planner._step == pytest.approx(101, abs=3)
    rested = engine.rested_steps
    engine.add("b", tokens(2, 20), tokens(3, 100))
    engine.step()
    assert engine.rested_steps == rested, "the batch changed"
    drafting, span = Engine(SpeculationLimits()), tokens(0, 40)
    drafting.add("a", span, span * 6)
    drafting.run()
    assert drafting.rested_steps < 20


def test_watchdog_stops_drafts_that_are_never_accepted():
    engine = Engine(SpeculationLimits(mode="always", watchdog_min_tokens=50, watchdog_acceptance=0.5))
    prompt = tokens(0, 5) + [1, 2, 3, 4] * 8
    rng = random.Random(0)
    engine.add("a", prompt, [t for _ in range(60) for t in (1, 2, 3, 5 + rng.randrange(400))])
    engine.run()
    report = engine.speculation.report()
    assert "were accepted" in report["watchdog"] and report["watchdog_trips"] == 1
    assert report["drafted_tokens"] < 150


def test_drafts_take_no_blocks_that_are_short():
    """Shared contexts fit although their sum does not; what is left of the blocks bounds the drafts."""
    engine, span = Engine(), tokens(0, 40)
    engine.kv_capacity, engine.kv_free = 50, 2 * (5 + 16)
    for name in ("a", "b"):
        engine.add(name, span, span * 4)
    longest = 0
    for _ in range(20):
        longest = max(longest, *(len(draft) for draft in engine.step()))
    assert longest == 5
    assert engine.speculation.report()["kv_limited_steps"] > 0
    engine.kv_free = 20
    assert engine.step() == [[], []]


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


def test_classes_are_those_of_the_acceptance_table():
    table = Engine().speculation.planner.acceptance
    batch = history.DraftBatch(
        offsets=np.array([0, 2, 2, 3]),
        tokens=np.array([1, 2, 3], dtype=np.int32),
        probs=np.array([0.5, 0.9, 0.1], dtype=np.float32),
        match_length=np.array([6, 0, 64], dtype=np.int32),
        source=np.array([2, -1, 0], dtype=np.int32),
        votes=np.zeros(3, dtype=np.int32),
        score=np.zeros(3, dtype=np.float32),
    )
    assert classes_of(batch) == [table.class_of(2, 6, 0.5), -1, table.class_of(0, 64, 0.1)]
    assert table.sources == history.SOURCES and CLASS_MATCHES[0] == 1


def test_identity_of_turns():
    assert describe("r", None) == describe("r", {}) == ("request:r", history.NO_GROUP, -1)
    assert describe("r", {"war": {"trajectory": "t", "group": "g", "step": 4}}) == ("t", history.stable_id("g"), 4)
    first = np.array([1, 2, 3], dtype=np.int32)
    assert prompt_group(first) == prompt_group(first.copy()) != prompt_group(first[:2])
