"""WAR's part of the vLLM workers, reached by `collective_rpc`."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_war.patches import registry


class WarWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with WAR's calls added."""

    def war_check_patches(self) -> None:
        """Raise when a patch that this worker's platform needs is not in force here."""
        registry.check()
