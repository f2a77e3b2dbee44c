"""Sampled tokens follow the model's own distribution when drafts are verified; broken verifiers are noticed."""

import pytest

from tests.exactness import engine as engines
from tests.exactness import forced

pytestmark = pytest.mark.upstream

SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "seed": 5},
]
KINDS = ["mode", "rank 5", "very rare"]
SAMPLES = 400
"""Per experiment; every broken verifier below shows with as many at p of about 1e-8 or less, by machine."""
LEAST_P = 1e-4
"""Of about 40 p-values one in 250 runs would fall below it by chance; the seeds are fixed."""
CAUGHT_P = 1e-6


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(engines.MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def situation(engine, model, reference):
    contexts = engines.conversations(engine.get_tokenizer())
    answered = [context + answer["tokens"] for context, answer in zip(contexts, reference["greedy"], strict=True)]
    return forced.find_situation(model, answered)


@pytest.fixture
def sample(engine, drafter, use_store, model, situation):
    def sample(sampling, samples, seed=11):
        experiments = [forced.Experiment(situation, params, kind) for params in sampling for kind in KINDS]
        forced.run(engine, drafter, use_store, model, experiments, samples, seed)
        return {e.name: e.p_values(model) for e in experiments}

    return sample


def worst(p_values):
    return min(value for values in p_values.values() for value in values)


def test_sampled_tokens_follow_the_model(sample):
    found = sample(SAMPLING, SAMPLES)
    assert len(found) == len(SAMPLING) * len(KINDS)
    assert max(len(values) for values in found.values()) == 3, "the bonus token was never reached"
    assert worst(found) > LEAST_P, found


def test_a_right_verifier_in_python_passes(sample, monkeypatch):
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel", forced.RIGHT_VERIFIER)
    assert worst(sample(SAMPLING[:2], SAMPLES)) > LEAST_P


def test_accepting_the_argmax_is_noticed(sample, monkeypatch):
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel", forced.ARGMAX_VERIFIER)
    assert worst(sample(SAMPLING[:2], SAMPLES)) < CAUGHT_P


def test_resampling_from_the_target_is_noticed(sample, monkeypatch):
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.sample_recovered_tokens", forced.recover_from_target)
    assert worst(sample(SAMPLING[:2], SAMPLES)) < CAUGHT_P


def test_the_unpatched_kernel_of_vllm_on_cpu_is_noticed(sample, monkeypatch):
    """Without the patch ``vllm_expand_kernel`` temperatures of draft tokens are uninitialised memory."""
    from vllm.utils import cpu_triton_utils

    patched = cpu_triton_utils.expand_kernel
    unpatched = type(patched)(cpu_triton_utils._expand_kernel_impl)
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_kernel", unpatched)
    try:
        found = sample(SAMPLING[:2], SAMPLES)
    except (RuntimeError, IndexError, AssertionError):
        return  # garbage temperatures may also give no distribution at all
    assert worst(found) < CAUGHT_P


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_training_engine(engine, drafter, model, temperature):
    import torch

    contexts = engines.conversations(engine.get_tokenizer())
    params = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True}
    for answers in engines.multi_turn(engine, contexts, params, turns=1, name="sampled"):
        for context, answer in zip(contexts, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([context + answer["tokens"]])).logits[0, len(context) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1)[range(40), answer["tokens"]]
            assert answer["logprobs"] == pytest.approx(expected.tolist(), abs=2e-4)
    assert drafter.report()["drafted_tokens"] > 20
