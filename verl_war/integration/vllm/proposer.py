"""vLLM's suffix proposer with WAR's drafts in place of arctic-inference's cache.

The class stands in for `SuffixDecodingProposer` in vLLM's model runner (patch `vllm_suffix_proposer`). An engine whose
`additional_config` does not ask for WAR gets vLLM's own proposer, unchanged, and loads nothing of WAR's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from verl_war.integration.vllm.speculation_drafter import Drafter

CONFIG_KEY = "war_speculation"
"""Key of vLLM's `additional_config`; its value is a mapping of `SpeculationLimits` fields and `history_bytes`."""


def engine_settings(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """What `additional_config` says about WAR's speculation; None when it says nothing."""
    additional = vllm_config.additional_config
    settings = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    return None if settings is None else dict(settings)


def proposer_class(stock: type) -> type:
    """vLLM's class `stock` with WAR's drafts for the engines that ask for them."""

    class WarSuffixProposer(stock):  # type: ignore[misc, valid-type]
        """Stands in for `SuffixDecodingProposer`; a subclass, because the model runner checks with isinstance."""

        def __init__(self, vllm_config: VllmConfig) -> None:
            settings = engine_settings(vllm_config)
            self.war: Drafter | None = None
            if settings is None:
                super().__init__(vllm_config)
            else:
                from verl_war.integration.vllm.speculation_drafter import Drafter

                self.war = Drafter(vllm_config, settings)

        def propose(
            self, num_speculative_tokens: int, input_batch: Any, sampled_token_ids: Any, slot_mappings: Any = None
        ) -> list[list[int]]:
            if self.war is None:
                return super().propose(num_speculative_tokens, input_batch, sampled_token_ids, slot_mappings)
            return self.war.propose(num_speculative_tokens, input_batch, sampled_token_ids)

    return WarSuffixProposer


def drafter_of(model_runner: Any) -> Drafter | None:
    """WAR's drafter of a model runner; None when its engine does not speculate, or speculates without WAR."""
    attributes = vars(model_runner)
    return vars(attributes["drafter"]).get("war") if "drafter" in attributes else None
