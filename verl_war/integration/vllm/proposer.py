"""vLLM's suffix proposer with WAR's drafts in place of arctic-inference's cache.

The class stands in for `SuffixDecodingProposer` in vLLM's model runner (patch `vllm_suffix_proposer`). An engine whose
`additional_config` does not ask for WAR gets vLLM's own proposer, unchanged, and loads nothing of WAR's.

What an engine that can speculate loses while it does not (vLLM 0.27.1): on CPU vLLM's way through its drafter, about
0.05 ms of a step at 1 to 64 requests, and in `auto` mode the planner's look at the step, about as much again
(scripts/bench_speculation_off.py). vLLM also asks the worker for drafts in a message of its own after every step, 0.1
to 0.2 ms where the worker is another process; patches `vllm_drafts_*` send them with the tokens instead
(scripts/bench_draft_message.py). On GPU asynchronous scheduling (`vllm/config/vllm.py:1106`: only draft models and
n-grams on the GPU keep it; on CPU no engine has it, `platforms/cpu.py:144`) and full CUDA graphs, because they are
captured for query length 1 + K (`gpu_model_runner.py:860, 3912`) or not at all with a draft length that changes
(`config/vllm.py:855`). Neither can be switched at run time: replicas that never get to low load are better started
without speculation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from verl_war.integration.vllm.speculation_drafter import Drafter

CONFIG_KEY = "war_speculation"
"""Key of vLLM's `additional_config`; its value is a mapping of `SpeculationLimits` fields, `history` (a
mapping of `HistoryConfig` fields), `share_bytes_per_s` and `step_time` (a mapping of `StepTime` fields)."""

EXTRA_ARGS_KEY = "war"
"""Key of `SamplingParams.extra_args` under which a turn tells its trajectory, group and policy step."""


def engine_options(settings: Mapping[str, Any], max_draft_tokens: int) -> dict[str, Any]:
    """Engine arguments of vLLM that start an engine with WAR's speculation.

    The schedule by batch size names one length for all: its presence keeps vLLM from padding requests whose prompt is
    cached with `max_draft_tokens` drafts of token -1 (`vllm/v1/core/sched/scheduler.py:881`, 0.27.1), for which the
    whole batch would pay.

    Args:
        settings: See `CONFIG_KEY`; what is left out has its default.
        max_draft_tokens: Longest draft of a request that this engine can ever verify.
    """
    return {
        "speculative_config": {
            "method": "suffix",
            "num_speculative_tokens": max_draft_tokens,
            "num_speculative_tokens_per_batch_size": [[1, 1 << 20, max_draft_tokens]],
        },
        "additional_config": {CONFIG_KEY: dict(settings)},
    }


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
