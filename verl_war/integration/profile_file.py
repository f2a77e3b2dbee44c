"""The file of a machine profile: `custom.war.profile_path`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_war.core.config_parsing import ROOT_KEY
from verl_war.core.machine_profile import MachineProfile

PROFILE_KEY = f"{ROOT_KEY}.profile_path"

SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Keys of a model's config.json that decide how much a step computes and reads."""


def read_profile(path: str | None) -> MachineProfile | None:
    """The profile in a file; None without a path.

    Raises:
        ValueError: The path is relative, or the file is missing or damaged.
    """
    if path is None:
        return None
    if not Path(path).is_absolute():
        raise ValueError(
            f"{PROFILE_KEY}={path!r} is relative, to another directory in every process; expected an absolute path "
            f"that all nodes see"
        )
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"{PROFILE_KEY}={path!r} cannot be read ({error.strerror}); write it with scripts/calibrate.py, or set null"
        ) from error
    except ValueError as error:
        raise ValueError(f"{PROFILE_KEY}={path!r} is no JSON ({error}); write it with scripts/calibrate.py") from error
    return MachineProfile.from_dict(raw, f"{PROFILE_KEY}={path!r}")


def check_profile(profile: MachineProfile, model_path: str, tensor_parallel_size: int) -> None:
    """Refuse a profile of another model, or of engines of another size.

    Raises:
        ValueError: It is one.
    """
    shape = model_shape(model_path)
    is_same = shape == profile.model_shape if shape and profile.model_shape else model_name(model_path) == profile.model
    if not is_same:
        raise ValueError(
            f"{PROFILE_KEY}: the profile is of {profile.model} ({profile.model_shape or 'shape unknown'}), the run's "
            f"actor_rollout_ref.model.path={model_path!r} is another model ({shape or 'shape unknown'}); calibrate "
            f"with it, or set {PROFILE_KEY}=null"
        )
    if tensor_parallel_size != profile.tensor_parallel_size:
        raise ValueError(
            f"{PROFILE_KEY}: the profile is of engines with tensor_parallel_size={profile.tensor_parallel_size}, the "
            f"run has actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel_size}; calibrate with it, "
            f"or set {PROFILE_KEY}=null"
        )


def model_name(path: str) -> str:
    """Last part of a model's path or name."""
    return path.rstrip("/").rpartition("/")[2]


def model_shape(path: str) -> str:
    """What of a local model's configuration decides how long a step takes; empty for one on a hub.

    Checkpoints that were trained from one another have the same.
    """
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return ""
    config: dict[str, Any] = json.loads(file.read_text())
    text = config.get("text_config", config)
    values = [f"{key}={text[key]}" for key in SHAPE_KEYS if key in text]
    return " ".join([*config.get("architectures", []), *values])
