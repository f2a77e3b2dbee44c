"""Configuration of WAR: `actor_rollout_ref.rollout.custom.war` as frozen dataclasses that reject mistakes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

ROOT_KEY = "actor_rollout_ref.rollout.custom.war"
"""Where users write these settings; error messages name keys in full."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """Switch of one control. Off means: exactly what stock verl does."""

    enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WarConfig:
    """All settings of WAR.

    Attributes:
        speculation: Speculative decoding at low load.
        scheduling: Priced placement of turns on replicas.
        admission: Holding trajectories until their KV fits.
        block_size_tokens: Tokens per hashed block of context. 64 keeps the description of a 32k
            context at 4 kB while a shared prefix is still known to within 64 tokens.
        metrics_timeout_s: How long a training step waits for the router's and engines' numbers
            before it fails.
        seed: Seed of the router's tie-breaks; null takes one from the operating system, as stock verl does.
    """

    speculation: FeatureConfig = field(default_factory=FeatureConfig)
    scheduling: FeatureConfig = field(default_factory=FeatureConfig)
    admission: FeatureConfig = field(default_factory=FeatureConfig)
    block_size_tokens: int = 64
    metrics_timeout_s: float = 30.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("speculation", "scheduling", "admission"):
            if getattr(self, name).enabled:
                raise ValueError(
                    f"{ROOT_KEY}.{name}.enabled=True is not available in this version of verl_war; "
                    f"allowed: False (stock verl's behaviour)"
                )
        if not 1 <= self.block_size_tokens <= 4096:
            raise ValueError(f"{ROOT_KEY}.block_size_tokens={self.block_size_tokens!r} must be between 1 and 4096")
        if not 0 < self.metrics_timeout_s <= 3600:
            raise ValueError(f"{ROOT_KEY}.metrics_timeout_s={self.metrics_timeout_s!r} must be over 0 and at most 3600")


def parse_war_config(raw: Mapping[str, Any] | None) -> WarConfig:
    """Build the configuration from plain nested mappings.

    Args:
        raw: The value of `custom.war`; None means all defaults.

    Raises:
        ValueError: A key is unknown, a value has the wrong type or is out of range. The message
            names the key in full, the value found and what is allowed.
    """
    return _parse(WarConfig, {} if raw is None else raw, ROOT_KEY)


def _parse(cls: type[T], raw: Any, path: str) -> T:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}={raw!r} is {type(raw).__name__}; expected a mapping with keys {_keys(cls)}")
    hints = get_type_hints(cls)
    for key in raw:
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown key {path}.{key}={raw[key]!r}{hint}; allowed keys: {_keys(cls)}")
    return cls(**{key: _value(hints[key], value, f"{path}.{key}") for key, value in raw.items()})


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _parse(hint, value, path)  # type: ignore[arg-type]
    allowed = get_args(hint) if get_origin(hint) is not None else (hint,)
    if float in allowed and type(value) is int:
        return float(value)
    # bool is an int to isinstance: `block_size_tokens: true` must not pass as 1.
    if type(value) not in allowed:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ValueError(f"{path}={value!r} is {type(value).__name__}; expected {names}")
    return value


def _keys(cls: Any) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls))
