"""The real `WorkloadManager` in its settings: stock verl, WAR and the parts of WAR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_war.core.config import parse_war_config
from verl_war.core.manager import WorkloadManager
from verl_war.sim.policies.base import Policy, PolicyContext

CONTROLS = ("speculation", "scheduling", "admission")
"""Groups of settings that have a switch."""

STOCK: dict[str, Any] = {}
PLACEMENT: dict[str, Any] = {"scheduling": {"enabled": True}}
ADMISSION: dict[str, Any] = {"admission": {"enabled": True}}
WAR: dict[str, Any] = PLACEMENT | ADMISSION
"""What a user writes under `custom.war` for each arm."""


def workload_manager(context: PolicyContext, settings: Mapping[str, Any]) -> Policy:
    """A `WorkloadManager` with these settings, those of the context over them, and the simulation's seed.

    The context's settings of a control that the arm has switched off are left out.

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
    return WorkloadManager(parse_war_config(merged))
