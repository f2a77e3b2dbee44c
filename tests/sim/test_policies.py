"""Each policy's rule on decisions worked out by hand."""

import pytest

from tests.sim.helpers import context, finish, machine, placed, reading, spec, turn, up
from verl_war.core.types import Reason
from verl_war.sim.policies.clairvoyant import Clairvoyant, Strategy
from verl_war.sim.policies.registry import POLICIES, find_policies
from verl_war.sim.policies.routing import (
    BlockView,
    DynamoLike,
    KvcAwareLike,
    LeastLive,
    Margin,
    RoundRobin,
    SmgCacheAware,
)
from verl_war.sim.policies.thunderagent import ThunderAgentLike

PROMPT = tuple(range(10))
"""Block hashes of a prompt of 640 tokens."""


def go(policy, name, **kwargs):
    return placed(policy.on_turn(turn(name, **kwargs), 0.0))[name]


def test_stock_is_the_real_workload_manager():
    policy = up(POLICIES["stock"].variants[0].new_policy(context()), "a", "b")
    policy.on_step_begin(1, 2, 0.0)
    (start,) = policy.on_turn(turn("x"), 0.0)
    assert start.reason is Reason.LEAST_INFLIGHT
    assert start.replica_id != go(policy, "y")


def test_round_robin_forgets_where_a_trajectory_was():
    policy = up(RoundRobin(context()), "a", "b")
    assert [go(policy, name) for name in "xxyx"] == ["a", "b", "a", "b"]


def test_least_live_counts_trajectories_in_their_tool():
    policy = up(LeastLive(context()), "a", "b")
    first = go(policy, "x")
    finish(policy, "x", first)
    assert go(policy, "y") != first
    assert go(policy, "x") == first
    policy.on_trajectory_end("y", False, 0.0)
    assert go(policy, "z") != first


def test_margin_stays_until_home_has_more_than_two_more():
    policy = up(Margin(context()), "a", "b")
    policy.home.update({"x": "a"})
    policy.live["a"] = 1
    policy.inflight.update({"a": 5, "b": 3})
    assert policy.choose(turn("x"), 0.0) == "a"
    policy.inflight.update({"a": 6, "b": 3})
    assert policy.choose(turn("x"), 0.0) == "b"


@pytest.mark.parametrize(
    "inflight,matched,expected",
    [
        ({"a": 40, "b": 8}, 10, "a"),  # spread of 32 is not over 32: longest prefix
        ({"a": 41, "b": 8}, 10, "b"),  # over 32 and over 1.1 times: shortest queue
        ({"a": 400, "b": 367}, 10, "a"),  # over 32 but not over 1.1 times
        ({"a": 0, "b": 0}, 6, "a"),  # 6 of 10 blocks match: more than half
        ({"a": 0, "b": 0}, 5, "b"),  # half is not more than half: smallest tree
    ],
)
def test_smg_cache_aware(inflight, matched, expected):
    policy = up(SmgCacheAware(context()), "a", "b")
    go_to_a = turn("earlier", hashes=PROMPT[:matched])
    policy.begun(go_to_a, "a")
    policy.inflight.update(inflight)
    assert policy.choose(turn("x", hashes=PROMPT), 0.0) == expected


def test_dynamo_adds_blocks_to_prefill_and_active_blocks():
    policy = up(DynamoLike(context()), "a", "b")
    policy.begun(turn("earlier", prompt=320, hashes=PROMPT[:5]), "a")
    assert policy.costs(turn("x", hashes=PROMPT)) == {"a": 5 + 5 + 10, "b": 10 + 0 + 10}
    policy.ended("earlier", "a", None)
    assert policy.costs(turn("x", hashes=PROMPT)) == {"a": 5 + 0 + 10, "b": 10 + 0 + 10}
    assert policy.choose(turn("x", hashes=PROMPT), 0.0) == "a"


def test_dynamo_with_temperature_draws_the_worse_one_sometimes():
    policy = up(DynamoLike(context(), temperature=1.0), "a", "b")
    policy.begun(turn("earlier", prompt=320, hashes=PROMPT[:5]), "a")
    policy.ended("earlier", "a", None)
    drawn = [policy.choose(turn("x", hashes=PROMPT), 0.0) for _ in range(300)]
    assert 50 < drawn.count("b") < 120  # exp(-1) / (1 + exp(-1)) = 0.27


def test_kvcaware_leaves_home_only_when_it_is_full():
    policy = up(KvcAwareLike(context()), "a", "b")
    policy.home["x"] = "a"
    policy.begun(turn("x", hashes=PROMPT), "a")
    policy.on_snapshot("a", reading(0.9), 0.0)
    policy.on_snapshot("b", reading(0.5), 0.0)
    assert policy.choose(turn("x", hashes=PROMPT), 0.0) == "a"
    policy.on_snapshot("a", reading(0.95), 1.0)
    assert policy.choose(turn("x", hashes=PROMPT), 0.0) == "b"
    # A prefix makes room: 640 tokens less are needed on a, 5760 - 0 on a against 6400 * 0.95 - 640 on b.
    policy.on_snapshot("a", reading(0.0), 1.0)
    policy.on_snapshot("b", reading(0.05), 1.0)
    assert policy.choose(turn("y", hashes=PROMPT), 0.0) == "a"


def test_block_view_matches_whole_prefixes_only():
    view = BlockView()
    view.record("a", PROMPT[:7])
    assert view.matched("a", PROMPT) == 7
    assert view.matched("a", (99, *PROMPT)) == 0
    assert view.matched("b", PROMPT) == view.matched("a", ()) == 0


