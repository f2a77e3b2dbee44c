"""What holds whatever happens: generated events into the manager, the draft planner and the fleet's load."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.test_guard import Run
from tests.core.world import CONFIGS, KINDS, STEPS_S, World
from verl_war.core.config import RegimeConfig
from verl_war.core.draft_budget import expected_accepted, kv_limit
from verl_war.core.fleet import Conversation, Fleet
from verl_war.core.journal import manager_of, replay
from verl_war.core.regime import FleetLoad
from verl_war.core.speculation import DraftPlanner
from verl_war.core.speculation_limits import SpeculationLimits

CHECKED = settings(
    derandomize=True, max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
"""The same examples in every run, and no limit of time: a slow machine finds what a fast one finds."""

NUMBERS = st.integers(0, 2**12)
EVENTS = st.lists(
    st.tuples(st.integers(0, len(KINDS) - 1), NUMBERS, NUMBERS, st.integers(0, len(STEPS_S) - 1)),
    min_size=20, max_size=60,
)  # fmt: skip


def random_events(seed, count=200):
    rng = random.Random(seed)
    return [(rng.randrange(len(KINDS)), *rng.choices(range(2**12), k=2), rng.randrange(len(STEPS_S)))
            for _ in range(count)]  # fmt: skip


def world_of(config, replicas):
    world = World(CONFIGS[config])
    for number in range(replicas):
        world.up(number, 0)
        world.snapshot(number, 20)
    return world


@pytest.mark.parametrize("config", CONFIGS)
@CHECKED
@given(replicas=st.integers(0, 3), events=EVENTS)
def test_turns_start_once_or_wait_and_all_accounts_add_up(config, replicas, events):
    world = world_of(config, replicas)
    world.play(events)
    world.wind_up()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_long_runs(config, seed):
    world = world_of(config, 2)
    world.play(random_events(seed, 1_000))
    world.wind_up()
    if config not in ("off", "scheduling", "all, waiting for thrash"):  # some of these worlds never thrash
        assert any(start["held_s"] > 0 for record in world.records for start in record.get("starts", []))


@pytest.mark.parametrize("config", CONFIGS)
@CHECKED
@given(replicas=st.integers(0, 3), events=EVENTS)
def test_the_same_decisions_come_out_of_the_journal(config, replicas, events):
    world = world_of(config, replicas)
    world.play(events)
    first, *records = (json.loads(line) for line in world.journal())
    manager = manager_of(first)
    for record in records:
        assert replay(manager, record) == (record.get("starts", []), record.get("error", ""))
    assert manager.report() == world.manager.report()


REPLAY = "import sys; from pathlib import Path; from verl_war.replay.decisions import replay_file\n" \
         "for name in sys.argv[1:]: assert not replay_file(Path(name)).difference, replay_file(Path(name))"  # fmt: skip


def test_the_same_decisions_come_out_of_files_in_a_process_that_hashes_strings_differently(tmp_path):
    files = []
    for number, config in enumerate(CONFIGS):
        world = world_of(config, 3)
        world.play(random_events(number, 400))
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("\n".join(world.journal()) + "\n")
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", REPLAY, *files], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


MODES = ("auto", "auto", "auto", "always", "off")
BATCHES = (0, 1, 2, 7, 8, 33, 300)
PLAIN_S = (0.01, 0.02, 1e-9, 10.0)
DRAFT_S = ((0.0, 0.0), (0.0, 1e-4), (0.01, 0.0), (0.1, 0.1))
"""What drafts add to a step, and what each of their tokens adds."""


class Engine:
    """An engine that asks a `DraftPlanner` before every step."""

    def __init__(self, limits):
        self.planner = DraftPlanner(limits, ("own", "global"), (1, 8))
        self.now_s = self.asked_s = 0.0
        self.switched_s = -math.inf
        self.changes = 0

    def step(self, rows, plain_s, draft_s, accepted, found):
        """One step: each draft is as long as was allowed or as `found` says, and `accepted` of it is right."""
        planner, limits = self.planner, self.planner.limits
        before, switches = planner.regime, planner.switches
        self.asked_s = self.now_s
        limit = planner.lookup_limit(rows, 500.0 * rows, self.now_s)
        cap = min(limits.max_draft_tokens, max(1, limits.max_step_draft_tokens // max(1, rows)))
        assert 0 <= limit <= (cap if 0 < rows <= limits.max_batch else 0)
        if limits.mode == "off":
            assert limit == 0 and planner.regime == "high"
        is_gain = limits.mode == "auto" and planner.regime == "low"
        if is_gain:
            pays = 0 < planner.gain >= 0.5 * limits.min_gain
            assert planner.is_drafting == pays and (pays or not limit), "drafts that do not pay"
        lengths = [min(limit or 8, (found + row) % 9) for row in range(rows)]
        kinds = [(found + row) % 12 if length else -1 for row, length in enumerate(lengths)]
        planner.acceptance.observe_mix(Counter(kinds), rows)
        if not limit:
            for kind, length in zip(kinds, lengths, strict=True):
                if kind >= 0:
                    planner.acceptance.observe(kind, length, min(length, accepted))
            lengths, kinds = [], []
        else:
            lengths = planner.allocate(rows, 500.0 * rows, kinds, lengths)
            assert len(lengths) == rows and sum(lengths) <= max(rows, limits.max_step_draft_tokens)
            assert all(0 <= length <= min(limit, (found + row) % 9) for row, length in enumerate(lengths))
            assert not is_gain or not any(lengths) or self.pays(rows, kinds, lengths), "drafts that do not pay together"
        for kind, length in zip(kinds, lengths, strict=True):
            if length:
                planner.observe_draft(kind, length, min(length, accepted))
        accepted_tokens = sum(min(length, accepted) for length in lengths)
        drafting = sum(length > 0 for length in lengths)
        any_s, token_s = draft_s
        seconds = plain_s + (any_s + token_s * sum(lengths) if drafting else 0.0)
        planner.observe_step(rows=rows, kv_tokens=500.0 * rows, drafting_rows=drafting, draft_tokens=sum(lengths),
                             accepted_tokens=accepted_tokens, seconds=seconds)  # fmt: skip
        self.now_s += seconds
        self.check(before, switches)

    def pays(self, rows, kinds, lengths):
        """Whether the tokens per second that these drafts promise are more than those without."""
        rates = self.planner.acceptance.rates
        drafts = [pair for pair in zip(kinds, lengths, strict=True) if pair[1]]
        accepted = sum(expected_accepted(*rates(kind), length) for kind, length in drafts)
        cost = self.planner.step_time.cost(rows, 500.0 * rows)
        seconds = cost.plain_s + cost.extra_s(len(drafts), sum(lengths))
        return (rows + accepted) * cost.plain_s > rows * seconds * (1 - 1e-9)  # summed in another order

    def check(self, before, switches):
        planner, limits = self.planner, self.planner.limits
        if planner.regime != before:
            assert planner.switches == switches + 1
            is_told = limits.mode != "auto" or planner.watchdog.reason
            assert is_told or self.asked_s - self.switched_s >= limits.dwell_s, "the regime flaps"
            self.switched_s = self.asked_s
            self.changes += not is_told
        assert math.isfinite(planner.gain) and planner.gain >= 0
        for kind in range(12):
            assert all(
                0 <= rate < 1 or rate == 1 == rates[0] for rates in [planner.acceptance.rates(kind)] for rate in rates
            )
        for rows in BATCHES[1:]:
            cost = planner.step_time.cost(rows, 500.0 * rows)
            assert cost is None or all(0 <= value < math.inf for value in dataclasses.astuple(cost))

    def play(self, events):
        """Steps by what they are and how many of them, changes of the limits' mode or of the weights, and pauses."""
        for event in events:
            if isinstance(event, tuple):
                *step, times = event
                for _ in range(times):
                    self.step(*step)
            elif event == "weights":
                self.planner.on_weights_updated()
            elif isinstance(event, float):
                self.now_s += event
            else:
                self.planner.set_limits(dataclasses.replace(self.planner.limits, mode=event))
                self.switched_s = -math.inf  # to be told is another matter


