"""Every patch of verl_war, in the order in which they are armed. Nothing else assigns to upstream names."""

from verl_war.patches import (
    verl_generated_tokens,
    verl_launch_check,
    verl_offload_policy,
    verl_poll_interval,
    verl_process_group,
    verl_server_adapter,
    verl_step_metrics,
    verl_trajectory_numbers,
    verl_value_head,
    vllm_draft_cliff,
    vllm_drafts_from_output,
    vllm_drafts_in_output,
    vllm_expand_kernel,
    vllm_live_weights,
    vllm_stat_logger,
    vllm_stop_strings,
    vllm_suffix_proposer,
    vllm_version,
)
from verl_war.patches.registry import Patch

PATCHES: tuple[Patch, ...] = (
    vllm_version.PATCH,
    verl_process_group.PATCH,
    verl_value_head.PATCH,
    verl_offload_policy.PATCH,
    vllm_live_weights.PATCH,
    vllm_expand_kernel.PATCH,
    verl_launch_check.PATCH,
    verl_poll_interval.PATCH,
    verl_step_metrics.PATCH,
    verl_server_adapter.PATCH,
    verl_generated_tokens.PATCH,
    verl_trajectory_numbers.PATCH,
    vllm_stat_logger.PATCH,
    vllm_suffix_proposer.PATCH,
    vllm_draft_cliff.PATCH,
    vllm_drafts_in_output.PATCH,
    vllm_drafts_from_output.PATCH,
    vllm_stop_strings.PATCH,
)
