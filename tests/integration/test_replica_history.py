"""What servers do for the history of their engines, with an engine that only keeps account."""

import asyncio
import dataclasses

import pytest

from tests.core.test_machine_profile import PROFILE
from tests.integration.conftest import until
from tests.integration.local_actor import LocalActor

pytestmark = pytest.mark.upstream


class Account:
    """Stands in for `AsyncLLM`: keeps the calls, gives out what is in `outbox`."""

    def __init__(self):
        self.calls = []
        self.outbox = []
        self.error = None

    async def collective_rpc(self, method, *, args=()):
        if self.error:
            raise self.error
        self.calls.append((method, *args))
        if method == "war_history_exchange":
            return [self.outbox.pop(0) if self.outbox and args[1] else b"", b""]
        return {"war_speculation_stats": [None, {"steps": 1}], "war_history_load": [5, 0]}.get(method, [None])

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


class Peer:
    """A server that other replicas send history to."""

    def __init__(self):
        self.got = []
        self.is_stuck = False
        self.error = None

    async def war_history_apply(self, batch):
        self.got.append(batch)
        if self.error:
            raise self.error
        while self.is_stuck:
            await asyncio.sleep(0.01)


@pytest.fixture
def history(monkeypatch):
    from verl_war.core.config import SpeculationConfig
    from verl_war.integration.verl import replica_history

    monkeypatch.setattr(replica_history, "SHARE_EVERY_S", 0.01)
    monkeypatch.setattr(replica_history.ray, "put", lambda batch: batch)

    def make(rank=0, **settings):
        config = SpeculationConfig(enabled=True, **settings)
        return replica_history.ReplicaHistory(Account(), config, rank)

    return make


async def test_new_text_goes_to_all_peers(history):
    it, peers = history(), [LocalActor(Peer()), LocalActor(Peer())]
    it.share_with(peers)
    it._engine.outbox = [b"one", b"two"]
    await until(lambda: all(peer.target.got == [b"one", b"two"] for peer in peers))
    it.share_with([])
    await until(it._task.done)
    it.share_with(peers[:1])
    it._engine.outbox = [b"three"]
    await until(lambda: peers[0].target.got[-1] == b"three")
    assert peers[1].target.got[-1] == b"two"


async def test_a_peer_that_is_stuck_or_broken_gets_no_more_and_keeps_nobody(history):
    from ray.exceptions import RayError

    it, peers = history(), [LocalActor(Peer()) for _ in range(3)]
    peers[0].target.is_stuck, peers[1].target.error = True, RayError("gone")
    it.share_with(peers)
    it._engine.outbox = [b"%d" % i for i in range(5)]
    await until(lambda: len(peers[2].target.got) == 5)
    assert peers[0].target.got == [b"0"] and len(peers[1].target.got) == 5
    peers[0].target.is_stuck = False
    await asyncio.sleep(0.05)
    it._engine.outbox = [b"late"]
    await until(lambda: peers[0].target.got[-1] == b"late")


async def test_what_arrives_meanwhile_goes_to_the_engine_with_one_call(history):
    it = history()
    arriving = [asyncio.ensure_future(it.apply(batch)) for batch in (b"a", b"b", b"c")]
    await asyncio.wait(arriving, timeout=10)
    assert all(call.done() for call in arriving)
    assert it._engine.named("war_history_exchange") == [([b"a", b"b", b"c"], 0)], "and no text for nobody"
    await until(it._task.done)
    await asyncio.wait_for(it.apply(b"later"), 10)
    assert it._engine.named("war_history_exchange")[1:] == [([b"later"], 0)]


async def test_who_sends_to_a_broken_engine_does_not_wait_for_ever(history, caplog):
    it = history()
    it._engine.error = RuntimeError("broken index")
    for batch in (b"a", b"b", b"c"):
        await asyncio.wait_for(it.apply(batch), 10)
    assert caplog.text.count("no longer shared") == 1


async def test_an_error_ends_sharing_and_is_logged(history, caplog):
    it = history()
    it._engine.error = RuntimeError("broken index")
    it.share_with([LocalActor(Peer())])
    await until(lambda: "no longer shared" in caplog.text)
    assert "broken index" in caplog.text


