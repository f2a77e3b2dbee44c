"""Registers WAR at verl's extension points. Nothing heavy is imported until verl imports its own modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from verl_war.integration.verl.settings import config_path


class WarSearchPath(SearchPathPlugin):
    """Lets stock `verl.trainer.main_ppo` find `rollout/war.yaml` and the other config groups of WAR."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_war", path="pkg://verl_war.config")


def register_war() -> None:
    """Make `rollout@actor_rollout_ref.rollout=war` work in this process."""
    Plugins.instance().register(WarSearchPath)
    OmegaConf.register_new_resolver("verl_war.config_path", config_path, replace=True)
    wrapt.register_post_import_hook(_register_replica, "verl.workers.rollout.replica")


def _register_replica(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register("vllm", _load_war_replica)


def _load_war_replica() -> Any:
    from verl_war.integration.verl.replica import WarReplica

    return WarReplica