STEP = st.tuples(st.sampled_from(BATCHES), st.sampled_from(PLAIN_S), st.sampled_from(DRAFT_S), st.integers(0, 8),
                 st.integers(0, 11), st.integers(1, 40))  # fmt: skip
CHANGE = st.one_of(st.sampled_from(MODES), st.just("weights"), st.floats(-50.0, 50.0))


@CHECKED
@given(
    events=st.lists(st.one_of(STEP, STEP, STEP, CHANGE), min_size=6, max_size=15),
    dwell_s=st.sampled_from((0.0, 0.5, 10.0)),
    min_gain=st.sampled_from((0.0, 0.03, 2.0)),
    max_batch=st.sampled_from((4, 256)),
    max_step_draft_tokens=st.sampled_from((1, 40, 1024)),
)
def test_drafts_keep_their_limits_and_the_regime_its_dwell(events, **limits):
    Engine(SpeculationLimits(probe_interval_s=0.1, **limits)).play(events)


@pytest.mark.parametrize("dwell_s", [0.1, 1.0])
@pytest.mark.parametrize("min_gain", [0.03, 1.0])
def test_long_runs_of_drafts(dwell_s, min_gain):
    rng = random.Random(1)
    limits = SpeculationLimits(probe_interval_s=0.1, dwell_s=dwell_s, min_gain=min_gain, watchdog_retry_s=0.0)
    engine = Engine(limits)
    costs = ((0.0, 1e-4), (0.005, 1e-4), (0.005, 0.002))
    for _ in range(150):
        rows, accepted = rng.choice((0, 1, 1, 2, 2, 7, 33, 300)), rng.choice((0, 1, 2, 2, 8))
        engine.play([(rows, 0.01, rng.choice(costs), accepted, rng.randrange(12), rng.randrange(1, 60))])
    assert engine.changes >= 6, "the regime stands still whatever happens"


