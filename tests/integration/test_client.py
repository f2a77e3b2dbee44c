"""What WAR's client tells the router, that it always gives back what it acquired, and what it does about failures."""

import asyncio

import numpy as np
import pytest

from tests.integration.conftest import ADMISSION, until

pytestmark = pytest.mark.upstream

PROMPT = list(range(130))


def output(token_ids=(7, 8), stop_reason="completed", **extra):
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(token_ids=list(token_ids), log_probs=[0.0] * len(token_ids), stop_reason=stop_reason,
                       extra_fields={"global_steps": 3, "num_cached_tokens": 64} | extra)  # fmt: skip


async def generate(client, session="session", prompt=PROMPT, **kwargs):
    return await client.generate(session, prompt_ids=prompt, sampling_params={"temperature": 1.0}, **kwargs)


def messages(rig, kind):
    sent = [message for name, args, _ in rig.router.calls if name == "exchange" for message in args[1]]
    return [unpack(kind, *message[1:]) for message in sent if message[0] == kind]


def unpack(kind, *arguments):
    from verl_war.integration.verl.router_protocol import unpack_result, unpack_turn

    if kind == "turn":
        return (unpack_turn(*arguments),)
    return (*arguments[:3], unpack_result(*arguments[3:])) if kind == "turn_end" else arguments


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient"])
async def test_a_turn_is_described_placed_reported_and_returned(make_rig, kind):
    from verl_war.core.blocks import block_chain_hashes
    from verl_war.core.types import Turn, TurnResult
    from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

    rig = make_rig(1)
    identity = TrajectoryIdentity(trajectory_id="uid_2", group_id="uid", policy_step=4, validate=False)
    token = current_trajectory.set(identity)
    try:
        result = await generate(rig.client(kind), priority=2)
    finally:
        current_trajectory.reset(token)

    assert result.token_ids == [7, 8]
    assert result.extra_fields["min_global_steps"] == result.extra_fields["max_global_steps"] == 3
    await until(lambda: messages(rig, "turn_end"))
    assert messages(rig, "turn") == [
        (Turn(session_id="session", trajectory_id="uid_2", group_id="uid", policy_step=4, prompt_tokens=130,
              block_hashes=block_chain_hashes(PROMPT, 64), priority=2),),
    ]  # fmt: skip
    ended = TurnResult(completion_tokens=2, num_cached_tokens=64)
    assert messages(rig, "turn_end") == [("uid_2", "session", "r0", ended)]
    (call,) = [kwargs for name, _, kwargs in rig.servers["r0"].calls if name == "generate"]
    assert call["prompt_ids"] == PROMPT and call["priority"] == 2
    assert call["request_id"] != "session", "each turn is a request of its own to vLLM"


async def test_rewards_go_to_the_servers_that_hold_the_text(make_rig):
    from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

    rig = make_rig(2, {"speculation": {"enabled": True}})
    client = rig.client()
    for validate in (False, True):
        identity = TrajectoryIdentity(trajectory_id=f"uid_{validate}", group_id="uid", policy_step=4, validate=validate)
        token = current_trajectory.set(identity)
        try:
            for session in ("first", "second", "first"):
                await generate(client, session=f"{session} {validate}")
        finally:
            current_trajectory.reset(token)
        client.note_reward(identity, 0.5)
    told = {name: [args for call, args, _ in server.calls if call == "war_history_reward"]
            for name, server in rig.servers.items()}  # fmt: skip
    assert sorted(sum(told.values(), [])) == [("first False", 0.5), ("second False", 0.5)]


async def test_without_identity_the_session_stands_for_the_trajectory(make_rig):
    rig = make_rig()
    await generate(rig.client())
    assert messages(rig, "turn")[0][0].trajectory_id == "session"


async def test_a_turn_that_fails_for_its_own_sake_is_given_back_and_not_repeated(make_rig):
    from verl_war.core.types import TurnResult

    rig = make_rig(1)
    rig.servers["r0"].target.answer = lambda _: ValueError("prompt too long")
    with pytest.raises(ValueError, match="prompt too long"):
        await generate(rig.client())
    await until(lambda: messages(rig, "turn_end"))
    assert messages(rig, "turn_end") == [("session", "session", "r0", TurnResult(failed=True))]
    assert await rig.war_router.get_total_inflight() == 0


async def test_an_aborted_turn_is_resumed_as_a_second_placement(make_rig, monkeypatch):
    async def no_sleep(_):
        pass

    rig = make_rig(1)
    answers = {1: output((7,), stop_reason="aborted"), 2: output((8, 9))}
    rig.servers["r0"].target.answer = answers.get
    client = rig.client("FullyAsyncLLMServerClient")
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", no_sleep)
    result = await generate(client)
    monkeypatch.undo()
    assert result.token_ids == [7, 8, 9]
    assert [turn.prompt_tokens for (turn,) in messages(rig, "turn")] == [130, 131]


