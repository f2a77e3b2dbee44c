"""With every feature off, WAR's router decides as verl's own balancer does, call for call."""

import random

import pytest

from verl_war.core.config import WarConfig
from verl_war.core.types import Turn, TurnResult

pytestmark = pytest.mark.upstream

SERVERS = {f"10.0.0.{i}:80": f"handle{i}" for i in range(5)}


def random_calls(rng, count):
    """A legal sequence of balancer calls: sessions of several turns, pool changes, phase switches."""
    inflight = []
    for number in range(count):
        kind = rng.random()
        if kind < 0.55 or not inflight:
            session = f"s{rng.randrange(60)}-{number // 400}"
            inflight.append(session)
            yield "acquire", session
        elif kind < 0.97:
            yield "release", inflight.pop(rng.randrange(len(inflight)))
        elif kind < 0.98:
            yield "remove", rng.choice(list(SERVERS))
        elif kind < 0.99:
            yield "add", rng.choice(list(SERVERS))
        else:
            yield "clear", None


class Pair:
    """verl's balancer and WAR's router, given the same calls."""

    def __init__(self, seed, full_determinism):
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from verl_war.integration.verl.router import WarRouter

        random.seed(seed)
        self.stock = GlobalRequestLoadBalancer(SERVERS, full_determinism=full_determinism)
        self.war = WarRouter(SERVERS, {})
        self.config = WarConfig(seed=seed), full_determinism
        self.taken = {}

    async def acquire(self, session):
        stock = self.stock.acquire_server(session)
        turn = Turn(session_id=session, trajectory_id=session, prompt_tokens=1)
        war = await self.war.acquire_server(session, turn=turn)
        self.taken.setdefault(session, []).append(stock[0])
        return stock, war[:2]

    async def release(self, session):
        replica_id = self.taken[session].pop()
        self.stock.release_server(replica_id)
        await self.war.release_server(replica_id, session, session, TurnResult())


@pytest.mark.parametrize("full_determinism", [False, True])
@pytest.mark.parametrize("seed", range(5))
async def test_same_calls_same_replicas(seed, full_determinism):
    pair = Pair(seed, full_determinism)
    await pair.war.configure(*pair.config)
    decisions = set()
    for call, argument in random_calls(random.Random(seed + 1), 4000):
        if call == "acquire":
            # A session has one turn at a time in verl; a second one before the first ended is not a legal call.
            if pair.taken.get(argument) or not pair.stock.get_all_servers():
                continue
            stock, war = await pair.acquire(argument)
            assert war == stock
            decisions.add(war[0])
        elif call == "release":
            if pair.taken.get(argument):
                await pair.release(argument)
        elif call == "clear":
            assert await pair.war.clear_sticky_cache() == pair.stock.clear_sticky_cache()
        elif call == "remove":
            pair.stock.remove_servers([argument])
            await pair.war.remove_servers([argument])
        elif argument not in pair.stock.get_all_servers():
            pair.stock.add_servers({argument: SERVERS[argument]})
            await pair.war.add_servers({argument: SERVERS[argument]})
        assert await pair.war.get_status() == pair.stock.get_status()
        assert await pair.war.get_total_inflight() == pair.stock.get_total_inflight()
    assert len(decisions) == len(SERVERS)


async def test_an_empty_pool_raises_what_verls_client_waits_for():
    pair = Pair(0, False)
    await pair.war.configure(*pair.config)
    await pair.war.remove_servers(list(SERVERS))
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await pair.war.acquire_server("s", turn=Turn(session_id="s", trajectory_id="s", prompt_tokens=1))


async def test_misuse_is_named():
    pair = Pair(0, False)
    turn = Turn(session_id="s", trajectory_id="s", prompt_tokens=1)
    with pytest.raises(RuntimeError, match="before configure"):
        await pair.war.acquire_server("s", turn=turn)
    await pair.war.configure(*pair.config)
    with pytest.raises(RuntimeError, match="configured already"):
        await pair.war.configure(*pair.config)
    with pytest.raises(RuntimeError, match="agent_loop_manager_class"):
        await pair.war.acquire_server("s")
