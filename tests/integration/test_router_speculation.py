"""What the router tells replicas about each other's history, and what it reports of their speculation."""

import asyncio

import pytest

from tests.core.test_speculation_report import counters
from tests.integration.conftest import until

pytestmark = pytest.mark.upstream


async def test_replicas_are_told_whom_to_send_their_history_to(make_rig):
    rig = make_rig(4, settings={"speculation": {"enabled": True, "share_peers": 2}})
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)

    def peers():
        names = {id(server): name for name, server in rig.servers.items()}
        return {name: [names[id(peer)] for peer in server.target.peers] for name, server in rig.servers.items()}

    ring = {"r0": ["r1", "r2"], "r1": ["r2", "r3"], "r2": ["r3", "r0"], "r3": ["r0", "r1"]}
    await until(lambda: peers() == ring)
    await rig.war_router.remove_servers(["r1"])
    await until(lambda: peers()["r0"] == ["r2", "r3"] and peers()["r2"] == ["r3", "r0"])
    await rig.war_router.remove_servers(["r2", "r3"])
    await until(lambda: peers()["r0"] == [])


async def test_speculation_of_all_replicas_is_reported(make_rig):
    rig = make_rig(3, settings={"speculation": {"enabled": True}, "metrics_timeout_s": 0.2})
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    for name in ("r0", "r1"):
        rig.servers[name].target.speculation = counters()
    rig.servers["r2"].die()
    metrics = await rig.war_router.step_metrics()
    assert metrics["war/spec/drafted_tokens"] == 400
    assert "r2" not in rig.war_router._pool.servers and metrics["war/spec/replicas_missing"] == 0
    rig.servers["r1"].target.speculation = None
    metrics = await rig.war_router.step_metrics()
    assert metrics["war/spec/replicas_missing"] == 1 and metrics["war/spec/drafted_tokens"] == 0


async def test_a_replica_that_left_in_good_order_still_counts_until_it_is_gone(make_rig):
    rig = make_rig(2, settings={"speculation": {"enabled": True}, "metrics_timeout_s": 0.2})
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    for server in rig.servers.values():
        server.target.speculation = counters()
    await rig.war_router.remove_servers(["r1"])  # a hybrid replica, before its weights are trained
    metrics = await rig.war_router.step_metrics()
    assert metrics["war/spec/drafted_tokens"] == 400
    await rig.war_router.add_servers({"r1": rig.servers["r1"]})
    assert (await rig.war_router.step_metrics())["war/spec/replicas_missing"] == 0
    await rig.war_router.remove_servers(["r1"])
    rig.servers["r1"].die()
    for _ in range(2):
        assert (await rig.war_router.step_metrics())["war/spec/replicas_missing"] == 0
    asked = [call for call in rig.servers["r1"].calls if call[0] == "war_speculation_stats"]
    assert len(asked) == 3, "who has gone is not asked again"


async def test_a_mute_replica_costs_a_step_no_more_than_one_time_out(make_rig):
    rig = make_rig(2, settings={"speculation": {"enabled": True}, "metrics_timeout_s": 0.5})
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    rig.servers["r0"].target.speculation = counters()
    rig.servers["r1"].target.is_mute = True
    metrics = await asyncio.wait_for(rig.war_router.step_metrics(), 0.9)
    assert metrics["war/spec/replicas_missing"] == 1 and metrics["war/spec/drafted_tokens"] == 200


async def test_a_replica_that_left_sends_no_more_and_others_are_told_only_of_changes(make_rig):
    rig = make_rig(4, settings={"speculation": {"enabled": True, "share_peers": 1}})
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    told = lambda: [len([c for c in s.calls if c[0] == "war_share_with"]) for s in rig.servers.values()]  # noqa: E731
    assert told() == [1, 1, 1, 1]
    await rig.war_router.remove_servers(["r2"])
    assert told() == [1, 2, 2, 1]
    await until(lambda: rig.servers["r2"].target.peers == [])
    await rig.war_router.add_servers({"r2": rig.servers["r2"]})
    assert told() == [1, 2, 3, 2], "it joins at the end of the ring"


async def test_readings_reach_the_manager_and_trouble_is_only_skipped(make_rig, monkeypatch, caplog):
    from verl_war.integration.verl import router_speculation

    monkeypatch.setattr(router_speculation, "ASK_EVERY_S", 0.02)
    rig = make_rig(4, settings={"speculation": {"enabled": True, "share_peers": 0}})
    rig.servers["r0"].target.speculation = counters()
    rig.servers["r1"].target.is_mute = True
    rig.servers["r2"].target.speculation = counters(drafted=-1)
    rig.servers["r3"].die()
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    asked = lambda name: [call[0] for call in rig.servers[name].calls].count("war_speculation_stats")  # noqa: E731
    await until(lambda: asked("r0") > 5)
    readings = {name: replica.speculation for name, replica in rig.manager._fleet.replicas.items()}
    assert readings["r0"].drafted_tokens == 200 and readings["r0"].regime == "low"
    assert readings["r1"] is readings["r2"] is readings["r3"] is None
    assert asked("r1") == 1, "who has not answered is not asked again"
    assert caplog.text.count("refused") == 1
    rig.servers["r1"].target.is_mute = False
    rig.servers["r1"].target.speculation = counters(disabled="RuntimeError: x")
    await until(lambda: rig.manager._fleet.replicas["r1"].speculation is not None)
    assert rig.manager._fleet.replicas["r1"].speculation.budget_tokens == 0


async def test_a_server_that_comes_in_place_of_another_is_asked_itself(make_rig, monkeypatch):
    from tests.integration.local_actor import FakeServer, LocalActor
    from verl_war.integration.verl import router_speculation

    monkeypatch.setattr(router_speculation, "ASK_EVERY_S", 0.02)
    rig = make_rig(1, settings={"speculation": {"enabled": True}})
    rig.servers["r0"].target.is_mute = True
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    await until(lambda: rig.servers["r0"].calls)
    await rig.war_router.remove_servers(["r0"])
    another = LocalActor(FakeServer())
    another.target.speculation = counters()
    await rig.war_router.add_servers({"r0": another})
    await until(lambda: rig.manager._fleet.replicas["r0"].speculation is not None)


async def test_without_speculation_nobody_is_told_and_nothing_is_reported(make_rig):
    rig = make_rig(2)
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    metrics = await rig.war_router.step_metrics()
    assert not [name for name in metrics if name.startswith("war/spec/")]
    assert not [call for server in rig.servers.values() for call in server.calls if call[0].startswith("war_s")
                and call[0] != "war_snapshot"]  # fmt: skip