async def test_an_abort_that_nobody_asked_for_is_no_answer(make_rig):
    """In synchronous training verl would hand the agent loop an empty reply, and train on it."""
    rig = make_rig(1)
    rig.servers["r0"].target.answer = {1: output((), stop_reason="aborted")}.get
    assert (await generate(rig.client())).token_ids == [7, 8]
    assert [call["prompt_ids"] for call in rig.servers["r0"].target.served] == [PROMPT, PROMPT]


async def test_a_client_that_war_does_not_know_is_refused():
    from verl.workers.rollout.llm_server import LLMServerClient

    from verl_war.integration.verl.client import war_client_of

    class Other(LLMServerClient):
        pass

    with pytest.raises(RuntimeError, match="Other"):
        war_client_of(Other(config=None))


async def test_turns_that_start_together_share_calls(make_rig):
    rig = make_rig(4)
    client = rig.client()
    await asyncio.gather(*(generate(client, session=f"s{i}") for i in range(200)))
    exchanges = [args for name, args, _ in rig.router.calls if name == "exchange"]
    assert len(messages(rig, "turn")) == 200 and len(exchanges) < 40
    assert max(rig.served().values()) - min(rig.served().values()) <= 1


async def test_a_dead_replicas_turn_is_asked_again_elsewhere_with_the_same_tokens(make_rig, caplog):
    rig = make_rig(2, delay_s=0.2)
    client = rig.client()
    turn = asyncio.ensure_future(generate(client))
    await until(lambda: sum(rig.served().values()) == 1)
    (dead,) = [name for name, count in rig.served().items() if count]
    rig.servers[dead].die()
    assert (await turn).token_ids == [7, 8]
    (other,) = set(rig.servers) - {dead}
    assert rig.servers[other].target.served[0]["prompt_ids"] == PROMPT
    assert await rig.war_router.get_all_servers() == [other]
    await generate(client)
    lines = [record.message for record in caplog.records if f"replica {dead}: up -> down" in record.message]
    assert len(lines) == 1 and "ActorDiedError" in lines[0]
    assert (await rig.war_router.step_metrics())["war/replicas_lost"] == 1


async def test_a_dead_engine_behind_a_living_server_counts_as_gone(make_rig):
    from verl_war.integration.verl.failures import ReplicaFailedError

    rig = make_rig(2)
    for server in rig.servers.values():
        server.target.answer = lambda _: ReplicaFailedError("the vLLM engine of replica 0 is dead")
    rig.servers["r1"].target.answer = None
    client = rig.client()
    for i in range(4):
        assert (await generate(client, session=f"s{i}")).token_ids == [7, 8]
    assert await rig.war_router.get_all_servers() == ["r1"]


@pytest.mark.parametrize("stamp_is_old", [True, False])
async def test_a_replica_that_breaks_before_its_grant_is_heard_of_is_not_waited_for(make_rig, stamp_is_old):
    """Its loss is told before there is a turn on it that could be told."""
    rig = make_rig(2)
    client = rig.client()
    await client.link._join()
    exchange, broken = rig.war_router.exchange, []

    async def breaking(owner, batch):
        stamp, answers = await exchange(owner, batch)
        if not broken:
            broken.append(answers[0].replica_id)
            rig.servers[broken[0]].target.is_hung = True
            await rig.war_router.report_replica(broken[0], "it was killed", True)
            await until(lambda: client.link._is_pool_old)
        return stamp if stamp_is_old else (await exchange(owner, []))[0], answers

    rig.war_router.exchange = breaking
    assert (await asyncio.wait_for(generate(client), 10)).token_ids == [7, 8]
    (other,) = set(rig.servers) - set(broken)
    assert rig.served() == {broken[0]: 0, other: 1}
    client.end_trajectory("session", failed=False)
    await until(lambda: not any(rig.manager.inflight.values()))


async def test_when_no_replica_is_left_the_trajectory_fails_at_once(make_rig):
    rig = make_rig(2)
    for server in rig.servers.values():
        server.die()
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await generate(rig.client())


async def test_retries_end(make_rig):
    rig = make_rig(1, settings={"failures": {"retries": 1}})
    rig.servers["r0"].target.answer = lambda _: output((), stop_reason="aborted")
    with pytest.raises(RuntimeError, match=r"trajectory session failed 2 times.*failures.retries=1"):
        await generate(rig.client())


async def test_a_turn_that_takes_too_long_is_cancelled_and_asked_again(make_rig):
    """With every feature off nobody polls: the deadline is what notices a hang, and the router then looks twice."""
    rig = make_rig(2, settings={"failures": {"turn_deadline_s": 0.3, "replica_hang_s": 0.2}})
    client = rig.client()
    for server in rig.servers.values():
        server.target.is_hung = True
    turn = asyncio.ensure_future(generate(client))
    await until(lambda: sum(rig.served().values()) == 1)
    (hung,) = [name for name, count in rig.served().items() if count]
    (other,) = set(rig.servers) - {hung}
    rig.servers[other].target.is_hung = False
    assert (await asyncio.wait_for(turn, 10)).token_ids == [7, 8]
    assert len(rig.servers[hung].target.aborted) == 1
    assert await rig.war_router.get_all_servers() == [other]


