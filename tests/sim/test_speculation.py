"""Replicas that speculate: exact work, the true time of drafts, and the live planner's decisions."""

import dataclasses
import random
from functools import partial

import pytest

from tests.sim.helpers import context, machine, own, spec
from tests.sim.test_replica import drive
from verl_war.core.config import parse_war_config
from verl_war.core.manager import WorkloadManager
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.sim.bounds import ideal_makespan_s
from verl_war.sim.draft_world import ACCEPTANCE, DraftTexts, DraftWorld, TurnDrafts, TurnText
from verl_war.sim.fleet import Fleet
from verl_war.sim.hardware import PROFILES
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.policies.war import FIXED_LENGTHS
from verl_war.sim.replica import Replica
from verl_war.sim.request import Request
from verl_war.sim.runner import Study, run_study
from verl_war.sim.simulator import Simulator
from verl_war.sim.speculation import Batch, Draft, OracleDrafts, PlannedDrafts, StepDrafts
from verl_war.sim.workload import SHAPES, generate

CPU, H100 = PROFILES["cpu_2core"], PROFILES["h100_8b"]
NOTHING_FITS = DraftWorld(fresh_tokens=1e9, run_tokens=1, false_share=0.3, overrun_tokens=6)
"""Drafts are found, and all are wrong."""


def run(arm, specs, hardware, replicas, world, seed=1):
    variant = POLICIES[arm].variants[0] if isinstance(arm, str) else arm
    setting = context(specs, hardware, replicas, seed)
    texts = DraftTexts(world, specs, seed)
    new_drafter = None if variant.new_drafter is None else partial(variant.new_drafter, setting)
    fleet = Fleet(hardware=hardware, replicas=replicas, texts=texts, new_drafter=new_drafter)
    return Simulator(fleet, specs, variant.new_policy(setting)).run()


class Script:
    """Drafts what a list says, one step after another: length and accepted tokens of the request that came last."""

    plain_steps = 1
    switches = 0

    def __init__(self, *drafts):
        self.left = list(drafts)
        self.batches = []

    def propose(self, batch):
        self.batches.append(batch)
        length, accepted = self.left.pop(0) if self.left else (0, 0)
        request = list(batch.decoding)[-1]
        room = request.output_tokens - request.position(batch.step) - 1
        drafts = StepDrafts(batch, [Draft(request, 0, min(length, room), min(accepted, room))])
        return drafts if drafts.drafts else None

    def observe(self, batch, drafts, steps, seconds):
        self.seconds = seconds

    def on_end(self, output_tokens):
        self.ended_tokens = output_tokens


def test_accepted_tokens_take_no_step_of_their_own():
    hardware = machine(draft_step_s=0.5, draft_request_s=0.25, draft_token_s=0.125, per_pair_s=1e-4)
    replica = Replica(hardware, drafter=Script((4, 3), (0, 0), (2, 0)))
    ends = drive(replica, [(0.0, Request(1, own(1), 100, 10))])
    prefill_s = 1 + 100 * 0.01 + 1e-4 * 100 * 50.5
    four_s = 1 + 4 * 0.01 + 1e-4 * 4 * 102.5 + 0.5 + 0.25 + 4 * 0.125
    two_s = 1 + 2 * 0.01 + 1e-4 * 2 * (105 + 1.5) + 0.5 + 0.25 + 2 * 0.125  # after four tokens and one more
    assert ends == {1: pytest.approx(prefill_s + four_s + 1 + two_s + 3)}
    assert replica.counters.decode_tokens == 9
    assert replica.counters.engine_steps == 1 + 6
    assert (replica.counters.drafted_tokens, replica.counters.accepted_tokens) == (6, 3)
    assert replica.drafter.ended_tokens == 10


def test_context_of_accepted_tokens_stays_cached_and_its_blocks_are_given_back():
    second = Request(1, own(1), 200, 1)
    replica = Replica(machine(), drafter=Script(*[(20, 20)] * 4))
    drive(replica, [(0.0, Request(1, own(1), 100, 86)), (100.0, second)])
    assert second.cached_tokens == 128  # of 100 + 85
    assert replica.cache.used_blocks == 0
    assert replica.cache.available_blocks == 100
    assert replica._kv_tokens == 0