async def test_a_policy_step_ages_and_now_and_then_saves(history, tmp_path):
    it = history(rank=3, history_dir=str(tmp_path / "new" / "dir"), history_save_steps=2)
    await it.load()
    for step in range(5):
        await it.on_policy_step(step)
        it.note_reward(f"conversation {step}", 0.5)
    told = [{}, *({f"conversation {step}": 0.5} for step in range(4))]
    assert it._engine.named("war_policy_step") == list(enumerate(told))
    path = str(tmp_path / "new" / "dir" / "replica_3.history")
    assert it._engine.named("war_history_save") == [(path,), (path,)] and not it._engine.named("war_history_load")


async def test_an_earlier_run_is_taken_up_its_own_file_first(history, tmp_path):
    (tmp_path / "replica_1.history").touch()
    it = history(rank=0, history_dir=str(tmp_path), history_on_damage="discard")
    await it.load()
    (tmp_path / "replica_0.history").touch()
    await it.load()
    names = [path.rsplit("/", 1)[1] for path, damage in it._engine.named("war_history_load") if damage == "discard"]
    assert names == ["replica_1.history", "replica_0.history"]


async def test_a_directory_that_cannot_be_used_is_named(history, tmp_path):
    (tmp_path / "file").touch()
    it = history(history_dir=str(tmp_path / "file" / "dir"))
    with pytest.raises(RuntimeError, match=r"speculation\.history_dir='.*file/dir' cannot be used"):
        await it.load()


async def test_a_full_object_store_costs_one_batch(history, monkeypatch):
    from ray.exceptions import ObjectStoreFullError

    from verl_war.integration.verl import replica_history

    def put(batch):
        if batch == b"unlucky":
            raise ObjectStoreFullError("full")
        return batch

    monkeypatch.setattr(replica_history.ray, "put", put)
    it, peer = history(), LocalActor(Peer())
    it.share_with([peer])
    it._engine.outbox = [b"unlucky", b"next"]
    await until(lambda: peer.target.got == [b"next"])


async def test_statistics_are_those_of_the_rank_that_drafts(history):
    assert await history().stats() == {"steps": 1}


def test_engine_settings_are_plain_and_accepted_by_the_worker():
    import json

    from verl_war.core.config import SpeculationConfig
    from verl_war.core.config_parsing import parse
    from verl_war.core.history_config import HISTORY_KEY, HistoryConfig
    from verl_war.core.speculation_limits import SpeculationLimits, change_limits
    from verl_war.core.step_time import StepTime
    from verl_war.integration.verl.replica_history import engine_settings

    config = SpeculationConfig(enabled=True, max_draft_tokens=7, history=HistoryConfig(sources=("own", "global")))
    settings = json.loads(json.dumps(engine_settings(config)))
    assert settings.pop("share_bytes_per_s") == config.share_bytes_per_s
    assert parse(HistoryConfig, settings.pop("history"), HISTORY_KEY) == config.history
    assert change_limits(SpeculationLimits(), settings).max_draft_tokens == 7
    with_profile = json.loads(json.dumps(engine_settings(config, PROFILE)))
    assert parse(StepTime, with_profile["step_time"], "step_time") == PROFILE.step_time


@pytest.mark.parametrize("mine", [None, {"other": 1}, '{"other": 1}'])
def test_engines_start_with_speculation_beside_what_the_user_asked_for(mine, tmp_path):
    import json

    from verl_war.core.config import WarConfig, parse_war_config
    from verl_war.integration.verl.replica import WarHttpServer

    server = WarHttpServer.__new__(WarHttpServer)
    server.config = {}
    server._war_config = parse_war_config({"speculation": {"enabled": True, "max_draft_tokens": 9}})
    options = {"additional_config": mine} if mine else {}
    server._preprocess_engine_kwargs(options)
    assert options["speculative_config"]["num_speculative_tokens"] == 9
    assert options["additional_config"].pop("war_speculation")["max_draft_tokens"] == 9
    assert options["additional_config"] == ({"other": 1} if mine else {})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.as_dict()))
    server._war_config = parse_war_config({"speculation": {"enabled": True}, "profile_path": str(path)})
    options = {}
    server._preprocess_engine_kwargs(options)
    assert options["additional_config"]["war_speculation"]["step_time"] == dataclasses.asdict(PROFILE.step_time)
    server._war_config, options = WarConfig(), {}
    server._preprocess_engine_kwargs(options)
    assert options == {}