async def test_a_slow_turn_of_a_working_replica_does_not_take_it_out(make_rig):
    rig = make_rig(1, settings={"failures": {"turn_deadline_s": 0.3, "replica_hang_s": 0.2}})
    server = rig.servers["r0"].target
    server.delay_s = 0.5

    async def work():
        while True:
            server.engine_steps += 1
            await asyncio.sleep(0.01)

    working = asyncio.ensure_future(work())
    with pytest.raises(RuntimeError, match="failed 4 times"):
        await generate(rig.client())
    working.cancel()
    assert await rig.war_router.get_all_servers() == ["r0"]


async def test_a_cancelled_turn_gives_back_what_it_was_granted(make_rig):
    rig = make_rig(1, delay_s=3600)
    client = rig.client()
    turns = [asyncio.ensure_future(generate(client, session=f"s{i}")) for i in range(5)]
    await until(lambda: rig.served()["r0"] == 5)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    await until(lambda: not any(rig.manager.inflight.values()))
    assert len(rig.servers["r0"].target.aborted) == 5, "the engine stops working for nobody"


@pytest.mark.parametrize("when", ["before the router answers", "while it is held", "as it is granted"])
async def test_a_cancelled_wait_leaks_nothing(make_rig, when):
    rig = make_rig(1, settings=ADMISSION, delay_s=0.2, kv_capacity_tokens=1000)
    client = rig.client()
    await client.link._join()
    await until(lambda: rig.manager._fleet.replicas["r0"].capacity_tokens)
    first = asyncio.ensure_future(generate(client, session="first", prompt=list(range(800))))
    await until(lambda: rig.served()["r0"] == 1)
    second = asyncio.ensure_future(generate(client, session="second", prompt=list(range(800))))
    if when == "before the router answers":
        await asyncio.sleep(0)
    elif when == "while it is held":
        await until(lambda: rig.manager.held_turns == 1)
    else:
        await until(lambda: rig.manager.held_turns == 1)
        await first
        client.end_trajectory("first", failed=False)
        await until(lambda: rig.manager.held_turns == 0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await first
    client.end_trajectory("first", failed=False)
    client.end_trajectory("second", failed=True)
    await until(lambda: not rig.manager._trajectories)
    assert rig.manager.held_turns == 0 and not any(rig.manager.inflight.values())
    assert rig.manager._fleet.replicas["r0"].working_set_tokens == 0
    await until(lambda: not rig.war_router._turns._admissions)


async def test_the_engine_is_told_whose_turn_it_is_only_for_speculation(make_rig):
    rig = make_rig(1)
    await generate(rig.client())
    assert rig.servers["r0"].target.served[-1]["sampling"] == {"temperature": 1.0}
    rig = make_rig(1, settings={"speculation": {"enabled": True}})
    given = {"temperature": 1.0, "extra_args": {"mine": 1}}
    await rig.client().generate("session", prompt_ids=PROMPT, sampling_params=given)
    told = {"mine": 1, "war": {"trajectory": "session", "step": -1}}
    assert rig.servers["r0"].target.served[-1]["sampling"] == {"temperature": 1.0, "extra_args": told}
    assert given == {"temperature": 1.0, "extra_args": {"mine": 1}}, "the agent loop's own parameters were changed"


async def test_all_turns_of_a_conversation_name_its_first_prompt(make_rig):
    """A replica that it moves to must not take the longer context for another prompt: it would have no siblings."""
    from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

    rig = make_rig(1, settings={"speculation": {"enabled": True}})
    client, groups = rig.client(), []
    for trajectory in ("a", "b"):
        identity = TrajectoryIdentity(trajectory_id=trajectory, group_id="uid", policy_step=4, validate=False)
        token = current_trajectory.set(identity)
        for prompt in (np.array(PROMPT), [*PROMPT, 5, 6, 7]):  # verl's client takes arrays and tensors, too
            await generate(client, session=trajectory, prompt=prompt)
            groups.append(rig.servers["r0"].target.served[-1]["sampling"]["extra_args"]["war"]["group"])
        await generate(client, session=f"{trajectory}-other", prompt=[9, *PROMPT[1:]])
        assert rig.servers["r0"].target.served[-1]["sampling"]["extra_args"]["war"]["group"] != groups[0]
        current_trajectory.reset(token)
    assert len(set(groups)) == 1


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
async def test_parameters_that_cannot_be_verified_are_refused_by_name(make_rig, params):
    (name,) = params
    rig = make_rig(1, settings={"speculation": {"enabled": True}})
    with pytest.raises(ValueError, match=rf"{name}=.*speculation.enabled=False"):
        await rig.client().generate("session", prompt_ids=PROMPT, sampling_params=params)
    rig = make_rig(1)
    assert (await rig.client().generate("session", prompt_ids=PROMPT, sampling_params=params)).token_ids == [7, 8]