@pytest.fixture
def thunder():
    """One replica of 6,400 tokens, no shared prompt."""
    policy = up(ThunderAgentLike(context(replicas=1)), "a")
    return policy


def test_thunderagent_starts_what_fits_and_queues_the_rest(thunder):
    assert placed(thunder.on_turn(turn("x", 3000), 0.0)) == {"x": "a"}
    assert placed(thunder.on_turn(turn("y", 3200), 0.0)) == {"y": "a"}  # 3,100 + 3,300 tokens fit exactly
    assert thunder.remaining("a") == 0
    assert placed(thunder.on_turn(turn("z", 10), 0.0)) == {}
    thunder.on_trajectory_end("x", False, 1.0)
    assert placed(thunder.on_tick(4.5)) == {}
    assert placed(thunder.on_tick(5.0)) == {"z": "a"}


def test_thunderagent_pauses_the_smallest_in_its_tool_then_marks_the_smallest_running(thunder):
    for name, tokens in (("x", 2000), ("y", 1500), ("z", 1400)):
        thunder.on_turn(turn(name, tokens), 0.0)
    finish(thunder, "x", "a", tokens=2500)  # 4,500 + 1,500 + 1,400 + 300 > 6,400
    assert thunder.remaining("a") == 6400 - 7700
    thunder.on_tick(5.0)
    # Only x is in its tool, although it is the largest; that is enough.
    assert [name for name, program in thunder._programs.items() if program.replica_id is None] == ["x"]
    assert placed(thunder.on_turn(turn("x", 4700), 6.0)) == {}
    finish(thunder, "y", "a", tokens=3400)
    thunder.on_turn(turn("y", 5000), 7.0)
    thunder.on_tick(10.0)  # y and z run: 5,000 + 1,400 + 200 > 6,400
    assert [name for name, program in thunder._programs.items() if program.marked] == ["z"]
    finish(thunder, "z", "a")
    assert thunder._programs["z"].replica_id is None


def test_thunderagent_resumes_begun_before_new_smallest_first_and_spreads_them():
    policy = up(ThunderAgentLike(context()), "a", "b")
    for name, tokens in (("w", 6300), ("v", 6300)):
        policy.on_turn(turn(name, tokens), 0.0)
    for name, tokens in (("new", 500), ("small", 2000), ("large", 6000)):
        assert placed(policy.on_turn(turn(name, tokens), 0.0)) == {}
    policy._programs["small"].turns = policy._programs["large"].turns = 2
    policy.on_trajectory_end("w", False, 1.0)
    policy.on_trajectory_end("v", False, 1.0)
    starts = placed(policy.on_tick(5.0))
    assert set(starts) == {"new", "small", "large"}
    assert starts["large"] != starts["small"] == starts["new"]


def test_thunderagent_counts_the_system_prompt_once():
    specs = [spec(name, prompt=2000, system=1000) for name in "xyz"]
    policy = up(ThunderAgentLike(context(specs, replicas=1)), "a")
    for name in "xyz":
        policy.on_turn(turn(name, 2000), 0.0)
    assert policy.remaining("a") == 6400 - 3 * 2100 + 2 * 1000


def clairvoyant(specs, replicas=("a",), **changes):
    strategy = Strategy(**({"fraction": 1.0} | changes))
    return up(Clairvoyant(context(specs, machine(kv_capacity_tokens=6400), len(replicas)), strategy), *replicas)


def test_clairvoyant_admits_the_longest_first_and_by_exact_fit():
    specs = [
        spec("running", prompt=2000, turns=[(100, 1.0, 0)], group="r"),
        spec("short", prompt=4000, turns=[(100, 1.0, 0)], group="s"),
        spec("long", prompt=4000, turns=[(100, 1.0, 0)] * 9, group="l"),
    ]
    policy = clairvoyant(specs)
    assert placed(policy.on_turn(turn("running", 2000), 0.0)) == {"running": "a"}
    assert policy._replicas["a"].working == 2100
    assert placed(policy.on_turn(turn("short", 4000), 0.0)) == {"short": "a"}  # 2,100 + 4,100 fit
    assert placed(policy.on_turn(turn("long", 4000), 0.0)) == {}
    finish(policy, "short", "a", 100)
    assert placed(policy.on_trajectory_end("short", False, 1.0)) == {"long": "a"}


def test_clairvoyant_pauses_the_one_with_the_least_left():
    specs = [
        spec("short", prompt=1000, turns=[(100, 1.0, 0)] * 3, group="s"),
        spec("long", prompt=1000, turns=[(100, 1.0, 4500)] * 9, group="l"),
    ]
    policy = clairvoyant(specs)
    for name in ("short", "long"):
        policy._join(policy._trajectories[name], policy._replicas["a"])
        policy.on_turn(turn(name, 1000), 0.0)
    finish(policy, "short", "a", 100)
    policy._trajectories["long"].running = False
    policy._pause(policy._replicas["a"])
    assert not policy._trajectories["short"].admitted
    assert policy._trajectories["long"].admitted


def test_registry_knows_all_names_and_explains_mistakes():
    assert len(find_policies("all")) == len(POLICIES) >= 13
    assert [item.name for item in find_policies("war,stock")] == ["war", "stock"]
    with pytest.raises(ValueError, match="'smg' is unknown.*expected all or some of stock"):
        find_policies("stock,smg")
    with pytest.raises(ValueError, match="did you mean 'margin'"):
        find_policies("margn")
    with pytest.raises(ValueError, match="given twice"):
        find_policies("war,war")
