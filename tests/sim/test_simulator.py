import dataclasses

import pytest

from tests.sim.helpers import context, machine, spec
from verl_war.sim.bounds import ideal_makespan_s
from verl_war.sim.hardware import PROFILES
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.policies.routing import LeastLive, RoundRobin
from verl_war.sim.simulator import Fleet, Simulator
from verl_war.sim.workload import SHAPES, generate

CPU = PROFILES["cpu_2core"]

BEFORE = [
    ("stock", 8, 6.629581830000001, 4219, 0, 0),
    ("stock", 32, 28.789574430000012, 35297, 0, 0),
    ("war", 8, 6.629581830000001, 4219, 0, 0),
    ("thunderagent_like", 8, 6.477619679999999, 4219, 0, 0),
    ("thunderagent_like", 32, 26.454128150000003, 35233, 0, 0),
]


def simulate(specs, policy=LeastLive, hardware=None, replicas=2, **fleet):
    hardware = hardware or machine()
    return Simulator(
        Fleet(hardware=hardware, replicas=replicas, **fleet), specs, policy(context(specs, hardware, replicas))
    ).run()


def test_one_trajectory_by_hand():
    # Turn 1: 640 tokens of prefill and the first token 1 + 6.4 s, 9 steps; tool 2 s; turn 2: 739 tokens, of which
    # (640 + 9) // 64 = 10 blocks are cached, 109 to prefill: 1 + 1.09 s, 4 steps.
    outcome = simulate([spec("x", 640, [(10, 2.0, 99), (5, 9.0, 1000)], start_s=3.0)])
    assert outcome.makespan_s == pytest.approx(3 + 7.4 + 9 + 2 + (1 + 1.09) + 4)
    assert (outcome.turns, outcome.output_tokens, outcome.prompt_tokens) == (2, 15, 640 + 749)
    assert (outcome.prefill_tokens, outcome.cached_tokens) == (640 + 109, 640)
    assert outcome.kv_demand_peak == pytest.approx((749 + 5) / (2 * 6400))
    assert (outcome.held_s, outcome.moves, outcome.preemptions) == (0, 0, 0)
    assert sorted(outcome.busy_share)[0] == 0


def test_group_and_system_prompt_are_shared_on_a_replica():
    specs = [spec(name, 640, [(1, 0, 0)], group, 320, start) for name, group, start in
             (("a", "g", 0), ("b", "g", 20), ("c", "h", 40))]  # fmt: skip
    outcome = simulate(specs, replicas=1)
    # The second computes its last block, the third all but the system prompt.
    assert outcome.cached_tokens == 576 + 320


def test_moves_are_counted():
    specs = [spec("x", 640, [(2, 1.0, 64)] * 3)]
    assert simulate(specs, RoundRobin).moves == 2
    assert simulate(specs, LeastLive).moves == 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_does_the_same_work_and_repeats_itself(name):
    specs = generate(SHAPES["small"], 32, 1)
    run = [simulate(specs, POLICIES[name].variants[0].new_policy, CPU) for _ in range(2)]
    assert run[0] == run[1]
    assert run[0].turns == sum(len(item.turns) for item in specs)
    assert run[0].output_tokens == sum(item.output_tokens for item in specs)
    assert run[0].t50_s <= run[0].t90_s <= run[0].t99_s <= run[0].makespan_s
    assert run[0].makespan_s >= ideal_makespan_s(CPU, 2, specs)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_survives_a_replica_that_dies(name):
    specs = generate(SHAPES["small"], 24, 2)
    outcome = simulate(specs, POLICIES[name].variants[0].new_policy, CPU, 3, down_at_s={0: 4.0})
    assert outcome.output_tokens == sum(item.output_tokens for item in specs)
    assert outcome.failed_turns > 0


@pytest.mark.parametrize(
    "name,load,makespan_s,prefill_tokens,held_turns,moves",
    BEFORE,
)
def test_without_speculation_nothing_has_changed(name, load, makespan_s, prefill_tokens, held_turns, moves):
    """Numbers of the simulator before it knew drafts, of rules that do not depend on how step times are priced."""
    specs = generate(SHAPES["small"], 2 * load, 1)
    setting = context(specs, CPU, 2, seed=1)
    outcome = Simulator(Fleet(hardware=CPU, replicas=2), specs, POLICIES[name].variants[0].new_policy(setting)).run()
    assert outcome.makespan_s == pytest.approx(makespan_s, rel=1e-12)
    assert (outcome.prefill_tokens, outcome.held_turns, outcome.moves) == (prefill_tokens, held_turns, moves)
    assert (outcome.drafted_tokens, outcome.accepted_tokens) == (0, 0)


