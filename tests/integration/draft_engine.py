"""An engine without vLLM around the drafts of a worker: rows, sampled tokens, verification."""

import random

import numpy as np

from verl_war.core.history_config import HistoryConfig
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.history import index as history
from verl_war.history.store import HistoryStore
from verl_war.integration.vllm.speculation import Speculation
from verl_war.integration.vllm.speculation_step import KvRoom, StepInput
from verl_war.integration.vllm.speculation_text import LiveRequest, describe

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
        self.batch, self.preempted = [], set()
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

    def remove(self, req_id, preempted=False):
        """Finished, aborted or preempted."""
        self.batch.remove(req_id)
        self.preempted |= {req_id} if preempted else set()
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
            is_alive=lambda req_id: req_id in self.batch or req_id in self.preempted,
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
