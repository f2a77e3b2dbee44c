"""verl offloads the reference model to pinned memory, and only an accelerator can pin memory."""

from collections.abc import Callable
from typing import Any

from verl_war.patches.registry import Patch


def _never_pin(original: Callable[..., Any]) -> Callable[..., Any]:
    def offload_policy(pin_memory: bool = False) -> Any:
        return original(pin_memory=False)

    return offload_policy


PATCH = Patch(
    name="verl_offload_policy",
    target="verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
    make=_never_pin,
    sources={"verl==0.9.1": "980b7d8b72c18b36e408f1b13fddd477d8d458f0d39ed87bfdcd7cd288624003"},
    guards="verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module",
    applies_to="cpu",
    reason="the reference model (any run with a KL term) is wrapped with CPUOffloadPolicy(pin_memory=True), "
    "which raises without an accelerator",
    link="verl 0.9.1 verl/workers/engine/fsdp/transformer_impl.py:462",
    remove_when="verl pins memory only where the platform can",
)
