"""Checks of a model directory: can verl train it and vLLM serve it here?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_war.doctor.report import Check, check
from verl_war.support import Machine

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Source: vLLM 0.27.1 vllm/v1/attention/backends/cpu_attn.py, get_supported_head_sizes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def check_model(path: Path, machine: Machine, max_tokens: int | None = None) -> Iterator[Check]:
    """Looks at the files of the model in ``path``, loading no weights.

    Args:
        path: Directory of a Hugging Face checkpoint.
        machine: Where it is to run.
        max_tokens: Longest prompt and response together that the run will use.
    """
    config_path = path / "config.json"
    present = config_path.is_file()
    remedy = "give the directory of a Hugging Face checkpoint (config.json, weights, tokenizer)"
    yield check("model.path", present, f"{path}" if present else f"{config_path} does not exist", remedy)
    if not present:
        return
    yield _has_any("model.weights", path, WEIGHT_PATTERNS, "download or save the weights into the directory")
    yield _has_any("model.tokenizer", path, TOKENIZER_FILES, "save the tokenizer into the directory (save_pretrained)")
    yield _chat_template(path)
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        yield Check("model.config", "failed", f"{config_path} is not JSON: {error}", "download it again")
        return
    yield from _check_config({**config, **config.get("text_config", {})}, machine, max_tokens)


def _check_config(config: dict[str, Any], machine: Machine, max_tokens: int | None) -> Iterator[Check]:
    positions = config.get("max_position_embeddings")
    enough = positions is None or max_tokens is None or max_tokens <= positions
    yield check(
        "model.max_position",
        enough,
        f"{positions} positions" + (f", the run needs {max_tokens}" if max_tokens else ""),
        "shorten data.max_prompt_length + data.max_response_length and rollout.max_model_len, or take another model",
    )
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_size = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if machine == "cpu" and head_size is not None:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield check(
            "model.head_size",
            head_size in CPU_HEAD_SIZES,
            f"{head_size}; vLLM's attention on CPUs has {sizes}",
            "take a model with one of these head sizes",
        )


def _has_any(name: str, path: Path, patterns: tuple[str, ...], remedy: str) -> Check:
    found = sorted(file.name for pattern in patterns for file in path.glob(pattern))
    detail = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return check(name, bool(found), detail or f"none of {', '.join(patterns)} in {path}", remedy)


def _chat_template(path: Path) -> Check:
    config = path / "tokenizer_config.json"
    inline = config.is_file() and '"chat_template"' in config.read_text()
    return check(
        "model.chat_template",
        inline or (path / "chat_template.jinja").is_file(),
        "present" if inline or (path / "chat_template.jinja").is_file() else "the tokenizer has none",
        "agents talk in turns: set tokenizer.chat_template, or actor_rollout_ref.model.custom_chat_template",
        otherwise="warning",
    )
