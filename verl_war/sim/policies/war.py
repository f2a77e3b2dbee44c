"""The real `WorkloadManager` and `DraftPlanner` in their settings: stock verl, WAR and the parts of WAR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_war.core.config import WarConfig, parse_war_config
from verl_war.core.manager import WorkloadManager
from verl_war.sim.policies.base import Policy, PolicyContext
from verl_war.sim.speculation import Drafter, OracleDrafts, PlannedDrafts

CONTROLS = ("speculation", "scheduling", "admission")
"""Groups of settings that have a switch."""

STOCK: dict[str, Any] = {}
SPECULATION: dict[str, Any] = {"speculation": {"enabled": True}}
PLACEMENT: dict[str, Any] = {"scheduling": {"enabled": True}}
ADMISSION: dict[str, Any] = {"admission": {"enabled": True}}
SCHEDULING: dict[str, Any] = PLACEMENT | ADMISSION
WAR: dict[str, Any] = SPECULATION | SCHEDULING
"""What a user writes under `custom.war` for each arm."""

ALWAYS = {"enabled": True, "mode": "always", "max_step_draft_tokens": 65_536, "watchdog_acceptance": 0.0}
SUFFIX: dict[str, Any] = {"speculation": {**ALWAYS, "max_batch": 65_536}}
"""vLLM's suffix decoding: up to 24 tokens for every request and step (`suffix_decoding_max_tree_depth`, 0.27.1)."""

THRESHOLD_REQUESTS = 16
"""The paper's threshold (arXiv 2607.17299): a replica drafts with so many requests in its batch at most."""

THRESHOLD: dict[str, Any] = {"speculation": {**ALWAYS, "max_batch": THRESHOLD_REQUESTS}}
ALWAYS_LOADED: dict[str, Any] = {"regime": {"enter_kv_share": 0.0, "leave_kv_share": 0.0}}

HOLDING: dict[str, Any] = {"admission": {"enabled": True, "wait_for_thrash": False}}

FIXED: dict[str, Any] = SCHEDULING | ALWAYS_LOADED | HOLDING | {"guard": {"enabled": False}}
"""Placement and admission in force at any load."""

FIXED_LENGTHS = (2, 4, 8, 16)
"""Longest drafts of the fixed settings, from what pays in a large batch to what pays in a small one."""

SUFFIX_PER_MATCH = 1.0
"""Draft tokens per matching token: `suffix_decoding_max_spec_factor` of vLLM 0.27.1, and the paper's SuffixDecoding."""


def workload_manager(context: PolicyContext, settings: Mapping[str, Any]) -> Policy:
    """A `WorkloadManager` with these settings, those of the context over them, and the simulation's seed.

    Raises:
        ValueError: A setting is unknown or out of range.
    """
    return WorkloadManager(war_config(context, settings))


def threshold_manager(context: PolicyContext) -> Policy:
    """Over 16 trajectories per replica WAR's placement and admission, otherwise stock verl's placement.

    The paper switches while the step runs. Here the step's beginning decides, as its tail has nothing to hold.
    """
    is_loaded = len(context.trajectories) > THRESHOLD_REQUESTS * context.replicas
    return workload_manager(context, SCHEDULING | ALWAYS_LOADED | HOLDING if is_loaded else STOCK)


def planned_drafts(
    context: PolicyContext, settings: Mapping[str, Any], per_match: float | None = None
) -> Drafter | None:
    """The live drafter of one replica; None when the settings switch speculation off."""
    limits = war_config(context, settings).speculation
    return PlannedDrafts(limits, per_match) if limits.enabled else None


def fixed_drafts(length: int) -> dict[str, Any]:
    """Settings by which every request gets drafts of at most `length` tokens in every step."""
    return {"speculation": {**SUFFIX["speculation"], "max_draft_tokens": length}}


def oracle_drafts(context: PolicyContext) -> Drafter:
    """A drafter that knows what will be accepted."""
    return OracleDrafts(context.hardware)


def war_config(context: PolicyContext, settings: Mapping[str, Any]) -> WarConfig:
    """Settings of an arm with those of the context over them, but for controls that the arm has switched off.

    Raises:
        ValueError: A setting is unknown or out of range.
    """
    merged: dict[str, Any] = {"seed": context.seed}
    for group, values in {**dict.fromkeys(context.war_settings, {}), **settings}.items():
        extra = context.war_settings.get(group, {})
        if isinstance(extra, Mapping) and isinstance(values, Mapping):
            is_off = group in CONTROLS and not values.get("enabled", False)
            merged[group] = {**values, **({} if is_off else extra)}
        else:
            merged[group] = extra
    return parse_war_config(merged)
