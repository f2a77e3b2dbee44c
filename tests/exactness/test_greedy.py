"""Greedy answers and their log-probs are the same with and without speculation, whatever the request asks for."""

import pytest

from tests.exactness import engine as engines

pytestmark = pytest.mark.upstream

LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def answers(engine):
    return engines.ask_everything(engine)


@pytest.mark.parametrize(
    "case", [*engines.CASES, "structured", "multi turn", "short prompts", "end of the context", "preempted"]
)
def test_same_tokens_and_log_probs(case, reference, answers):
    assert len(reference[case]) == len(answers[case]) > 0
    for expected, found in zip(reference[case], answers[case], strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)
        assert (found["finish"], found["text"]) == (expected["finish"], expected["text"])


def test_these_answers_were_really_drafted(answers, engine):
    (report,) = engine.collective_rpc("war_speculation_stats")
    assert report["accepted_tokens"] > 1000 and report["mean_acceptance_length"] > 2
    assert report["disabled"] == "" and report["faults"] == 0 and report["refused_requests"] == 0


def test_drafts_travel_with_the_tokens_to_an_engine_in_another_process(reference):
    watched = engines.answers_of_a_worker_process()
    for expected, found in zip(reference["greedy"], watched["answers"], strict=True):
        assert found["tokens"] == expected["tokens"]
    assert watched["times_asked"] == 0, "vLLM asks the worker after every step, if drafts did not come with the tokens"
    assert watched["report"]["accepted_tokens"] > 50
