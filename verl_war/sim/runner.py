"""Policies over loads and seeds: which runs, and what they have in common."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_war.sim.bounds import ideal_makespan_s
from verl_war.sim.draft_world import DraftTexts, find_world
from verl_war.sim.fleet import Fleet, Outcome
from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.policies.base import PolicyContext
from verl_war.sim.policies.clairvoyant import Clairvoyant
from verl_war.sim.policies.registry import POLICIES, PolicySpec, Variant
from verl_war.sim.simulator import Simulator
from verl_war.sim.trace import TrajectorySpec, read_trace
from verl_war.sim.workload import SHAPES, SLOW_FACTOR, generate

BASE = "stock"
"""The policy that all others are compared with."""

SEEDS_APART = 1_000_003
"""Between the seeds of the steps of one run: no step is that of another seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What to simulate.

    Attributes:
        loads: Trajectories per replica.
        workload: A name of `SHAPES`, or the path of a trace, whose trajectories are the load.
        host_kv: Host tier of the policies that have one, as a multiple of the KV capacity.
        slowdown: Replica index -> how many times slower it is.
        misstated_capacity: Reported KV capacity over the true one.
        war_settings: Settings of `custom.war` to try.
        acceptance: A name of `ACCEPTANCE`, how predictable the text is; None for engines that do not speculate,
            whatever the policy.
        earlier_steps: Steps of other trajectories that each run begins with, as a training does: what counts is the
            step after them. Policies keep what they have learned; clairvoyant ones know all beforehand.
    """

    hardware: HardwareProfile
    replicas: int
    loads: tuple[float, ...]
    policies: tuple[PolicySpec, ...]
    seeds: int
    workload: str = "default"
    host_kv: float = 4.0
    slowdown: Mapping[int, float] = field(default_factory=dict)
    misstated_capacity: float = 1.0
    war_settings: Mapping[str, Any] = field(default_factory=dict)
    acceptance: str | None = None
    earlier_steps: int = 0

    @property
    def trace(self) -> Path | None:
        """The trace file, unless the workload is generated."""
        return None if self.workload in SHAPES else Path(self.workload)

    @property
    def all_slowdowns(self) -> dict[int, float]:
        """Slow replicas, the workload's own included."""
        own = {0: SLOW_FACTOR} if self.workload == "one_slow" else {}
        return own | dict(self.slowdown)

    def arms(self) -> tuple[PolicySpec, ...]:
        """The policies to run, the base first."""
        others = tuple(spec for spec in self.policies if spec.name != BASE)
        return (POLICIES[BASE], *others)

    def count_runs(self) -> int:
        """Simulations in all; what is the best of several takes several."""
        return len(self.loads) * self.seeds * sum(len(self.variants(spec)) for spec in self.arms())

    def variants(self, spec: PolicySpec) -> tuple[Variant, ...]:
        """What to run of a policy; where nothing is drafted, variants that differ in their drafts alone are one."""
        if self.acceptance is not None:
            return spec.variants
        return tuple({variant.new_policy: variant for variant in spec.variants}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy on one workload."""

    load: float
    seed: int
    policy: str
    ideal_s: float
    outcome: Outcome

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {"load": self.load, "seed": self.seed, "policy": self.policy, "ideal_s": self.ideal_s}
        return values | self.outcome.as_dict()


def run_study(study: Study) -> Iterator[Run | None]:
    """Run everything; yields None for a run that only contributes to a best-of, so that progress can be shown."""
    recorded = read_trace(study.trace) if study.trace is not None else None
    for load in study.loads:
        for seed in range(1, study.seeds + 1):
            count = max(1, round(load * study.replicas))
            trajectories = recorded or generate(SHAPES[study.workload], count, seed)
            texts = None if study.acceptance is None else DraftTexts(find_world(study.acceptance), trajectories, seed)
            ideal_s = ideal_makespan_s(study.hardware, study.replicas, trajectories, study.all_slowdowns, texts)
            work: tuple[int, int, int] | None = None
            for spec in study.arms():
                best: Outcome | None = None
                for variant in study.variants(spec):
                    if best is not None:
                        yield None
                    outcome = simulate(study, spec, variant, trajectories, seed, texts)
                    if best is None or outcome.makespan_s < best.makespan_s:
                        best = outcome
                assert best is not None
                done = (best.turns, best.output_tokens, best.prompt_tokens)
                assert work in (None, done), f"{spec.name} did other work than {BASE}: {done}, not {work}"
                work = done
                yield Run(load=load, seed=seed, policy=spec.name, ideal_s=ideal_s, outcome=best)


def simulate(
    study: Study,
    spec: PolicySpec,
    variant: Variant,
    trajectories: tuple[TrajectorySpec, ...],
    seed: int,
    texts: DraftTexts | None = None,
) -> Outcome:
    """One simulation, of one of the policy's variants; without `texts` nothing is drafted."""
    slowdown = study.all_slowdowns
    context = PolicyContext(study.hardware, study.replicas, seed, trajectories, slowdown, study.war_settings)
    fleet = Fleet(
        hardware=study.hardware,
        replicas=study.replicas,
        host_tokens=int(study.host_kv * study.hardware.kv_capacity_tokens) if spec.host_tier else 0,
        slowdown=slowdown,
        misstated_capacity=study.misstated_capacity,
        texts=texts,
        new_drafter=None if texts is None or variant.new_drafter is None else partial(variant.new_drafter, context),
    )
    policy = variant.new_policy(context)
    before: Simulator | None = None
    for step in range(0 if isinstance(policy, Clairvoyant) else study.earlier_steps):
        earlier = _earlier_step(study, len(trajectories), seed, step)
        known = None if texts is None else DraftTexts(texts.world, earlier, seed + (step + 1) * SEEDS_APART)
        before = Simulator(dataclasses.replace(fleet, texts=known), earlier, policy, before)
        before.run()
    return Simulator(fleet, trajectories, policy, before).run()


def _earlier_step(study: Study, count: int, seed: int, step: int) -> list[TrajectorySpec]:
    """Other trajectories of the same workload, with names of their own."""
    return [
        dataclasses.replace(
            spec, trajectory_id=f"earlier{step}-{spec.trajectory_id}", group_id=f"earlier{step}-{spec.group_id}"
        )
        for spec in generate(SHAPES[study.workload], count, seed + (step + 1) * SEEDS_APART)
    ]


def complete_cases(runs: Sequence[Run], arms: int) -> list[Run]:
    """The runs of those loads and seeds that all arms have run."""
    counts = Counter((run.load, run.seed) for run in runs)
    return [run for run in runs if counts[run.load, run.seed] == arms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy at one load, over the seeds. Ratios are stock's makespan over the policy's: over 1 is faster."""

    load: float
    policy: str
    ratio_mean: float
    ratio_least: float
    ratio_most: float
    makespan_s: float
    t90_s: float
    hit_rate: float
    prefill_tokens: float
    preemptions: float
    held_s: float
    moves: float
    kv_demand_peak: float
    accepted_share: float = 0.0
    """Share of the generated tokens that were accepted drafts."""
    acceptance_rate: float = 0.0
    regime_switches: float = 0.0


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """Means over the seeds, and the range of the ratio; `ideal` is the lower bound of the makespan."""
    base = {(run.load, run.seed): run.outcome for run in runs if run.policy == BASE}
    keys = dict.fromkeys((run.load, run.policy) for run in runs)
    summaries = []
    for load, policy in keys:
        mine = [run for run in runs if (run.load, run.policy) == (load, policy)]
        ratios = [base[load, run.seed].makespan_s / run.outcome.makespan_s for run in mine]
        summaries.append(_summary(load, policy, ratios, [run.outcome for run in mine]))
    for load in dict.fromkeys(run.load for run in runs):
        mine = [run for run in runs if (run.load, run.policy) == (load, BASE)]
        ratios = [run.outcome.makespan_s / run.ideal_s for run in mine]
        ideal = _summary(load, "ideal", ratios, [run.outcome for run in mine])
        ideal = dataclasses.replace(ideal, makespan_s=statistics.fmean(run.ideal_s for run in mine))
        # A bound has no schedule that these could be told of.
        ideal = dataclasses.replace(ideal, t90_s=0, hit_rate=0, prefill_tokens=0, preemptions=0, held_s=0, moves=0)
        ideal = dataclasses.replace(ideal, accepted_share=0, acceptance_rate=0, regime_switches=0)
        summaries.append(ideal)
    return summaries


def _summary(load: float, policy: str, ratios: list[float], outcomes: list[Outcome]) -> Summary:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in outcomes)

    return Summary(
        load=load,
        policy=policy,
        ratio_mean=statistics.fmean(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        makespan_s=mean("makespan_s"),
        t90_s=mean("t90_s"),
        hit_rate=mean("hit_rate"),
        prefill_tokens=mean("prefill_tokens"),
        preemptions=mean("preemptions"),
        held_s=mean("held_s"),
        moves=mean("moves"),
        kv_demand_peak=mean("kv_demand_peak"),
        accepted_share=mean("accepted_tokens") / mean("output_tokens"),
        acceptance_rate=mean("accepted_tokens") / max(1.0, mean("drafted_tokens")),
        regime_switches=mean("regime_switches"),
    )
