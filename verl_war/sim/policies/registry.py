"""All policies of the simulator by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from verl_war.sim.policies import war
from verl_war.sim.policies.base import Policy, PolicyContext
from verl_war.sim.policies.clairvoyant import Clairvoyant, Strategy
from verl_war.sim.policies.paper import PaperLike
from verl_war.sim.policies.routing import DynamoLike, KvcAwareLike, LeastLive, Margin, RoundRobin, SmgCacheAware
from verl_war.sim.policies.thunderagent import ThunderAgentLike
from verl_war.sim.speculation import Drafter

Factory = Callable[[PolicyContext], Policy]
DrafterFactory = Callable[[PolicyContext], Drafter | None]


class Variant(NamedTuple):
    """Something to run.

    Attributes:
        new_policy: Makes the policy of the fleet.
        new_drafter: Makes the drafter of one replica where text can be drafted; None for engines without speculation.
    """

    new_policy: Factory
    new_drafter: DrafterFactory | None = None


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy that can be simulated.

    Attributes:
        variants: What to run; with several, the one with the least makespan counts.
        host_tier: Whether its replicas keep evicted KV in host memory.
        only_drafts: It is nothing but its drafts: pointless where no text can be drafted.
    """

    name: str
    summary: str
    variants: tuple[Variant, ...]
    host_tier: bool = False
    only_drafts: bool = False


STRATEGIES = (
    Strategy(fraction=0.8),
    Strategy(fraction=0.88),
    Strategy(fraction=0.95),
    Strategy(fraction=1.0, planned=True),
)
"""Clairvoyant schedules that the upper bound is the best of, with stock verl's and WAR's own: longest first at
0.8 to 0.95 of the KV wins from 64 per replica on, work spread beforehand below."""


def _manager(settings: dict[str, Any]) -> Factory:
    return partial(war.workload_manager, settings=settings)


def _drafts(settings: dict[str, Any], per_match: float | None = None) -> DrafterFactory:
    return partial(war.planned_drafts, settings=settings, per_match=per_match)


def _upper_bound() -> tuple[Variant, ...]:
    schedules: list[Factory] = [partial(Clairvoyant, strategy=strategy) for strategy in STRATEGIES]
    schedules += map(_manager, (war.STOCK, war.SCHEDULING))
    return tuple(Variant(schedule, war.oracle_drafts) for schedule in schedules)


def _one(new_policy: Factory, new_drafter: DrafterFactory | None = None) -> tuple[Variant, ...]:
    return (Variant(new_policy, new_drafter),)


def _fixed() -> tuple[Variant, ...]:
    """Scheduling off and on, each without drafts and with every draft length: nothing depends on the load."""
    drafters = (None, *(_drafts(war.fixed_drafts(length)) for length in war.FIXED_LENGTHS))
    return tuple(Variant(policy, drafter) for policy in map(_manager, (war.STOCK, war.FIXED)) for drafter in drafters)


_SPECS = (
    PolicySpec("stock", "stock verl: sticky, first turn to the fewest requests in flight", _one(_manager(war.STOCK))),
    PolicySpec("round_robin", "every turn to the next replica", _one(RoundRobin)),
    PolicySpec("least_live", "sticky, first turn to the fewest live trajectories", _one(LeastLive)),
    PolicySpec("margin", "verl pull request 7435: leave home when it has over 2 more in flight", _one(Margin)),
    PolicySpec("smg_cache_aware", "SGLang model gateway: longest prefix unless imbalanced", _one(SmgCacheAware)),
    PolicySpec("dynamo_like", "NVIDIA Dynamo: blocks to prefill + active blocks", _one(DynamoLike)),
    PolicySpec("kvcaware_like", "uni-agent: home until its KV is full, then most KV left", _one(KvcAwareLike)),
    PolicySpec("thunderagent_like", "ThunderAgent: pause and resume programs by KV", _one(ThunderAgentLike)),
    PolicySpec("paper_like", "WAR's paper: four-term score, AIMD window", _one(PaperLike)),
    PolicySpec(
        "war",
        "WAR: priced placement, admission by KV fit, drafts by price",
        _one(_manager(war.WAR), _drafts(war.WAR)),
    ),
    PolicySpec("war_scheduling_only", "WAR without drafts", _one(_manager(war.SCHEDULING))),
    PolicySpec("war_placement_only", "WAR without admission and drafts", _one(_manager(war.PLACEMENT))),
    PolicySpec("war_admission_only", "WAR without priced placement and drafts", _one(_manager(war.ADMISSION))),
    PolicySpec(
        "war_speculation_only",
        "stock verl with WAR's drafts",
        _one(_manager(war.STOCK), _drafts(war.SPECULATION)),
        only_drafts=True,
    ),
    PolicySpec(
        "suffix_always",
        "stock verl with vLLM's suffix decoding",
        _one(_manager(war.STOCK), _drafts(war.SUFFIX, war.SUFFIX_PER_MATCH)),
        only_drafts=True,
    ),
    PolicySpec(
        "war_threshold_16",
        "WAR with the paper's threshold: suffix decoding up to 16 requests, scheduling above",
        _one(war.threshold_manager, _drafts(war.THRESHOLD, war.SUFFIX_PER_MATCH)),
    ),
    PolicySpec("stock_offload", "stock verl, KV offloaded to the host", _one(_manager(war.STOCK)), host_tier=True),
    PolicySpec(
        "war_offload",
        "WAR without drafts, KV offloaded to the host",
        _one(_manager(war.SCHEDULING)),
        host_tier=True,
    ),
    PolicySpec(
        "best_fixed",
        "best of the settings that stay: scheduling off or on, drafts never or always, of 2, 4, 8 or 16 tokens",
        _fixed(),
    ),
    PolicySpec(
        "upper_bound",
        "best of several schedules that know all turns and drafts to come",
        _upper_bound(),
    ),
)

POLICIES: dict[str, PolicySpec] = {spec.name: spec for spec in _SPECS}


def find_policies(names: str) -> list[PolicySpec]:
    """The policies of a comma-separated list; `all` stands for all.

    Raises:
        ValueError: A name is unknown or given twice.
    """
    if names == "all":
        return list(POLICIES.values())
    found: list[PolicySpec] = []
    for name in names.split(","):
        if name not in POLICIES:
            close = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"--policies: {name!r} is unknown{hint}; expected all or some of {', '.join(POLICIES)}")
        if POLICIES[name] in found:
            raise ValueError(f"--policies: {name!r} is given twice; name every policy once")
        found.append(POLICIES[name])
    return found
