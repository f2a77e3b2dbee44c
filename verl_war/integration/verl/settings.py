"""Reading WAR's settings out of verl's configuration, and refusing at launch what cannot work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_war.core.config import WarConfig, parse_war_config
from verl_war.core.config_parsing import ROOT_KEY
from verl_war.integration.profile_file import check_profile, read_profile

TRAINER_MODES = ("sync", "colocate_async", "separate_async")
_AGENT_LOOP_MANAGER = "verl_war.integration.verl.agent_loop.WarAgentLoopManager"


def config_path(name: str) -> str:
    """Absolute path of a file in `verl_war/config`, for keys of verl that take a path.

    Raises:
        ValueError: There is no such file.
    """
    path = Path(str(files("verl_war"))) / "config" / name
    if not path.is_file():
        raise ValueError(f"verl_war.config_path={name!r} does not exist in {path.parent}; reinstall verl_war")
    return str(path)


def war_settings(config: DictConfig) -> dict[str, Any] | None:
    """`rollout.custom.war` of verl's whole configuration as plain data; None when WAR was not selected."""
    return rollout_war_settings(OmegaConf.select(config, "actor_rollout_ref.rollout"))


def rollout_war_settings(rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same from verl's rollout section alone (a DictConfig or verl's `RolloutConfig`; both are mappings)."""
    war = (rollout.get("custom") or {}).get("war")
    return OmegaConf.to_container(war, resolve=True) if isinstance(war, DictConfig) else war


def check_launch(config: DictConfig) -> WarConfig | None:
    """Validate a run that selected WAR; None when it did not.

    Raises:
        ValueError: Something in the configuration is wrong or contradicts WAR. The message states
            the key, its value, what is allowed and what to do.
    """
    settings = war_settings(config)
    if settings is None:
        _refuse_half_a_war(config.actor_rollout_ref.rollout)
        return None
    war = parse_war_config(settings)
    rollout = config.actor_rollout_ref.rollout
    _require("actor_rollout_ref.rollout.name", rollout.get("name"), ("vllm",), "WAR drives vLLM")
    _require("trainer.use_v1", config.trainer.get("use_v1"), (True,), "WAR plugs into the v1 trainer")
    _require("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, TRAINER_MODES, "choose one of them")
    _require(
        "actor_rollout_ref.rollout.router_config_path",
        rollout.router_config_path,
        (config_path("war_router.yaml"),),
        "remove your override, or use rollout@actor_rollout_ref.rollout=rollout with your own router",
    )
    _require(
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        rollout.agent.get("agent_loop_manager_class"),
        (_AGENT_LOOP_MANAGER,),
        "remove your override; WAR works with any agent loop but needs its own manager",
    )
    disaggregated = OmegaConf.select(rollout, "disaggregation.enabled", default=False)
    _require(
        "actor_rollout_ref.rollout.disaggregation.enabled", disaggregated, (False,), "WAR routes whole replicas only"
    )
    if war.speculation.enabled:
        _check_speculation(rollout, war.speculation.history_dir)
    _check_model_path(config.actor_rollout_ref.model.path)
    profile = read_profile(war.profile_path)
    if profile is not None:
        check_profile(profile, config.actor_rollout_ref.model.path, rollout.tensor_model_parallel_size)
    _check_lengths(config)
    return war


def _require(key: str, value: Any, allowed: tuple[Any, ...], remedy: str) -> None:
    if value not in allowed:
        expected = " or ".join(repr(option) for option in allowed)
        raise ValueError(f"{key}={value!r} does not go with {ROOT_KEY}; allowed: {expected} ({remedy})")


def _check_speculation(rollout: DictConfig, history_dir: str | None) -> None:
    if history_dir is not None and not Path(history_dir).is_absolute():
        raise ValueError(
            f"{ROOT_KEY}.speculation.history_dir={history_dir!r} is relative, to another directory in every process; "
            f"expected an absolute path that all nodes see"
        )
    for name in ("data_parallel_size", "engine_kwargs.vllm.data_parallel_size"):
        size = OmegaConf.select(rollout, name, default=1) or 1
        remedy = "use more replicas instead, or set speculation.enabled=False"
        _require(f"actor_rollout_ref.rollout.{name}", size, (1,), f"vLLM answers for one engine of several; {remedy}")
    own = OmegaConf.select(rollout, "engine_kwargs.vllm.speculative_config", default=None)
    key = "actor_rollout_ref.rollout"
    remedy = "drop it, or set speculation.enabled=False"
    _require(f"{key}.engine_kwargs.vllm.speculative_config", own, (None,), f"WAR sets it; {remedy}")
    mtp = OmegaConf.select(rollout, "mtp.enable_rollout", default=False) and OmegaConf.select(rollout, "mtp.enable")
    _require(f"{key}.mtp.enable_rollout", bool(mtp), (False,), f"an engine speculates in one way; {remedy}")
    determinism = rollout.get("full_determinism", False)
    _require(f"{key}.full_determinism", determinism, (False,), f"which drafts are tried depends on time; {remedy}")
    replay = rollout.get("enable_rollout_routing_replay", False)
    _require(f"{key}.enable_rollout_routing_replay", replay, (False,), f"drafts change what vLLM records; {remedy}")


def _refuse_half_a_war(rollout: DictConfig) -> None:
    """Without settings the replicas are stock verl's; WAR's router and manager cannot work with them."""
    if rollout.agent.get("agent_loop_manager_class") == _AGENT_LOOP_MANAGER:
        raise ValueError(
            f"{ROOT_KEY}=null while the rest of rollout=war is selected; leave it as the group sets it, "
            f"or use rollout@actor_rollout_ref.rollout=rollout for stock verl"
        )


def _check_lengths(config: DictConfig) -> None:
    path = config.actor_rollout_ref.model.path
    limits = {
        "actor_rollout_ref.rollout.max_model_len": config.actor_rollout_ref.rollout.get("max_model_len"),
        f"max_position_embeddings of {path}": _max_position_embeddings(path),
    }
    prompt_length = config.data.max_prompt_length
    for name, limit in limits.items():
        if limit is not None and prompt_length >= limit:
            raise ValueError(
                f"data.max_prompt_length={prompt_length} leaves no room to generate within {name}={limit}; expected "
                f"less. Lower the first or raise the second"
            )


def _max_position_embeddings(path: str) -> int | None:
    """Of a model in a local directory; None for one on a hub, or where the configuration does not say."""
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None


def _check_model_path(path: str) -> None:
    """A path that can only be local must exist; `owner/name` may be a model on a hub."""
    is_local = path.startswith(("/", "~", ".")) or (path.count("/") > 1 and "://" not in path)
    if is_local and not Path(path).expanduser().exists():
        raise ValueError(f"actor_rollout_ref.model.path={path!r} does not exist; expected a model directory")
