"""WAR's part of the vLLM workers, reached by `collective_rpc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_war.core.history_config import OnDamage
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

    def war_policy_step(self, step: int, rewards: dict[str, float]) -> None:
        """The weights are those of policy step `step` from now on; what is older than the window is forgotten.

        `rewards` are those of the trajectories that ended meanwhile, by the name their turns told.
        """
        drafter = drafter_of(self.model_runner)
        if drafter is not None:
            drafter.on_policy_step(step, rewards)

    def war_history_exchange(self, batches: list[bytes], max_bytes: int) -> bytes:
        """Take in what other replicas' calls gave, and give new text for them, at most `max_bytes`.

        The text of others is read in beside the decode path; empty when there is nothing new.
        """
        drafter = drafter_of(self.model_runner)
        if drafter is None or not drafter.is_active:
            return b""
        for batch in batches:
            drafter.exchange.apply(batch)
        return drafter.exchange.take(max_bytes) if max_bytes > 0 else b""

    def war_history_save(self, path: str) -> None:
        """Write all text to a file, beside the decode path; an error is logged and counted in the statistics."""
        drafter = drafter_of(self.model_runner)
        if drafter is not None and drafter.is_active:
            drafter.exchange.save(path)

    def war_history_load(self, path: str, on_damage: OnDamage = "error") -> int:
        """Read a file of `war_history_save`; returns the number of texts.

        Raises:
            HistoryError: The file is damaged (unless discarded), or of another tokenizer or model.
        """
        from verl_war.history import persistence

        drafter = drafter_of(self.model_runner)
        return persistence.load(drafter.store, path, on_damage) if drafter is not None and drafter.drafts_here else 0

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
