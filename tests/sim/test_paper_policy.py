"""The paper's scheduler on decisions worked out by hand."""

import pytest

from tests.sim.helpers import context, machine, placed, spec, up
from verl_war.core.types import Turn, TurnResult
from verl_war.sim.policies.paper import HIT_TARGET, SCHEDULE_THRESHOLD, WAIT_LIMIT_S, WINDOW_TURNS, PaperLike
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.simulator import Fleet, Simulator

PROMPT = tuple(range(10))


def turn(name, group="", hashes=()):
    return Turn(session_id=name, trajectory_id=name, group_id=group, prompt_tokens=640, block_hashes=tuple(hashes))


def loaded(*replicas, windows=1.0):
    """A fleet at its threshold whose windows are full: every turn waits."""
    policy = up(PaperLike(context(replicas=len(replicas))), *replicas)
    for name in replicas:
        policy._windows[name].size = windows
        policy.inflight[name] = SCHEDULE_THRESHOLD
    return policy


def end(policy, name, replica_id, cached, now_s=0.0):
    result = TurnResult(completion_tokens=10, num_cached_tokens=cached)
    return placed(policy.on_turn_end(name, name, replica_id, result, now_s))


def test_below_the_threshold_it_is_verls_rule():
    policy = up(PaperLike(context()), "a", "b")
    first = placed(policy.on_turn(turn("x"), 0.0))["x"]
    second = placed(policy.on_turn(turn("y"), 0.0))["y"]
    assert first != second
    end(policy, "x", first, 0)
    policy.inflight[first] = 5
    assert placed(policy.on_turn(turn("x"), 1.0)) == {"x": first}  # sticky, whatever the others have


@pytest.mark.parametrize(
    "change,better",
    [
        ({"waited_s": WAIT_LIMIT_S + 1, "turns": 90.0}, True),  # waiting outweighs turns
        ({"waited_s": WAIT_LIMIT_S, "turns": 11.0}, False),  # but counts nothing up to the limit
        ({"turns": 9.0, "hit": 0}, True),  # fewer turns outweigh a hit
        ({"turns": 11.0, "hit": 10}, False),
        ({"hit": 10, "inflight": 100}, True),  # a hit outweighs requests in flight
        ({"hit": 5, "inflight": 0}, True),  # then the fewest requests win
        ({"hit": 5, "inflight": 2}, False),
    ],
)
def test_terms_outweigh_those_that_follow(change, better):
    def score(waited_s=0.0, turns=10.0, hit=5, inflight=1):
        policy = up(PaperLike(context(replicas=1)), "a")
        policy._estimates["g"] = turns
        policy.inflight["a"] = inflight
        policy._view.record("a", PROMPT[:hit])
        return policy.score(turn("x", "g", PROMPT), "a", waited_s)

    assert (score(**change) > score()) is better


def test_a_full_window_holds_and_the_shortest_group_goes_first():
    policy = loaded("a")
    policy._estimates.update(long=30.0, short=3.0)
    assert placed(policy.on_turn(turn("l", "long"), 0.0)) == {}
    assert placed(policy.on_turn(turn("s", "short"), 0.0)) == {}
    policy.inflight["a"] = 1
    policy._waiting.update({f"w{i}": policy._waiting["l"] for i in range(SCHEDULE_THRESHOLD)})
    assert placed(policy.on_tick(1.0)) == {}  # a window of 1 is full
    policy._windows["a"].size = 2.0
    assert placed(policy.on_tick(2.0)) == {"s": "a"}


def test_a_turn_that_waited_too_long_goes_first():
    policy = loaded("a")
    policy._estimates.update(long=30.0, short=3.0)
    policy.on_turn(turn("l", "long"), 0.0)
    policy.on_turn(turn("s", "short"), WAIT_LIMIT_S)
    policy._windows["a"].size = SCHEDULE_THRESHOLD + 1.0
    assert next(iter(placed(policy.on_tick(WAIT_LIMIT_S + 1)))) == "l"


def test_estimates_follow_finished_siblings():
    policy = up(PaperLike(context()), "a", "b")
    assert policy.estimated_turns("g") == 10.0
    for _ in range(4):
        replica_id = placed(policy.on_turn(turn("x", "g"), 0.0))["x"]
        end(policy, "x", replica_id, 0)
    policy.on_trajectory_end("x", False, 0.0)
    assert policy.estimated_turns("g") == 0.5 * 4 + 0.5 * 10
    policy.on_trajectory_end("never began", False, 0.0)
    assert policy.estimated_turns("g") == 7.0


@pytest.mark.parametrize("cached,size", [(640 * HIT_TARGET, 9.0), (640 * HIT_TARGET - 1, 4.0)])
def test_the_window_grows_on_hits_and_halves_without(cached, size):
    policy = up(PaperLike(context(replicas=1)), "a")
    policy._windows["a"].size = 8.0
    for _ in range(WINDOW_TURNS):
        policy.on_turn(turn("x"), 0.0)
        end(policy, "x", "a", cached)
    assert policy._windows["a"].size == size


def test_an_idle_replica_stays_open_for_a_short_queue():
    policy = up(PaperLike(context(replicas=4)), "a", "b", "c", "d")
    policy.on_turn(turn("x"), 0.0)
    assert min(policy.window(name) for name in "abcd") == 1.0


def test_a_loaded_fleet_is_served_to_the_end():
    specs = [spec(f"t{i}", prompt=640, turns=[(10, 0.5, 64)] * 3, group=f"g{i // 8}") for i in range(64)]
    hardware = machine(kv_capacity_tokens=64 * 100)
    fleet = Fleet(hardware=hardware, replicas=2)
    policy = POLICIES["paper_like"].variants[0].new_policy(context(specs, hardware))
    outcome = Simulator(fleet, specs, policy).run()
    assert outcome.turns == 64 * 3
    assert outcome.held_turns > 0
