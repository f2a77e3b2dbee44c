"""A replica that breaks must not stop the weight update of the others."""

from typing import Any

from verl_war.patches.registry import Patch

KEY = ("vllm", "async")
ADAPTER = "verl_war.integration.verl.server_adapter.WarServerAdapter"


def _enter_adapter(original: dict[Any, str]) -> dict[Any, str]:
    return {**original, KEY: ADAPTER}


PATCH = Patch(
    name="verl_server_adapter",
    target="verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    make=_enter_adapter,
    sources={"verl==0.9.1": "6d2aee5aa276c7a9e27bc48ae7d1fce9962a09485f4639d1998dc35d1db6ae61"},
    guards="verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights",
    reason="verl's sender waits for ever for an engine that is dead, and its table of rollout classes has no function "
    "to enter another; without custom.war the class is verl's own",
    link="verl 0.9.1 verl/workers/rollout/base.py:89 (table), vllm_rollout/vllm_rollout.py:180 (the wait)",
    remove_when="verl's weight update ends when an engine does, and get_rollout_class can be extended",
)
