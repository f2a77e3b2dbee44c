"""Forced drafts, the model's own distribution, the chi-square between them, and broken verifiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch


class ForcedDrafts:
    """A draft source that drafts what a test wants, once, behind the first token of every request.

    ``plans`` maps a group number to the token that must come first and to the draft behind it.
    """

    def __init__(self, plans):
        self.plans = plans
        self.rows = {}
        self.index = self

    def sync(self, key, group, policy_step, context):
        assert key not in self.rows, "every request is a trajectory of its own here"
        self.rows[key] = (group, [])

    def extend(self, key, tokens, start=None):
        self.rows[key][1].extend(int(token) for token in tokens)
        return len(self.rows[key][1])

    def extend_batch(self, keys, starts, offsets, tokens):
        for row, key in enumerate(keys):
            self.extend(int(key), tokens[offsets[row] : offsets[row + 1]])

    def draft_batch(self, keys, max_tokens, min_prob=0.1):
        from verl_war.history.index import DraftBatch

        drafts = []
        for key, limit in zip(keys, max_tokens, strict=True):
            group, said = self.rows[int(key)]
            first, draft = self.plans.get(group, (None, []))
            drafts.append(draft[: int(limit)] if said == [first] else [])
        lengths = [len(draft) for draft in drafts]
        flat = np.array([token for draft in drafts for token in draft], dtype=np.int32)
        found = np.array(lengths) > 0
        return DraftBatch(
            offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            tokens=flat,
            probs=np.full(len(flat), 0.5, dtype=np.float32),
            match_length=np.where(found, 8, 0).astype(np.int32),
            source=np.where(found, 0, -1).astype(np.int32),
            votes=found.astype(np.int32),
            score=np.array(lengths, dtype=np.float32),
        )

    def __contains__(self, key):
        return key in self.rows

    def info(self, key):
        return SimpleNamespace(live=True)

    def finish(self, key):
        self.rows.pop(key)

    def set_acceptance(self, table):
        assert np.asarray(table).shape == (4, 12)

    def stats(self):
        return {}


@dataclass
class Situation:
    """A context after which the model says ``first`` almost surely, and something hard to foresee then."""

    context: list[int]
    first: int
    ranked: list[int]
    """Vocabulary by probability at T=1, most likely first."""


def distribution(model, context, temperature, top_k=0, top_p=1.0):
    """The model's own next-token probabilities, float64[vocab], by transformers and independent of vLLM."""
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1].double() / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -float("inf")
    probs, order = logits.softmax(-1).sort(descending=True)
    keep = probs.cumsum(-1) - probs < top_p
    result = torch.zeros_like(probs)
    result[order[keep]] = probs[keep] / probs[keep].sum()
    return result.numpy()


def find_situation(model, contexts):
    """The place in ``contexts`` where the fifth most likely token is most likely."""
    best, best_prob = None, 0.0
    for context in contexts:
        with torch.no_grad():
            probs = model(torch.tensor([context])).logits[0].softmax(-1)
        sure = (probs.max(-1).values[:-1] > 0.985) & (probs.argmax(-1)[:-1] == torch.tensor(context[1:]))
        ranked = probs[1:].topk(5).values
        peaked = (ranked[:, 0] > 0.3) & (ranked[:, 0] < 0.7)  # so that the second draft token is reached often
        for place in torch.nonzero(sure & peaked).flatten().tolist():
            if place > 8 and ranked[place, 4] > best_prob:
                best_prob = float(ranked[place, 4])
                order = probs[place + 1].argsort(descending=True).tolist()
                best = Situation(context[: place + 1], context[place + 1], order)
    assert best is not None and best_prob > 0.015, f"the contexts hold no place to test at, {best_prob}"
    return best


def p_value(counts, probs):
    """Chance of counts at least as far from ``probs`` (chi-square; rare tokens taken together)."""
    total = counts.sum()
    order = np.argsort(-probs)
    expected, observed = probs[order] * total, counts[order]
    common = int((expected >= 5).sum())
    expected = np.append(expected[:common], expected[common:].sum())
    observed = np.append(observed[:common], observed[common:].sum())
    if expected[-1] < 1e-9:
        if observed[-1]:
            return 0.0
        expected, observed = expected[:-1], observed[:-1]
    if len(expected) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0), torch.tensor(statistic / 2.0)))