def test_slow_replica_and_mis_stated_capacity_reach_the_policy():
    seen = []

    class Watching(LeastLive):
        def on_snapshot(self, replica_id, snapshot, now_s):
            seen.append((replica_id, snapshot))
            return ()

    specs = generate(SHAPES["small"], 24, 2)
    outcome = simulate(specs, Watching, CPU, slowdown={0: 2.0}, misstated_capacity=1.5)
    assert {snapshot.kv_capacity_tokens for _, snapshot in seen} == {int(CPU.kv_capacity_tokens * 1.5)}
    for name in ("engine_steps", "computed_tokens", "busy_s", "kv_token_steps", "preemptions"):
        for replica in ("replica-0", "replica-1"):
            values = [getattr(snapshot, name) for which, snapshot in seen if which == replica]
            assert values == sorted(values), name
    assert any(snapshot.kv_usage > 0 for _, snapshot in seen)
    assert outcome.makespan_s > simulate(specs, LeastLive, CPU).makespan_s


def test_ideal_is_the_longest_trajectory_or_the_work():
    hardware = machine()
    alone = [spec("x", 640, [(10, 2.0, 0), (10, 0, 0)])]
    assert ideal_makespan_s(hardware, 2, alone) == pytest.approx(22.0)
    many = [dataclasses.replace(alone[0], trajectory_id=str(n), group_id=str(n)) for n in range(100)]
    # Prefill alone: 100 prompts of 6.4 s over 2 replicas.
    assert ideal_makespan_s(hardware, 2, many) > 320
    assert ideal_makespan_s(hardware, 2, many, {0: 2.0}) > ideal_makespan_s(hardware, 2, many)


class Refusing(LeastLive):
    def on_turn(self, turn, now_s):
        return ()


class Doubling(LeastLive):
    def on_turn(self, turn, now_s):
        return super().on_turn(turn, now_s) * 2


def test_policies_that_break_the_contract_are_named():
    with pytest.raises(RuntimeError, match="Refusing has held 1 turns .* for instance of .'x'."):
        simulate([spec("x")], Refusing)
    with pytest.raises(RuntimeError, match="Doubling started .* has not asked"):
        simulate([spec("x")], Doubling)


def test_bad_fleets_and_workloads():
    with pytest.raises(ValueError, match="trajectory x grows to 7010 tokens, but a replica of test holds 6400"):
        simulate([spec("x", prompt=7000)])
    with pytest.raises(ValueError, match="replicas=0"):
        simulate([spec("x")], replicas=0)
    with pytest.raises(ValueError, match="no trajectory"):
        simulate([])
    with pytest.raises(RuntimeError, match="all 1 replicas are down"):
        simulate([spec("x")], replicas=1, down_at_s={0: 1.0})


def test_a_later_step_starts_with_empty_caches_and_counts_from_its_own_beginning():
    hardware, fleet = machine(), Fleet(hardware=machine(), replicas=1)
    earlier = [spec("a", 640, [(10, 2.0, 99), (5, 9.0, 1000)]), spec("b", 960, [(3, 1.0, 64)] * 2, "h", 320)]
    specs = [spec("c", 640, [(10, 2.0, 99), (5, 9.0, 1000)], start_s=3.0), spec("d", 960, [(7, 0, 0)], "h", 320)]
    fresh = simulate(specs, replicas=1)
    policy = LeastLive(context(specs, hardware, 1))
    before = Simulator(fleet, earlier, policy)
    ended_s = before.run().makespan_s
    after = Simulator(fleet, specs, policy, before).run()
    assert ended_s > 10
    floats = [name for name, value in dataclasses.asdict(fresh).items() if isinstance(value, float)]
    for name in floats:
        assert getattr(after, name) == pytest.approx(getattr(fresh, name)), name
    assert dataclasses.replace(after, **{name: 0.0 for name in [*floats, "busy_share"]}) == dataclasses.replace(
        fresh, **{name: 0.0 for name in [*floats, "busy_share"]}
    )
    assert after.busy_share == pytest.approx(fresh.busy_share)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "upper_bound"])
def test_every_policy_goes_on_in_a_later_step(name):
    earlier = [
        dataclasses.replace(item, trajectory_id=f"e{item.trajectory_id}", group_id=f"e{item.group_id}")
        for item in generate(SHAPES["small"], 16, 3)
    ]
    specs = generate(SHAPES["small"], 16, 4)
    fleet = Fleet(hardware=CPU, replicas=2)
    policy = POLICIES[name].variants[0].new_policy(context(specs, CPU))
    before = Simulator(fleet, earlier, policy)
    before.run()
    outcome = Simulator(fleet, specs, policy, before).run()
    assert outcome.output_tokens == sum(item.output_tokens for item in specs)
    assert 0 < outcome.prefill_tokens < outcome.prompt_tokens
    assert outcome.makespan_s >= ideal_makespan_s(CPU, 2, specs)
