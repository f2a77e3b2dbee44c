"""Agent loops of a replay, and policies of the simulator as live routers, with servers of this process."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.compare.fixed_work.helpers import spec
from tests.integration.conftest import until
from tests.integration.local_actor import FakeServer, LocalActor
from verl_war.compare.fixed_work.arms import ARMS
from verl_war.compare.fixed_work.results import RunFailed
from verl_war.compare.fixed_work.texts import RandomTexts

pytestmark = pytest.mark.upstream

TEXTS = RandomTexts(vocab_size=50)
PEERS = [arm.name for arm in ARMS.values() if arm.policy]


class FakeClient:
    """Answers every turn with as many tokens as it asks for."""

    def __init__(self, error=None, delay_s=0.0):
        self.requests = []
        self._error, self._delay_s = error, delay_s

    async def _acquire_server(self, request_id, **extra):
        await asyncio.sleep(0.01)
        return f"r{len(self.requests) % 2}", None, 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority):
        await self._acquire_server(request_id)
        self.requests.append((request_id, list(prompt_ids), dict(sampling_params), priority))
        await asyncio.sleep(self._delay_s)
        if self._error is not None and len(self.requests) >= 3:
            raise self._error
        tokens = [100 + len(self.requests)] * sampling_params["max_tokens"]
        return SimpleNamespace(token_ids=tokens, extra_fields={"num_cached_tokens": 7})

    def end_trajectory(self, trajectory_id, failed):
        self.requests.append((trajectory_id, "ended"))


def step(specs, **changes):
    from verl_war.compare.fixed_work.replay import Step

    return Step(**(dict(specs=specs, texts=TEXTS, number=100, seed=1) | changes))


async def play(arm, client, specs, keeps_texts=False, **changes):
    from verl_war.compare.fixed_work.replay import _Player

    player = _Player(ARMS[arm], client, step(specs, **changes), keeps_texts)
    await player.play()
    return player.done


def quick(name, turns=3, **changes):
    """A trajectory whose tools take no time."""
    it = spec(name, turns=turns, **changes)
    return replace(it, turns=tuple(replace(turn, tool_s=0.0) for turn in it.turns))


async def test_contexts_go_on_with_what_was_generated():
    it, client = quick("g-0"), FakeClient()
    done = await play("stock", client, [it], keeps_texts=True)
    contexts = [prompt for _, prompt, _, _ in client.requests]
    assert contexts[0] == TEXTS.prompt(it)
    assert contexts[1] == contexts[0] + [101] * 10 + TEXTS.tool_output(it, 0)
    assert [len(context) for context in contexts] == [100, 130, 160]
    replica, (name, _, prompt_tokens, tokens, lengths) = done.texts[0]
    assert (replica, name, prompt_tokens) == (done.turns[-1].replica_id, "g-0", 100)
    assert tokens == contexts[2] + [103] * 10
    assert lengths == [(100, 10), (130, 10), (160, 10)]
    assert done.kv_demand_peak_tokens == 170


async def test_lengths_are_forced():
    client = FakeClient()
    await play("stock", client, [quick("g-0"), quick("g-1")])
    sampling = [params for _, _, params, _ in client.requests]
    assert sampling == [{"max_tokens": 10, "min_tokens": 10, "ignore_eos": True, "temperature": 1.0}] * 6


@pytest.mark.parametrize("arm,priorities", [("stock", {0}), ("stock_priority", {0, 1, 2}), ("vllm_suffix", {0})])
async def test_priority_is_the_place_in_the_batch_where_engines_know_it(arm, priorities):
    client = FakeClient()
    await play(arm, client, [quick(f"g-{i}", turns=1) for i in range(3)])
    assert {priority for *_, priority in client.requests} == priorities


async def test_times_of_turns_tell_asking_from_running():
    done = await play("stock", FakeClient(delay_s=0.02), [quick("g-0")])
    for turn in done.turns:
        assert turn.asked_s + 0.009 <= turn.started_s <= turn.ended_s - 0.019
    assert done.makespan_s >= done.end_s["g-0"] >= done.turns[-1].ended_s


async def test_a_turn_that_fails_ends_the_run_and_keeps_what_was_measured():
    with pytest.raises(RunFailed, match="ValueError: it broke") as failure:
        await play("stock", FakeClient(ValueError("it broke")), [quick("g-0"), quick("g-1")])
    assert len(failure.value.so_far.turns) == 2
    assert failure.value.so_far.makespan_s > 0


async def test_a_run_that_takes_too_long_has_failed():
    with pytest.raises(RunFailed, match="1 trajectories had not ended after 0.05 s"):
        await play("stock", FakeClient(delay_s=60.0), [quick("g-0")], limit_s=0.05)


class Server(FakeServer):
    """Answers with the tokens asked for."""

    async def generate(self, request_id, prompt_ids, sampling_params, **request):
        output = await super().generate(request_id, prompt_ids, sampling_params, **request)
        output.token_ids = [7] * sampling_params["max_tokens"]
        return output


class Rig:
    """A policy as live router with WAR's client before it, all in this process."""

    def __init__(self, arm, specs, kv_tokens=4096, replicas=2, delay_s=0.0):
        from omegaconf import OmegaConf
        from verl.workers.rollout.llm_server import LLMServerClient

        from verl_war.compare.fixed_work.routers import PolicyRouter
        from verl_war.integration.verl.client import war_client_of

        self.servers = {f"r{i}": LocalActor(Server(delay_s, kv_tokens)) for i in range(replicas)}
        self.target = PolicyRouter(self.servers, ARMS[arm].policy, kv_tokens, tuple(specs), seed=1)
        self.router = LocalActor(self.target)
        rollout = {"name": "vllm", "full_determinism": False, "custom": {"war": dict(ARMS[arm].settings)}}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.client = war_client_of(LLMServerClient(config=config, load_balancer_handle=self.router))

    async def close(self):
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                task.cancel()

    def served(self):
        return sum(len(server.target.served) for server in self.servers.values())


