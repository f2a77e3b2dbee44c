"""What a speculating engine refuses, survives and reports."""

import logging
import time

import pytest

from tests.exactness import engine as engines

pytestmark = pytest.mark.upstream


@pytest.fixture
def contexts(engine):
    return engines.conversations(engine.get_tokenizer())[:4]


@pytest.fixture
def expected(reference):
    """Greedy answers to `contexts` without speculation."""
    return tokens_of(reference["greedy"][:4])


def tokens_of(answers):
    return [answer["tokens"] for answer in answers]


def stats(engine):
    (report,) = engine.collective_rpc("war_speculation_stats")
    return report


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
def test_what_vllm_does_not_verify_is_refused(engine, contexts, params):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        engines.generate(engine, contexts[:1], {"temperature": 1.0, "max_tokens": 5} | params)
    assert engines.generate(engine, contexts[:1], engines.GREEDY)


def test_custom_logits_processors_are_refused_at_launch(engine):
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(
            engine.llm_engine.vllm_config, torch.device("cpu"), False, False, custom_logitsprocs=[MinPLogitsProcessor]
        )


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("draft_batch", RuntimeError("corrupt index")),
        ("draft_batch", MemoryError("no memory")),
        ("extend_batch", MemoryError("no memory")),
        ("begin", RuntimeError("corrupt index")),
    ],
    ids=repr,
)
def test_an_error_in_drafting_costs_no_tokens(engine, drafter, contexts, expected, caplog, monkeypatch, method, error):
    from verl_war.history.index import HistoryIndex

    def fail(*args, **kwargs):
        raise error

    caplog.set_level(logging.INFO, logger="verl_war")
    with monkeypatch.context() as broken:
        broken.setattr(HistoryIndex, method, fail)
        assert tokens_of(engines.generate(engine, contexts, engines.GREEDY)) == expected
    report = stats(engine)
    assert report["faults"] == 1 and str(error) in report["disabled"] and report["drafted_tokens"] == 0
    (record,) = [r for r in caplog.records if "error in drafting" in r.getMessage()]
    assert record.exc_info and "on -> off" in record.getMessage()
    engine.collective_rpc("war_set_speculation", args=({"mode": "always"},))
    assert tokens_of(engines.generate(engine, contexts, engines.GREEDY)) == expected
    report = stats(engine)
    assert report["disabled"] == "" and report["faults"] == 1 and report["drafted_tokens"] > 0


def test_limits_change_at_the_next_step_and_off_means_off(engine, drafter, contexts):
    calls = []
    look_up = drafter.speculation.index.draft_batch
    drafter.speculation.index.draft_batch = lambda *a: calls.append(a) or look_up(*a)
    engine.collective_rpc("war_set_speculation", args=({"mode": "off"},))
    engines.generate(engine, contexts, engines.GREEDY)
    assert not calls and stats(engine)["lookups"] == 0 and stats(engine)["mode"] == "off"
    engine.collective_rpc("war_set_speculation", args=({"mode": "always", "max_draft_tokens": 3},))
    engines.generate(engine, contexts, engines.GREEDY)
    assert calls and max(int(max_tokens.max()) for _, max_tokens, _ in calls) == 3
    with pytest.raises(ValueError, match="max_draft_tokens=-1 must be between"):
        engine.collective_rpc("war_set_speculation", args=({"max_draft_tokens": -1},))
    assert drafter.speculation.limits.max_draft_tokens == 3


def test_a_request_at_the_end_of_its_context_leaves_the_others_their_drafts(engine, drafter, contexts, monkeypatch):
    import torch

    runner = engines.runner_of(engine)
    given = []
    copy = runner._copy_draft_token_ids_to_cpu
    monkeypatch.setattr(
        runner, "_copy_draft_token_ids_to_cpu", lambda *a, **k: given.append(runner._draft_token_ids) or copy(*a, **k)
    )
    long = (contexts[0] * 9)[: engines.MAX_MODEL_LEN - 20]
    engines.generate(engine, [long, *contexts], engines.GREEDY | {"max_tokens": 200})
    assert not any(torch.is_tensor(drafts) for drafts in given), "zero drafts for every row"
    assert stats(engine)["accepted_tokens"] > 100


def test_requests_are_preempted_in_these_tests(engine, drafter, contexts, monkeypatch):
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: preempted.append(a) or preempt(*a, **k))
    engines.generate(engine, engines.preempted_prompts(contexts), engines.GREEDY | {"max_tokens": 150})
    assert preempted and stats(engine)["history/edited"] == 0


def test_requests_aborted_between_steps(engine, drafter, contexts, expected):
    from vllm import SamplingParams

    core = engine.llm_engine
    for i, context in enumerate(contexts):
        core.add_request(f"a{i}", {"prompt_token_ids": context}, SamplingParams(**engines.GREEDY))
    for _ in range(4):
        core.step()
    core.abort_request([f"a{i}" for i in range(0, len(contexts), 2)])
    answers = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    left = range(1, len(contexts), 2)
    assert [answers[f"a{i}"] for i in left] == [expected[i] for i in left]
    assert stats(engine)["disabled"] == ""


