"""Outputs of several tokens, cut so that a stop string ends a request where it would without speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.outputs import LogprobsLists


def split_at_stops(outputs: list[EngineCoreOutput], states: Mapping[str, Any]) -> Sequence[EngineCoreOutput]:
    """The outputs, those of several tokens for a request with stop strings split into one per token.

    vLLM looks for stop strings once per output and drops what comes for a request behind its end.
    """
    if not any(len(output.new_token_ids) > 1 and _has_stops(states, output) for output in outputs):
        return outputs
    parts: list[EngineCoreOutput] = []
    for output in outputs:
        if len(output.new_token_ids) > 1 and _has_stops(states, output):
            parts.extend(_split(output))
        else:
            parts.append(output)
    return parts


def _has_stops(states: Mapping[str, Any], output: EngineCoreOutput) -> bool:
    state = states.get(output.request_id)
    # Without a tokenizer there is a detokenizer of another class, and stop strings are not searched.
    if state is None or not isinstance(state.detokenizer, BaseIncrementalDetokenizer):
        return False
    return bool(state.detokenizer.stop)


def _split(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """One output per token: what belongs to the prompt goes with the first, what ends the request with the last."""
    last = len(output.new_token_ids) - 1
    parts = []
    for position, token_id in enumerate(output.new_token_ids):
        part = EngineCoreOutput(request_id=output.request_id, new_token_ids=[token_id])
        if output.new_logprobs is not None:
            part.new_logprobs = _logprobs_at(output.new_logprobs, position)
        if output.routed_experts is not None:
            part.routed_experts = output.routed_experts[position : position + 1]
        if position == 0:
            part.new_prompt_logprobs_tensors = output.new_prompt_logprobs_tensors
            part.events = output.events
            part.prefill_stats = output.prefill_stats
            part.num_nans_in_logits = output.num_nans_in_logits
        if position == last:
            part.finish_reason = output.finish_reason
            part.stop_reason = output.stop_reason
            part.kv_transfer_params = output.kv_transfer_params
            part.ec_transfer_params = output.ec_transfer_params
        parts.append(part)
    return parts


def _logprobs_at(logprobs: LogprobsLists, position: int) -> LogprobsLists:
    here = slice(position, position + 1)
    return LogprobsLists(logprobs.logprob_token_ids[here], logprobs.logprobs[here], logprobs.sampled_token_ranks[here])