def test_drafts_take_only_blocks_that_are_free():
    replica = Replica(machine(kv_capacity_tokens=64 * 3), drafter=Script((0, 0), *[(20, 20)] * 4))
    # Contexts of 100 and 60 tokens fill three blocks; 60 + 21 need one more, free when the first request has ended.
    drive(replica, [(0.0, Request(1, own(1), 100, 5)), (0.0, Request(2, own(2), 60, 30))])
    assert replica.counters.drafted_tokens == 20
    assert replica.counters.engine_steps == 1 + 4 + 1 + (29 - 3 - 21)
    assert replica.counters.preemptions == 0


@pytest.mark.parametrize("free_blocks,budget", [(100, 24), (3, 24), (2, 0)])
def test_planned_drafts_leave_room_for_every_row(free_blocks, budget):
    """Two rows, of which each may need a block more than its draft fills."""
    request = Request(1, own(1), 100, 500, drafts=TurnDrafts(TurnText(ACCEPTANCE["peaked"], random.Random(1), 500), 7))
    request.generated = 1
    drafter = PlannedDrafts(SpeculationLimits(mode="always"))
    batch = Batch(2, 200, [request], step=0, free_blocks=free_blocks, is_steady=True, now_s=0.0)
    drafter.propose(batch)
    assert drafter.reading(1, 0.1).budget_tokens == budget


def test_who_comes_later_drafts_from_its_siblings():
    world = DraftWorld(fresh_tokens=2, run_tokens=15, false_share=0, overrun_tokens=1, own_share=0, earlier_share=0,
                       sibling_share=1.0)  # fmt: skip
    first, second = (spec(name, turns=[(200, 1, 0)], start_s=at_s) for name, at_s in (("a", 0.0), ("b", 900.0)))
    stranger = dataclasses.replace(second, group_id="other")
    accepted = [run("suffix_always", specs, machine(), 1, world).accepted_tokens for specs in
                ([first], [first, stranger], [first, second])]  # fmt: skip
    assert accepted[:2] == [0, 0]
    assert accepted[2] > 100


def test_batches_tell_the_planner_when_a_step_is_only_decoding():
    script = Script()
    replica = Replica(machine(), drafter=script)
    drive(replica, [(0.0, Request(1, own(1), 100, 6)), (3.5, Request(2, own(2), 100, 2))])
    seen = [(batch.requests, batch.is_steady) for batch in script.batches]
    # The second request's prefill, then both, then the first alone: only repetitions are steady.
    assert seen == [(1, False), (1, True), (2, False), (2, False), (1, False)]


def test_the_planner_is_left_alone_for_three_steps_while_nothing_is_drafted():
    limits = SpeculationLimits(max_batch=1)
    replica = Replica(machine(), drafter=PlannedDrafts(limits))
    looks = []
    look = replica.drafter.planner.lookup_limit
    replica.drafter.planner.lookup_limit = lambda *arguments: looks.append(arguments) or look(*arguments)
    drafts = TurnDrafts(TurnText(NOTHING_FITS, random.Random(1), 40), 0)
    drive(replica, [(0.0, Request(key, own(key), 100, 40, drafts=drafts)) for key in (1, 2)])
    # With the second one's prefill, then until a step of both is measured; from then on every fourth.
    assert [steps for *_, steps in looks[:4]] == [1, 1, 1, 1]
    assert {steps for *_, steps in looks[4:-1]} == {4}
    assert len(looks) == 4 + 9


@pytest.mark.parametrize("name", [name for name, arm in POLICIES.items() if arm.variants[0].new_drafter is not None])
@pytest.mark.parametrize("acceptance", ["peaked", "hot"])
def test_all_arms_do_the_same_work_and_repeat_themselves(name, acceptance):
    specs = generate(SHAPES["small"], 24, 1)
    first, again = (run(name, specs, CPU, 2, ACCEPTANCE[acceptance]) for _ in range(2))
    assert first == again
    assert first.output_tokens == sum(item.output_tokens for item in specs)
    assert first.accepted_tokens > 0
    assert first.makespan_s >= ideal_makespan_s(CPU, 2, specs, texts=DraftTexts(ACCEPTANCE[acceptance], specs, 1))