@dataclass
class Experiment:
    """Draft kinds and sampling parameters, and what the engine answered to many equal requests."""

    situation: Situation
    params: dict
    kind: str
    answers: list[list[int]] = field(default_factory=list)

    @property
    def name(self):
        return f"{self.params} {self.kind}"

    def draft(self, model):
        """The forced draft: its first token is of the kind, the second the most likely one behind it."""
        rank = {"mode": 0, "rank 5": 4, "very rare": 1000}[self.kind]
        first = self.situation.ranked[rank]
        after = [*self.situation.context, self.situation.first, first]
        return [first, int(distribution(model, after, 1.0).argmax())]

    def p_values(self, model):
        """One p-value per position: verified, verified behind an accepted one, and the bonus token."""
        shape = {k: self.params[k] for k in ("temperature", "top_k", "top_p") if k in self.params}
        prefix, draft = [self.situation.first], self.draft(model)
        values = []
        for position in range(3):
            answers = [a for a in self.answers if a[: len(prefix)] == prefix and len(a) > len(prefix)]
            if len(answers) < 100:
                break
            probs = distribution(model, self.situation.context + prefix, **shape)
            counts = np.bincount([a[len(prefix)] for a in answers], minlength=len(probs)).astype(float)
            values.append(p_value(counts, probs))
            prefix = prefix + draft[position : position + 1]
        return values


def run(engine, drafter, use_store, model, experiments, samples, seed):
    """Lets the engine answer ``samples`` equal requests per experiment, all experiments in the same batches."""
    from vllm import SamplingParams

    from verl_war.history.index import stable_id

    plans = {stable_id(e.name): (e.situation.first, e.draft(model)) for e in experiments}
    use_store(ForcedDrafts(plans))
    torch.manual_seed(seed)
    prompts = [{"prompt_token_ids": e.situation.context} for e in experiments]
    params = [
        SamplingParams(max_tokens=4, n=samples, ignore_eos=True, extra_args={"war": {"group": e.name}}, **e.params)
        for e in experiments
    ]
    for experiment, output in zip(experiments, engine.generate(prompts, params, use_tqdm=False), strict=True):
        experiment.answers = [list(answer.token_ids) for answer in output.outputs]
        assert len(experiment.answers) == samples
    report = drafter.report()
    assert report["disabled"] == "", report["disabled"]
    assert report["drafted_tokens"] > samples * len(experiments), "drafts were not verified"


# -- verifiers -------------------------------------------------------------------------------------------------------


class Kernel:
    """Looks like a Triton launch: ``kernel[grid](...)``."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


def verifier(accept):
    """The kernel that accepts or replaces drafts, with its own rule of acceptance."""

    def kernel(
        output, cu_num_drafts, drafts, draft_probs, target_probs, bonus, recovered, uniform, is_greedy, *_, **__
    ):
        begin = 0
        for row, end in enumerate(cu_num_drafts.tolist()):
            for position in range(begin, end):
                draft = int(drafts[position])
                if not accept(target_probs[position], draft, float(uniform[position])):
                    output[row, position - begin] = recovered[position]
                    break
                output[row, position - begin] = draft
            else:
                output[row, end - begin] = bonus[row, 0]
            begin = end

    return Kernel(kernel)


RIGHT_VERIFIER = verifier(lambda probs, draft, uniform: float(probs[draft]) >= uniform)
ARGMAX_VERIFIER = verifier(lambda probs, draft, uniform: int(probs.argmax()) == draft)


def recover_from_target(max_spec_len, num_drafts, cu_num_drafts, drafts, draft_probs, target_probs, *_):
    """What replaces a rejected draft, drawn from the model's distribution instead of the rest of it."""
    return torch.multinomial(target_probs, 1).flatten().to(torch.int32)