@pytest.fixture
def fast(monkeypatch):
    """Rules look at engines and clocks a hundred times a second."""
    from verl_war.compare.fixed_work import routers

    monkeypatch.setattr(routers, "SNAPSHOT_INTERVAL_S", 0.01)
    monkeypatch.setattr(routers, "TICK_INTERVAL_S", 0.01)


@pytest.mark.parametrize("arm", PEERS)
async def test_every_peer_serves_every_trajectory_to_its_end(arm, fast):
    specs = [quick(f"g{i // 4}-{i}", group=f"g{i // 4}") for i in range(8)]
    rig = Rig(arm, specs)
    done = await play(arm, rig.client, specs)
    assert sorted((turn.trajectory_id, turn.number) for turn in done.turns) == sorted(
        (it.trajectory_id, number) for it in specs for number in range(3)
    )
    assert done.total("output_tokens") == 8 * 30
    assert {turn.replica_id for turn in done.turns} <= {"r0", "r1"}
    await until(lambda: set(rig.target._manager.inflight.values()) == {0})
    await rig.close()


async def test_what_a_rule_holds_waits_until_the_rule_lets_it_go(fast, monkeypatch):
    from verl_war.sim.policies import thunderagent

    monkeypatch.setattr(thunderagent, "POLL_S", 0.05)
    specs = [quick(f"g-{i}", turns=1, prompt=600, group=f"g{i}") for i in range(2)]
    rig = Rig("thunderagent_like", specs, kv_tokens=1000, replicas=1, delay_s=0.2)
    done = await play("thunderagent_like", rig.client, specs)
    first, second = done.turns
    assert first.started_s - first.asked_s < 0.1
    assert second.started_s >= first.ended_s  # it did not fit beside the first
    assert second.started_s - second.asked_s > 0.15
    await rig.close()


async def test_rules_are_told_of_engines(fast):
    rig = Rig("kvcaware_like", [quick("g-0")], delay_s=3600.0)
    loop = asyncio.ensure_future(play("kvcaware_like", rig.client, [quick("g-0", prompt=2048)]))
    await until(lambda: rig.served() == 1)
    rule = rig.target._manager._policy
    await until(lambda: sorted(rule._used.values()) == [0.0, 2048.0])
    loop.cancel()
    await rig.close()