def study(acceptance, hardware=CPU):
    return Study(hardware=hardware, replicas=1, loads=(32.0,), policies=(POLICIES["best_fixed"],), seeds=1,
                 workload="small", acceptance=acceptance)  # fmt: skip


@pytest.mark.parametrize("draft_token_s", [0.0, 0.01])
def test_the_best_fixed_setting_is_the_fastest_of_them_all(draft_token_s):
    setting = study("mixed", hardware=dataclasses.replace(CPU, draft_token_s=draft_token_s))
    specs = generate(SHAPES["small"], 32, 1)
    outcomes = {
        variant: run(variant, specs, setting.hardware, 1, ACCEPTANCE["mixed"])
        for variant in POLICIES["best_fixed"].variants
    }
    assert len(outcomes) == 2 * 5 == setting.count_runs() - 1
    assert len({outcome.makespan_s for outcome in outcomes.values()}) > 5, "settings that change nothing"
    best = min(outcomes.values(), key=lambda outcome: outcome.makespan_s)
    assert (best.drafted_tokens > 0) == (draft_token_s == 0.0)
    *_, last = (result for result in run_study(setting) if result is not None)
    assert (last.policy, last.outcome) == ("best_fixed", best)


def test_fixed_drafts_are_never_longer_and_always_made():
    specs = generate(SHAPES["small"], 12, 1)
    for variant, length in zip(POLICIES["best_fixed"].variants, [0, *FIXED_LENGTHS] * 2, strict=True):
        outcome = run(variant, specs, CPU, 1, NOTHING_FITS)
        assert (outcome.drafted_tokens > 0) == (length > 0)
        if length:
            drafter = variant.new_drafter(context(specs, CPU, 1, 1))
            assert drafter.planner.limits.max_draft_tokens == length and drafter.planner.limits.mode == "always"


def test_where_nothing_is_drafted_settings_of_drafts_are_not_tried():
    assert study(None).count_runs() == 1 + 2
    assert {result.policy for result in run_study(study(None)) if result is not None} == {"stock", "best_fixed"}


def test_another_seed_is_another_text():
    specs = generate(SHAPES["small"], 8, 1)
    outcomes = [run("war_speculation_only", specs, CPU, 1, ACCEPTANCE["peaked"], seed) for seed in (1, 2)]
    assert outcomes[0].accepted_tokens != outcomes[1].accepted_tokens