@CHECKED
@given(wanted=st.integers(0, 64), rows=st.integers(1, 300), free_blocks=st.integers(0, 2_000), block=st.integers(1, 64))
def test_drafts_fit_in_the_free_blocks(wanted, rows, free_blocks, block):
    length = kv_limit(wanted, rows, free_blocks * block, block)
    assert 0 <= length <= wanted
    assert rows * math.ceil(length / block) <= free_blocks


@CHECKED
@given(
    seed=st.integers(0, 99),
    phases=st.lists(st.tuples(st.floats(-0.7, 0.7), st.integers(1, 40), st.booleans()), max_size=5),
    last=st.sampled_from((-0.7, 0.7)),
)
def test_trials_stand_alone_and_the_faster_rule_is_found_in_the_end(seed, phases, last):
    run, was_trial = Run(0.0, 0.02, seed, first_trial_steps=2, max_trial_steps=8), False
    for gain, steps, is_loaded in [*phases, (last, 400, True)]:
        run.gain = gain
        for _ in range(steps):
            was_losing, trials = run.guard.is_losing, run.guard.trials
            run.steps(1, is_loaded)
            assert not (was_trial and run.guard.was_trial), "two trials in a row"
            was_trial = run.guard.was_trial
            assert not is_loaded or run.in_force[-1] == (was_losing == was_trial)
            assert run.guard.is_losing == was_losing or run.guard.trials == trials + 1, "changed without a trial"
    assert run.guard.is_losing == (last < 0)


LOADS = ("admit", "withdraw", "turn", "begin", "end", "replica", "look", "look")


@CHECKED
@given(
    enter=st.floats(0.01, 3.0),
    share=st.floats(0.1, 1.0),
    events=st.lists(
        st.tuples(st.sampled_from(LOADS), st.integers(0, 5_000), st.sampled_from(STEPS_S), st.booleans()),
        min_size=20, max_size=60,
    ),
)  # fmt: skip
def test_the_fleet_is_loaded_when_its_kv_is_and_for_the_dwell_at_least(enter, share, events):
    play_load(enter, share, events)


def test_a_long_run_of_the_fleets_load():
    rng = random.Random(1)
    # A conversation ends as often as one begins; nothing is announced, which would outweigh it.
    names = (*("admit", "withdraw") * 6, "turn", "end", "replica", "look")
    events = [(rng.choice(names), rng.randrange(5_000), rng.choice((0.1, 1.0, 5.0)), rng.random() < 0.1)
              for _ in range(5_000)]  # fmt: skip
    assert play_load(0.8, 0.5, events) > 20, "it hardly ever changes"


def play_load(enter, share, events):
    """Lets events happen to a fleet; returns how often its regime changed."""
    fleet, now_s, changed_s, changes = Fleet(), 0.0, -math.inf, 0
    load = FleetLoad(RegimeConfig(enter_kv_share=enter, leave_kv_share=enter * share, dwell_s=10.0), fleet)
    for kind, number, step_s, is_holding in events:
        now_s += step_s
        replicas = list(fleet.replicas.values())
        if kind == "replica":
            fleet.add_replica(f"r{number % 3}").capacity_tokens = number
        elif kind == "admit" and replicas and f"s{number}" not in fleet.conversations:
            conversation = fleet.conversations[f"s{number}"] = Conversation(f"s{number}", "t", "", False, now_s)
            fleet.resize(conversation, number, number)
            fleet.admit(conversation, replicas[number % len(replicas)], number, 0)
        elif kind == "withdraw" and fleet.conversations:
            fleet.withdraw(fleet.conversations.pop(next(iter(fleet.conversations))))
        elif kind == "turn":
            load.on_turn(number, is_holding)
        elif kind == "begin":
            load.on_step_begin(number % 50)
        elif kind == "end":
            load.on_step_end()
        before = load.regime
        change = load.update(is_holding, now_s)
        needs = sum(replica.working_set_tokens for replica in replicas)
        trusted = sum(replica.trusted_tokens for replica in replicas)
        assert not needs or needs / trusted < enter or load.regime == "high"
        assert (change is not None) == (load.regime != before) and math.isfinite(load.load_peak)
        if change is not None:
            assert change.new == "high" or (not is_holding and now_s - changed_s >= 10.0), "the regime flaps"
            assert change.new == "high" or not needs or needs / trusted < enter * share, "it is loaded still"
            changes, changed_s = changes + 1, now_s
    assert load.take_counts()[0] == changes and load.take_counts() == (0, 0.0)
    return changes
