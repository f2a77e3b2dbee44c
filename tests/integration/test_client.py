"""What WAR's client tells the router, and that it always gives back what it acquired."""

import asyncio

import pytest

pytestmark = pytest.mark.upstream

PROMPT = list(range(130))


class Method:
    """Stands for an actor's method: notes the call, answers with a coroutine's result."""

    def __init__(self, answer):
        self.calls = []
        self._answer = answer

    def remote(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        future = asyncio.get_running_loop().create_future()
        answer = self._answer(*args, **kwargs)
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future


class Router:
    def __init__(self, server, priority=0):
        self.acquire_server = Method(lambda **_: ("replica", server, priority))
        self.release_server = Method(lambda **_: None)
        self.end_trajectory = Method(lambda *_, **__: None)

    @property
    def released(self):
        (_, kwargs), *more = self.release_server.calls
        assert not more
        return kwargs


class Server:
    def __init__(self, *answers):
        remaining = list(answers)
        self.generate = Method(lambda **_: remaining.pop(0))


def output(token_ids=(7, 8), stop_reason="completed", **extra):
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(token_ids=list(token_ids), log_probs=[0.0] * len(token_ids), stop_reason=stop_reason,
                       extra_fields={"global_steps": 3, "num_cached_tokens": 64} | extra)  # fmt: skip


def make(kind, router):
    from omegaconf import OmegaConf
    from verl.workers.rollout import llm_server

    from verl_war.integration.verl.client import war_client_of

    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False, "custom": {"war": {}}}}}
    )
    return war_client_of(getattr(llm_server, kind)(config=config, load_balancer_handle=router))


async def generate(client, **kwargs):
    return await client.generate("session", prompt_ids=PROMPT, sampling_params={"temperature": 1.0}, **kwargs)


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient"])
async def test_a_turn_is_described_placed_reported_and_returned(kind):
    from verl_war.core.blocks import block_chain_hashes
    from verl_war.core.types import Turn, TurnResult
    from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

    server = Server(output())
    router = Router(server, priority=5)
    identity = TrajectoryIdentity(trajectory_id="uid_2", group_id="uid", policy_step=4, validate=False)
    token = current_trajectory.set(identity)
    try:
        result = await generate(make(kind, router), priority=2)
    finally:
        current_trajectory.reset(token)

    assert result.token_ids == [7, 8]
    assert result.extra_fields["min_global_steps"] == result.extra_fields["max_global_steps"] == 3
    ((_, acquired),) = router.acquire_server.calls
    assert acquired == {
        "request_id": "session",
        "turn": Turn(session_id="session", trajectory_id="uid_2", group_id="uid", policy_step=4, prompt_tokens=130,
                     block_hashes=block_chain_hashes(PROMPT, 64), priority=2),
    }  # fmt: skip
    assert router.released == {
        "server_id": "replica", "request_id": "session", "trajectory_id": "uid_2",
        "result": TurnResult(completion_tokens=2, num_cached_tokens=64),
    }  # fmt: skip
    ((_, sent),) = server.generate.calls
    assert sent["prompt_ids"] == PROMPT and sent["priority"] == 5
    assert sent["request_id"] != "session", "each turn is a request of its own to vLLM"


async def test_without_identity_the_session_stands_for_the_trajectory():
    router = Router(Server(output()))
    await generate(make("LLMServerClient", router))
    assert router.acquire_server.calls[0][1]["turn"].trajectory_id == "session"


async def test_a_turn_that_fails_is_given_back_as_failed():
    from verl_war.core.types import TurnResult

    router = Router(Server(ValueError("prompt too long")))
    with pytest.raises(ValueError, match="prompt too long"):
        await generate(make("LLMServerClient", router))
    assert router.released["result"] == TurnResult(failed=True)


async def test_an_aborted_turn_is_resumed_as_a_second_placement(monkeypatch):
    async def no_sleep(_):
        pass

    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", no_sleep)
    server = Server(output((7,), stop_reason="aborted"), output((8, 9)))
    router = Router(server)
    result = await generate(make("FullyAsyncLLMServerClient", router))
    assert result.token_ids == [7, 8, 9]
    assert [kwargs["turn"].prompt_tokens for _, kwargs in router.acquire_server.calls] == [130, 131]
    assert len(router.release_server.calls) == 2


async def test_a_client_that_war_does_not_know_is_refused():
    from verl.workers.rollout.llm_server import LLMServerClient

    from verl_war.integration.verl.client import war_client_of

    class Other(LLMServerClient):
        pass

    with pytest.raises(RuntimeError, match="Other"):
        war_client_of(Other(config=None))