@pytest.mark.parametrize("hardware", [CPU, H100], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("trajectories", [1, 8, 24])
def test_drafts_that_are_all_wrong_cost_hardly_anything(hardware, trajectories):
    shape = SHAPES["small"] if hardware is CPU else dataclasses.replace(SHAPES["default"], turns_mean=4.0)
    specs = generate(shape, trajectories, 1)
    base = run("stock", specs, hardware, 1, NOTHING_FITS).makespan_s
    assert run("war_speculation_only", specs, hardware, 1, NOTHING_FITS).makespan_s <= 1.02 * base


def test_suffix_decoding_pays_for_drafts_that_are_all_wrong():
    specs = generate(SHAPES["small"], 24, 1)
    base, always = (run(arm, specs, CPU, 1, NOTHING_FITS) for arm in ("stock", "suffix_always"))
    assert always.makespan_s > 1.1 * base.makespan_s
    assert always.drafted_tokens > 1000


@pytest.mark.parametrize("count", [1, 4])
def test_speed_up_at_low_load_is_what_the_formula_says(count):
    """Long turns without tools: tokens per step over the price of a step that drafts.

    Source: Leviathan et al. 2023, as in `core.speculation.expected_accepted`: speed-up = E * T(1) / T(1 + k).
    """
    world = dataclasses.replace(ACCEPTANCE["peaked"], own_share=0.5, earlier_share=0.5)
    specs = [spec(f"t{key}", prompt=1000, turns=[(4000, 0.0, 0)], group=f"g{key}") for key in range(count)]
    base = run("stock", specs, H100, 1, world)
    fast = run("war_speculation_only", specs, H100, 1, world)
    texts = DraftTexts(world, specs, 1)
    position, steps, drafted = 1, 0, 0
    drafts = TurnDrafts(texts.of(0, 0), 0)
    while position < 3999:
        _, length, accepted = drafts.look_up(position, min(24, 3999 - position))
        position, steps, drafted = position + accepted + 1, steps + 1, drafted + length
    tokens_per_step = 3999 / steps
    step_s = H100.step_s(count, 3000 * count)
    draft_s = H100.step_s(count, 3000 * count, round(count * drafted / steps)) + H100.draft_s(count, drafted / steps)
    expected = tokens_per_step * step_s / draft_s
    assert expected > 4
    assert base.makespan_s / fast.makespan_s == pytest.approx(expected, rel=0.2)


def test_a_fixed_threshold_loses_on_both_sides():
    """Where drafts are cheap at any batch, and where they never are."""
    shape = dataclasses.replace(SHAPES["default"], turns_mean=2.0, tool_s_mean=0.1)
    many = generate(shape, 48, 1)
    planned, threshold = (run(arm, many, H100, 1, ACCEPTANCE["peaked"]) for arm in ("war", "war_threshold_16"))
    assert threshold.makespan_s > 1.1 * planned.makespan_s
    dear = dataclasses.replace(CPU, draft_step_s=0.05)
    few = generate(SHAPES["small"], 12, 1)
    planned, threshold = (run(arm, few, dear, 1, ACCEPTANCE["hot"]) for arm in ("war", "war_threshold_16"))
    assert threshold.makespan_s > 1.3 * planned.makespan_s


def test_the_oracle_drafts_what_is_accepted_and_only_when_it_pays():
    specs = [spec("x", prompt=64, turns=[(500, 0.0, 0)])]
    arm = POLICIES["stock"].variants[0]._replace(new_drafter=lambda setting: OracleDrafts(setting.hardware))
    outcome = run(arm, specs, CPU, 1, ACCEPTANCE["peaked"])
    assert outcome.accepted_tokens == outcome.drafted_tokens > 200
    assert run(arm, specs, dataclasses.replace(CPU, draft_step_s=1.0), 1, ACCEPTANCE["peaked"]).drafted_tokens == 0


def test_the_manager_hears_of_drafts_once_a_second():
    heard = []

    class Listening(WorkloadManager):
        def on_speculation(self, replica_id, reading, now_s):
            heard.append((replica_id, reading, now_s))
            starts = super().on_speculation(replica_id, reading, now_s)
            self.yields = [replica.draft_yield.tokens_per_iteration for replica in self._fleet.replicas.values()]
            return starts

    managers = []

    def manager(setting):
        managers.append(Listening(parse_war_config({"seed": 1, "scheduling": {"enabled": True}})))
        return managers[-1]

    specs = generate(SHAPES["small"], 32, 1)
    listening = POLICIES["war"].variants[0]._replace(new_policy=manager)
    outcome = run(listening, specs, CPU, 2, ACCEPTANCE["peaked"])
    times = [now_s for name, _, now_s in heard if name == "replica-1"]
    assert times == pytest.approx([1.5 + second for second in range(len(times))])
    assert len(times) >= int(outcome.makespan_s) - 1
    assert heard[-1][1].accepted_tokens > 0
    assert max(managers[0].yields) > 1.2


def test_a_dead_replica_takes_its_drafts_along():
    specs = generate(SHAPES["small"], 24, 2)
    arm, setting = POLICIES["war"].variants[0], context(specs, CPU, 3, 1)
    fleet = Fleet(
        hardware=CPU,
        replicas=3,
        down_at_s={0: 4.0},
        texts=DraftTexts(ACCEPTANCE["peaked"], specs, 1),
        new_drafter=partial(arm.new_drafter, setting),
    )
    outcome = Simulator(fleet, specs, arm.new_policy(setting)).run()
    assert outcome.output_tokens == sum(item.output_tokens for item in specs)
    assert outcome.failed_turns > 0
