"""What was measured of one model on one machine, as `scripts/calibrate.py` writes it down."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_war.core.config_parsing import parse
from verl_war.core.step_time import StepTime

PROFILE_VERSION = 1
"""Of the file's format; another one means other coefficients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Step times of one engine, with where they come from.

    Attributes:
        version: `PROFILE_VERSION`.
        model: Name of the model, the last part of its path.
        model_shape: What of its configuration decides how long a step takes; empty where it could not be read.
        tensor_parallel_size: Devices of the engine.
        hardware: The machine, in words.
        dtype: Of the weights.
        vllm_version: Version of vLLM.
        date: Day of the measurement, YYYY-MM-DD.
        step_time: The fitted coefficients.
        r2: Share of the variance of plain iterations that they explain, at most 1.
        observations: Effective number of windows that they rest on.
        kv_capacity_tokens: Tokens that fit in the engine's KV cache.
        max_num_seqs: vLLM's limit of the running batch.
        max_num_batched_tokens: vLLM's token budget of a step.
    """

    version: int
    model: str
    model_shape: str
    tensor_parallel_size: int
    hardware: str
    dtype: str
    vllm_version: str
    date: str
    step_time: StepTime
    r2: float
    observations: float
    kv_capacity_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ValueError(f"version={self.version!r}, this verl_war reads {PROFILE_VERSION}; calibrate again")
        numbers = [*_numbers(self), *_numbers(self.step_time, "step_time.")]
        for name, value in numbers:
            is_over_0 = type(value) is int or name == "step_time.base_s"
            if not math.isfinite(value) or (value <= 0 if is_over_0 else value < 0 and name != "r2"):
                raise ValueError(f"{name}={value!r} must be a finite number, {'over' if is_over_0 else 'at least'} 0")
        if self.r2 > 1.0:
            raise ValueError(f"r2={self.r2!r} must be at most 1")

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> MachineProfile:
        """Read a profile from plain data; ``where`` is what messages call it.

        Raises:
            ValueError: A key is unknown or missing, or a value has the wrong type, version or range.
        """
        try:
            for part, kind, name in ((raw, cls, "profile"), (_step_time(raw), StepTime, "profile.step_time")):
                missing = [field.name for field in dataclasses.fields(kind) if field.name not in part]
                if missing:
                    raise ValueError(f"{name} lacks {', '.join(missing)}; write it with scripts/calibrate.py")
            return parse(cls, raw, "profile")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
        return dataclasses.asdict(self)


def _step_time(raw: Any) -> Mapping[str, Any]:
    """The part with the coefficients, where there is one to be checked."""
    for part in (raw, raw.get("step_time", {}) if isinstance(raw, Mapping) else {}):
        if not isinstance(part, Mapping):
            raise ValueError(f"{part!r:.80} is {type(part).__name__}; expected what scripts/calibrate.py writes")
    return part


def _numbers(value: Any, prefix: str = "") -> list[tuple[str, float]]:
    names = (field.name for field in dataclasses.fields(value))
    return [(prefix + name, number) for name in names if isinstance(number := getattr(value, name), (int, float))]
