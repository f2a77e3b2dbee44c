"""The router's waiting, watching and failing, with replicas and clients of this process."""

import asyncio
import logging

import pytest

from tests.integration.conftest import ADMISSION, until
from tests.integration.local_actor import FakeServer, LocalActor

pytestmark = pytest.mark.upstream

NO_SERVERS = "No available servers in load balancer"


def settings(**failures):
    return {**ADMISSION, "failures": failures}


@pytest.fixture
def fast(monkeypatch):
    """Watching at a hundredth of a second."""
    from verl_war.integration.verl import router, router_health, router_turns

    monkeypatch.setattr(router_health, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(router_health, "CALM_POLL_EVERY_S", 0.01)
    monkeypatch.setattr(router_health, "STALE_AFTER_S", 0.05)
    monkeypatch.setattr(router_health, "SECOND_LOOK_S", 0.1)
    monkeypatch.setattr(router, "TICK_EVERY_S", 0.01)
    monkeypatch.setattr(router_turns, "LOOK_EVERY_S", 0.01)


async def full_rig(make_rig, replicas=1, **failures):
    """Replicas that hold one conversation of 800 tokens each, and as many such conversations under way."""
    rig = make_rig(replicas, settings=settings(**failures), delay_s=3600, kv_capacity_tokens=1000)
    client = rig.client()
    await client.link._join()
    await until(lambda: all(replica.capacity_tokens for replica in rig.manager._fleet.replicas.values()))
    for number in range(replicas):
        ask(client, f"first{number}")
    await until(lambda: sum(rig.served().values()) == replicas)
    return rig, client


def ask(client, session, tokens=800):
    task = asyncio.ensure_future(
        client.generate(session, prompt_ids=list(range(tokens)), sampling_params={"temperature": 1.0})
    )
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def ask_and_be_held(rig, client, *sessions):
    before = rig.manager.held_turns
    tasks = [ask(client, session) for session in sessions]
    await until(lambda: rig.manager.held_turns == before + len(sessions))
    return tasks


def asking(name, tokens):
    from verl_war.core.types import Turn
    from verl_war.integration.verl.router_protocol import pack_turn

    return ("turn", *pack_turn(Turn(session_id=name, trajectory_id=name, prompt_tokens=tokens)))


def ends(rig):
    """Let the turns that are under way at the engines end at once."""
    for server in rig.servers.values():
        server.target.delay_s = 0.0


async def test_a_held_turn_waits_for_room_and_holds_up_nobody(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (held,) = await ask_and_be_held(rig, client, "second")
    assert (await asyncio.wait_for(rig.router.get_status.remote(), 1))["total_inflight"] == 1
    ends(rig)
    client.end_trajectory("first0", failed=False)
    assert (await asyncio.wait_for(held, 5)).token_ids == [7, 8]
    client.end_trajectory("second", failed=False)
    await until(lambda: not rig.manager._trajectories)
    metrics = await rig.war_router.step_metrics()
    assert metrics["war/turns_held"] == 1 and metrics["war/held_s"] > 0


async def test_a_held_turn_runs_when_its_time_is_over(make_rig, fast):
    rig = make_rig(
        1,
        settings={"admission": {"enabled": True, "wait_for_thrash": False, "max_hold_s": 0.3}},
        delay_s=1,
        kv_capacity_tokens=1000,
    )
    client = rig.client()
    await client.link._join()
    await until(lambda: rig.manager._fleet.replicas["r0"].capacity_tokens)
    await asyncio.gather(ask(client, "a"), ask(client, "b"))
    assert (await rig.war_router.step_metrics())["war/turns_overdue"] == 1


async def test_a_held_turn_of_a_trajectory_that_ends_is_refused(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (held,) = await ask_and_be_held(rig, client, "second")
    client.end_trajectory("second", failed=True)
    with pytest.raises(RuntimeError, match="trajectory second ended while a turn of it was held"):
        await held
    assert rig.manager.held_turns == 0


async def test_a_cancelled_wait_at_the_actor_gives_the_turn_up_or_back(make_rig, fast):
    """What `ray.cancel` does to the call."""

    from verl_war.core.types import Turn

    rig, client = await full_rig(make_rig)
    router, turn = rig.war_router, Turn(session_id="s", trajectory_id="s", prompt_tokens=800)
    wait = asyncio.ensure_future(router.acquire_server("s", turn=turn))
    await until(lambda: rig.manager.held_turns == 1)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert rig.manager.held_turns == 0

    wait = asyncio.ensure_future(router.acquire_server("s", turn=turn))
    await until(lambda: rig.manager.held_turns == 1)
    await router.end_trajectory("first0", failed=False)  # grants it
    assert rig.manager.inflight == {"r0": 1}
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert rig.manager.inflight == {"r0": 0}


async def test_news_are_kept_until_they_are_acknowledged_and_can_be_withdrawn_until_handed_out():
    from verl_war.core.types import Turn
    from verl_war.integration.verl.router_mail import Item, Mailbox
    from verl_war.integration.verl.router_protocol import Grant

    def answer(ticket):
        return Item(("answer", ticket, Grant("r0", 0)), Turn(session_id="s", trajectory_id="s", prompt_tokens=1))

    box = Mailbox()
    waiting = asyncio.ensure_future(box.take(0))
    await asyncio.sleep(0)
    box.put(answer(1))
    box.put(Item(("lost", "r1")))
    heard, news = await waiting
    assert heard == 2 and [item[:2] for item in news] == [("answer", 1), ("lost", "r1")]
    box.put(answer(2))
    box.put(answer(3))
    assert box.withdraw(1) is None, "the client has it, or will have it"
    assert box.withdraw(3)[1] == Grant("r0", 0) and box.withdraw(3) is None
    heard, news = await box.take(0)  # the first call's answer was lost
    assert heard == 3 and [item[1] for item in news] == [1, "r1", 2]
    box.put(answer(4))
    heard, news = await box.take(3)
    assert heard == 4 and [item[1] for item in news] == [4]
    box.put(answer(5))
    heard, news = await box.take(0)  # the process began to count anew; what it did not say that it had is not lost
    assert heard == 2 and [item[1] for item in news] == [4, 5]


async def test_two_turns_of_one_session_run_one_after_the_other_when_held(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (one,) = await ask_and_be_held(rig, client, "second")
    two = ask(client, "second")
    await asyncio.sleep(0.05)
    assert rig.manager.held_turns == 1
    ends(rig)
    client.end_trajectory("first0", failed=False)
    await asyncio.wait_for(asyncio.gather(one, two), 5)


async def test_a_replica_that_joins_in_mid_step_takes_held_turns(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (held,) = await ask_and_be_held(rig, client, "second")
    rig.servers["new"] = LocalActor(FakeServer(kv_capacity_tokens=1000))
    await rig.router.add_servers.remote({"new": rig.servers["new"]})
    await asyncio.wait_for(held, 5)
    assert rig.served()["new"] == 1


async def test_a_turn_granted_on_a_replica_that_left_at_once_is_asked_again(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (task,) = await ask_and_be_held(rig, client, "held")
    await rig.war_router.add_servers({"brief": LocalActor(FakeServer())})
    assert rig.manager.held_turns == 0
    await rig.war_router.remove_servers(["brief"])  # before the client heard of it
    await until(lambda: rig.manager.held_turns == 1)
    ends(rig)
    client.end_trajectory("first0", failed=False)
    await asyncio.wait_for(task, 5)
    client.end_trajectory("held", failed=False)
    await until(lambda: not rig.manager._trajectories)
    assert all(replica.inflight == 0 for replica in rig.manager._fleet.replicas.values())


async def test_with_every_feature_off_nothing_runs_in_the_background(make_rig, fast):
    rig = make_rig(2)
    await ask(rig.client(), "s")
    await asyncio.sleep(0.1)
    assert not [name for server in rig.servers.values() for name, _, _ in server.calls if name == "war_snapshot"]
    await rig.war_router.step_metrics()
    assert [name for name, _, _ in rig.servers["r0"].calls].count("war_snapshot") == 1


async def test_missing_readings_widen_the_margin_until_the_next(make_rig, fast):
    rig, client = await full_rig(make_rig, replica_hang_s=60)
    replica = rig.manager._fleet.replicas["r0"]
    trusted = replica.trusted_tokens
    rig.servers["r0"].target.is_mute = True
    await until(lambda: replica.is_stale)
    assert replica.trusted_tokens == pytest.approx(0.85 * trusted)
    rig.servers["r0"].target.is_mute = False
    await until(lambda: not replica.is_stale)
    assert (await rig.war_router.step_metrics())["war/snapshots_missing"] >= 1


@pytest.mark.parametrize("value", [-1.0, float("nan")])
async def test_impossible_readings_are_refused_counted_and_logged_once(make_rig, fast, caplog, value):
    from verl_war.core.types import ReplicaSnapshot

    rig, client = await full_rig(make_rig)
    try:
        ReplicaSnapshot(running_requests=1, waiting_requests=0, kv_usage=value, kv_usage_peak=0.0,
                        kv_capacity_tokens=1, preemptions=0, engine_steps=1)  # fmt: skip
    except ValueError as error:
        rig.servers["r0"].target.reading_error = error
    await asyncio.sleep(0.2)
    assert (await rig.war_router.step_metrics())["war/snapshots_rejected"] >= 3
    assert len([record for record in caplog.records if "reading refused" in record.message]) == 1
    assert await rig.war_router.get_all_servers() == ["r0"]


@pytest.mark.parametrize("hang", ["no iteration", "no answer"])
async def test_a_replica_that_hangs_leaves_the_pool_and_returns_when_it_goes_on(make_rig, fast, caplog, hang):
    rig, client = await full_rig(make_rig, replicas=2, replica_hang_s=0.5)
    server = rig.servers["r0"].target
    others = asyncio.ensure_future(keep_working(rig.servers["r1"].target))
    server.is_mute, server.is_hung = hang == "no answer", hang == "no iteration"
    await until(lambda: "r0" not in rig.war_router._pool.servers)
    assert [record.message for record in caplog.records if "replica r0: up -> down" in record.message]
    await until(lambda: not server.running)
    await asyncio.sleep(0.3)
    assert "r0" not in rig.war_router._pool.servers, "it has nothing to do any more, but did not go on yet"
    server.is_mute = server.is_hung = False
    goes_on = asyncio.ensure_future(keep_working(server))
    await until(lambda: "r0" in rig.war_router._pool.servers)
    assert [record.message for record in caplog.records if "replica r0: down -> up" in record.message]
    others.cancel()
    goes_on.cancel()


async def keep_working(server):
    while True:
        server.engine_steps += 1
        await asyncio.sleep(0.01)


async def test_held_turns_outlive_the_last_replica_until_another_joins(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (held,) = await ask_and_be_held(rig, client, "second")
    await rig.router.remove_servers.remote(["r0"])
    await asyncio.sleep(0.1)
    assert not held.done()
    with pytest.raises(RuntimeError, match=NO_SERVERS):
        await ask(client, "third")
    await rig.router.add_servers.remote({"new": LocalActor(FakeServer())})
    await asyncio.wait_for(held, 5)


async def test_held_turns_fail_when_the_deadline_of_an_empty_pool_is_over(make_rig, fast):
    rig, client = await full_rig(make_rig, turn_deadline_s=0.5, retries=0)
    (held,) = await ask_and_be_held(rig, client, "second")
    await rig.router.remove_servers.remote(["r0"])
    with pytest.raises(RuntimeError, match=NO_SERVERS):
        await asyncio.wait_for(held, 5)
    assert rig.manager.held_turns == 0


async def test_held_turns_fail_at_once_when_the_last_replica_is_dead(make_rig, fast):
    rig, client = await full_rig(make_rig)
    (held,) = await ask_and_be_held(rig, client, "second")
    rig.servers["r0"].die()
    with pytest.raises(RuntimeError, match=NO_SERVERS):
        await asyncio.wait_for(held, 5)


async def test_turns_wait_for_the_only_replica_when_it_hangs(make_rig, fast):
    rig, client = await full_rig(make_rig, replica_hang_s=0.3)
    server = rig.servers["r0"].target
    server.is_hung = True
    await until(lambda: not rig.war_router._pool.servers)
    late = ask(client, "late", tokens=10)
    await asyncio.sleep(0.1)
    assert not late.done()
    # Which of the two starts first depends on when the other one asks again; it gives its place to the other.
    late.add_done_callback(lambda _: client.end_trajectory("late", failed=False))
    server.delay_s, server.is_hung = 0.0, False
    working = asyncio.ensure_future(keep_working(server))
    await until(lambda: any(turn["prompt_ids"] == list(range(800)) for turn in server.served[1:]))
    client.end_trajectory("first0", failed=False)  # its turn was asked again
    await asyncio.wait_for(late, 5)
    working.cancel()


async def test_a_dead_client_gives_back_what_it_holds(make_rig, fast, caplog):
    from verl_war.integration.verl.router_owners import Owners

    rig, client = await full_rig(make_rig)
    router = rig.war_router
    router._owners = Owners(router._on_owner_dead, ping_every_s=0.01)
    worker = LocalActor(None)
    await router.join(router._config, False, "dying", worker, None)
    turns = [asking(f"d{i}", 800) for i in range(3)]
    await router.exchange("dying", turns)
    await until(lambda: rig.manager.held_turns == 3)
    await router.end_trajectory("first0", failed=False)  # one of the dying is granted, and never fetches it
    assert rig.manager.held_turns == 2 and rig.manager.inflight == {"r0": 1}
    worker.die()
    await until(lambda: not rig.manager._trajectories)
    assert rig.manager.held_turns == 0 and rig.manager.inflight == {"r0": 0}
    assert not router._turns._admissions and rig.manager._fleet.replicas["r0"].working_set_tokens == 0
    assert [record for record in caplog.records if "3 trajectories given back" in record.message]


async def test_releases_that_make_no_sense_change_nothing(make_rig, fast, caplog):
    from verl_war.core.types import TurnResult

    rig, client = await full_rig(make_rig, replicas=2)
    result = TurnResult(completion_tokens=5)
    served = next(name for name in rig.servers if rig.manager._fleet.replicas[name].admitted.get("first0"))
    other = next(name for name in rig.servers if name != served)
    for replica_id, session, trajectory in [(other, "first0", "first0"), (served, "never", "never")]:
        await rig.war_router.release_server(replica_id, session, trajectory, result)
    assert rig.manager.inflight == {"r0": 1, "r1": 1}
    await rig.war_router.release_server(served, "first0", "first0", result)
    await rig.war_router.release_server(served, "first0", "first0", result)
    assert rig.manager.inflight == {served: 0, other: 1}
    assert len([record for record in caplog.records if "is not pending there" in record.message]) == 3


async def test_a_prompt_larger_than_any_cache_goes_to_an_engine_at_once(make_rig, fast):
    rig, client = await full_rig(make_rig)
    giant = ask(client, "giant", tokens=50_000)
    await until(lambda: sum(rig.served().values()) == 2)
    await ask_and_be_held(rig, client, "second")
    assert (await rig.war_router.step_metrics())["war/starts_oversize"] == 1
    ends(rig)
    client.end_trajectory("giant", failed=False)
    client.end_trajectory("first0", failed=False)
    giant.cancel()


async def test_identical_prompts_in_all_groups_and_groups_of_one(make_rig, fast):
    from verl_war.core.types import Turn, TurnResult

    rig = make_rig(4, settings=ADMISSION, kv_capacity_tokens=10_000)
    client = rig.client()
    await client.link._join()
    await until(lambda: all(replica.capacity_tokens for replica in rig.manager._fleet.replicas.values()))
    turns = [Turn(session_id=f"s{i}", trajectory_id=f"t{i}", group_id=f"g{i}", prompt_tokens=1000,
                  block_hashes=tuple(range(15))) for i in range(64)]  # fmt: skip
    grants = await asyncio.gather(*(client.link.acquire(turn) for turn in turns[:8]))
    assert len({replica_id for replica_id, _, _ in grants}) == 4, "they are spread although all share a prefix"
    for turn, (replica_id, _, _) in zip(turns, grants, strict=False):
        client.link.end_turn(turn, replica_id, TurnResult(completion_tokens=10, num_cached_tokens=0))
        client.end_trajectory(turn.trajectory_id, failed=False)
    await until(lambda: not rig.manager._trajectories)


async def test_a_hundred_thousand_at_once(make_rig):
    from verl_war.core.types import Turn
    from verl_war.integration.verl.router_protocol import pack_turn

    count = 100_000
    rig = make_rig(8, settings=ADMISSION, kv_capacity_tokens=20_000)
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    await until(lambda: all(replica.capacity_tokens for replica in rig.manager._fleet.replicas.values()))
    logging.disable(logging.WARNING)
    answers = []
    for start in range(0, count, 1000):
        turns = [Turn(session_id=f"s{i}", trajectory_id=f"t{i}", group_id=f"g{i // 8}", prompt_tokens=500)
                 for i in range(start, start + 1000)]  # fmt: skip
        answers += (await rig.war_router.exchange("o", [("turn", *pack_turn(turn)) for turn in turns]))[1]
    held = sum(hasattr(answer, "ticket") for answer in answers)
    assert held == rig.manager.held_turns and 0 < count - held < 1000
    rig.war_router._on_owner_dead("o", rig.war_router._owners.trajectories("o"))
    logging.disable(logging.NOTSET)
    assert rig.manager.held_turns == 0 and not rig.manager._trajectories and not rig.war_router._turns._admissions


def _level_of(beginning, caplog):
    return next(record.levelname for record in caplog.records if record.message.startswith(beginning))


async def test_a_router_that_goes_when_nobody_needs_it_is_no_warning(make_rig, fast, caplog):
    caplog.set_level("INFO", "verl_war")
    rig = make_rig(1)
    client = rig.client()
    await client.link._join()
    rig.router.die()
    await until(lambda: "router: up -> down" in caplog.text)
    assert _level_of("router: up -> down", caplog) == "INFO"


async def test_a_router_that_is_started_again_learns_settings_and_pool_from_a_client(make_rig, fast, caplog):
    from verl_war.integration.verl.router import WarRouter

    rig, client = await full_rig(make_rig, replicas=2)
    (held,) = await ask_and_be_held(rig, client, "second")
    later = LocalActor(FakeServer(kv_capacity_tokens=1000))
    await rig.router.remove_servers.remote(["r0"])
    client.end_trajectory("unknown", failed=True)  # any message brings the change of the pool along
    await until(lambda: client.link._pool.version == 1)
    await rig.router.add_servers.remote({"later": later})
    await asyncio.wait_for(held, 5)
    await until(lambda: client.link._pool.version == 2)

    (again,) = await ask_and_be_held(rig, client, "third")
    ends(rig)
    rig.router.die()
    fresh = WarRouter({"r0": rig.servers["r0"], "r1": rig.servers["r1"]}, {})  # Ray gives it its first arguments
    rig.router.revive(fresh)
    assert (await asyncio.wait_for(again, 10)).token_ids == [7, 8]
    assert set(await fresh.get_all_servers()) == {"r1", "later"}
    assert fresh._config == client.war_config
    assert _level_of("router: up -> down", caplog) == "WARNING" and "router: down -> up" in caplog.text
    client.end_trajectory("first0", failed=False)  # of a trajectory that it never heard of


async def test_messages_that_nobody_sends_are_refused(make_rig):
    rig = make_rig(1)
    await rig.war_router.join(rig.client().war_config, False, "o", None, None)
    with pytest.raises(ValueError, match="message 'hello' is unknown"):
        await rig.war_router.exchange("o", [("hello",)])


async def test_unconfigured_is_an_error_of_its_own(make_rig):
    from verl_war.integration.verl.failures import RouterNotConfiguredError

    rig = make_rig(1)
    with pytest.raises(RouterNotConfiguredError, match="before configure"):
        await rig.war_router.exchange("o", [])
