"""From plain nested mappings to frozen dataclasses, with messages that name the key in full."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

ROOT_KEY = "actor_rollout_ref.rollout.custom.war"
"""Where users write WAR's settings; error messages name keys in full."""

T = TypeVar("T")


def parse(cls: type[T], raw: Any, path: str) -> T:
    """Build dataclass `cls` from plain nested mappings; `path` is what messages call `raw`.

    Raises:
        ValueError: A key is unknown, a value has the wrong type or is out of range. The message names the key in full,
            what is allowed and, where the key is known, the value found.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}={raw!r} is {type(raw).__name__}; expected a mapping with keys {_keys(cls)}")
    hints = get_type_hints(cls)
    for key in raw:
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown key {path}.{key}{hint}; allowed keys: {_keys(cls)}")
    return cls(**{key: _value(hints[key], value, f"{path}.{key}") for key, value in raw.items()})


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, path)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        return _choice(get_args(hint), value, path)
    if get_origin(hint) is tuple:
        return _names(value, path)
    allowed = get_args(hint) if get_origin(hint) is not None else (hint,)
    if float in allowed and type(value) is int:
        return float(value)
    # bool is an int to isinstance: `block_size_tokens: true` must not pass as 1.
    if type(value) not in allowed:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ValueError(f"{path}={value!r} is {type(value).__name__}; expected {names}")
    return value


def _choice(allowed: tuple[Any, ...], value: Any, path: str) -> Any:
    # YAML 1.1 reads a bare `off` as False.
    if value is False and "off" in allowed:
        return "off"
    if value not in allowed:
        raise ValueError(f"{path}={value!r} must be one of {', '.join(map(str, allowed))}")
    return value


def _names(value: Any, path: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{path}={value!r} is {type(value).__name__}; expected a list of names")
    return tuple(value)


def require_range(config: Any, key: str, name: str, low: float, high: float) -> None:
    """Raise unless `low <= config.name <= high`; NaN is never in range. `key` is what the message calls `config`.

    Raises:
        ValueError: The value is out of range.
    """
    value = getattr(config, name)
    if not low <= value <= high:
        raise ValueError(f"{key}.{name}={value!r} must be between {low} and {high}")


def _keys(cls: Any) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls))
