"""Config dataclasses from the keys of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def config_from(section: str, kind: type[Config], values: Mapping[str, Any] | None) -> Config:
    """Build a dataclass whose fields all have defaults; each default says what type its field has.

    Raises:
        ValueError: a key is unknown, or its value is of another type or refused by the dataclass.
    """
    defaults = {field.name: field.default for field in fields(kind)}
    checked = {}
    for key, value in dict(values or {}).items():
        if key not in defaults:
            raise ValueError(f"code_agent: unknown key {section}.{key}; allowed are {', '.join(defaults)}")
        checked[key] = _converted(f"{section}.{key}", value, type(defaults[key]))
    return kind(**checked)


def _converted(name: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    if kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    if type(value) is kind:
        return value
    expected = "list" if kind is tuple else kind.__name__
    raise ValueError(f"code_agent: {name} is {value!r}; expected a value of type {expected}")
