"""WAR's part of the vLLM workers, reached by `collective_rpc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_war.integration.vllm.proposer import drafter_of
from verl_war.patches import registry

if TYPE_CHECKING:
    from verl_war.integration.vllm.speculation_drafter import Drafter


class SpeculationCalls:
    """Calls about speculation; the engine's main thread runs them between two steps."""

    model_runner: Any

    def war_set_speculation(self, params: dict[str, Any]) -> None:
        """Change limits of speculation (`SpeculationLimits`) from the next engine step on.

        Raises:
            ValueError: A parameter is unknown or out of range.
            RuntimeError: The engine was started without WAR's speculation.
        """
        self._drafter().set_limits(params)

    def war_speculation_stats(self) -> dict[str, Any] | None:
        """Counters of speculation and what is in force; None when the engine has no WAR speculation."""
        drafter = drafter_of(self.model_runner)
        return None if drafter is None else drafter.report()

    def war_policy_step(self, step: int, window_steps: int) -> None:
        """The weights are those of policy step `step` from now on; text older than the window is forgotten."""
        drafter = drafter_of(self.model_runner)
        if drafter is not None:
            drafter.on_policy_step(step, window_steps)

    def war_end_trajectories(self, names: list[str]) -> None:
        """These trajectories have ended: their text may be evicted when memory is short."""
        drafter = drafter_of(self.model_runner)
        if drafter is not None:
            drafter.end_trajectories(names)

    def _drafter(self) -> Drafter:
        drafter = drafter_of(self.model_runner)
        if drafter is None:
            raise RuntimeError(
                "this engine has no WAR speculation; expected speculative_config with method=suffix and "
                "additional_config.war_speculation at its start"
            )
        return drafter


class WarWorkerExtension(SpeculationCalls, vLLMColocateWorkerExtension):
    """verl's worker extension with WAR's calls added."""

    def war_check_patches(self) -> None:
        """Raise when a patch that this worker's platform needs is not in force here."""
        registry.check()