@pytest.mark.parametrize("identity", ["abc", {"step": "x"}, {"step": 1 << 70}], ids=repr)
def test_a_request_with_garbage_for_its_identity_alone_gets_no_drafts(engine, drafter, contexts, expected, identity):
    params = engines.GREEDY | {"extra_args": {"war": identity}}
    assert tokens_of(engines.generate(engine, contexts[:1], params)) == expected[:1]
    report = stats(engine)
    assert (report["disabled"], report["refused_requests"], report["drafted_tokens"]) == ("", 1, 0)
    assert tokens_of(engines.generate(engine, contexts, engines.GREEDY)) == expected
    assert stats(engine)["drafted_tokens"] > 0


def test_reports_are_plain_numbers_and_words(engine, drafter, contexts):
    engines.generate(engine, contexts, engines.GREEDY)
    report = stats(engine)
    assert all(isinstance(value, (int, float, str)) for value in report.values())
    assert report["history/bytes"] > 0 and report["history/tokens"] > 0 and report["steps"] > 0
    assert report["drafted_tokens"] == sum(
        report[f"source/{name}/drafted_tokens"] for name in ("own", "siblings", "earlier_steps", "global")
    )


def test_turns_that_stop_within_a_draft_are_continued_by_the_next(engine, drafter, contexts):
    """Behind the stop token the engine has verified more; it must not pass for text of the conversation."""
    params = {"temperature": 0.0, "max_tokens": 40, "stop_token_ids": list(range(300, 420, 2))}
    for name in ("first", "second"):  # the second time everything is known, drafts are long and reach over the stop
        answers = engines.multi_turn(engine, contexts, params, turns=3, name=name)
    assert sum(answer["finish"] == "stop" for turn in answers for answer in turn) >= 4
    report = stats(engine)
    assert report["accepted_tokens"] > 100 and report["history/edited"] == 0


def test_history_goes_to_a_file_and_to_other_replicas(engine, drafter, contexts, tmp_path):
    engines.generate(engine, contexts, engines.GREEDY, [f"t{i}" for i in range(len(contexts))])
    engines.generate(engine, contexts[:1], engines.GREEDY)
    engine.collective_rpc("war_history_save", args=(str(tmp_path / "history"),))
    engine.collective_rpc("war_history_save", args=(str(tmp_path / "absent" / "history"),))
    deadline_s = time.monotonic() + 10
    while stats(engine)["exchange/failed_saves"] == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert stats(engine)["exchange/failed_saves"] == 1
    assert stats(engine)["exchange/saved_bytes"] == (tmp_path / "history").stat().st_size
    (texts,) = engine.collective_rpc("war_history_load", args=(str(tmp_path / "history"),))
    assert texts >= len(contexts) - 1
    (tmp_path / "history").write_bytes(b"garbage")
    with pytest.raises(RuntimeError, match="damaged"):
        engine.collective_rpc("war_history_load", args=(str(tmp_path / "history"),))
    assert engine.collective_rpc("war_history_load", args=(str(tmp_path / "history"), "discard")) == [0]


def test_calls_on_an_engine_without_speculation():
    from types import SimpleNamespace

    from verl_war.integration.vllm.worker import SpeculationCalls

    calls = SpeculationCalls()
    calls.model_runner = SimpleNamespace()
    assert calls.war_speculation_stats() is None
    calls.war_policy_step(3, {})
    assert calls.war_history_exchange([b"x"], 1000) == b""
    with pytest.raises(RuntimeError, match="has no WAR speculation"):
        calls.war_set_speculation({})


def test_wrong_engine_settings_are_refused_at_launch(engine):
    from verl_war.integration.vllm.speculation_drafter import Drafter

    config = engine.llm_engine.vllm_config
    for settings, message in [
        ({"history": {"max_bytes": 5}}, "max_bytes=5 must be between"),
        ({"history": {"sources": ("own", "moon")}}, "unknown name 'moon'"),
        ({"history": {"size": 5}}, r"unknown key .*speculation\.history\.size"),
        ({"share_bytes_per_s": 0}, "bytes_per_s=0 must be over 0"),
        ({"drafts": 5}, r"unknown key .*speculation\.drafts"),
        ({"mode": "sometimes"}, "must be one of"),
        ({"step_time": {"base": 1.0}}, r"unknown key .*step_time\.base"),
    ]:
        with pytest.raises(ValueError, match=message):
            Drafter(config, settings)
    assert Drafter(config, {"step_time": {"base_s": 0.5}}).speculation.planner.step_time.fit.prior.base_s == 0.5
