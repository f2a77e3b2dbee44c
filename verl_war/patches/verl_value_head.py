"""The critic of verl asks for flash attention by name, which exists on GPUs only."""

from collections.abc import Callable
from typing import Any

from verl_war.patches.registry import Patch


def _load_without_flash_attention(_original: Callable[..., Any]) -> Callable[..., Any]:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


PATCH = Patch(
    name="verl_value_head",
    target="verl.utils.model:load_valuehead_model",
    make=_load_without_flash_attention,
    sources={"verl==0.9.1": "d7528f4ff909c7c31e6485e97756fd076f2cddd7004a0feab8ff89be2a14fa17"},
    applies_to="cpu",
    reason="PPO's critic is loaded with attn_implementation='flash_attention_2', whatever the configuration says; "
    "the error then claims that the model has no value head",
    link="verl 0.9.1 verl/utils/model.py:649 and :674",
    remove_when="verl passes override_config.attn_implementation on to the critic",
)
