"""How long an engine step takes and how much KV fits: the machines that the simulator knows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_war.core.machine_profile import MachineProfile

MFU = 0.5
"""Share of the datasheet's dense bf16 rate that prefill reaches. Public vLLM and TensorRT-LLM prefill
measurements of dense 8B-70B models on H100 lie between 0.45 and 0.6."""

MBU = 0.75
"""Share of the datasheet's memory bandwidth that decode reaches; measured decode kernels lie between 0.7 and 0.85."""

KV_SHARE = 0.9
"""vLLM's default `gpu_memory_utilization`."""

DRAFT_STEP_S = 0.5e-3
"""Kernels of the rejection sampler and copies to and from the device, when a step verifies drafts. Assumed, not
measured on a GPU."""

DRAFT_REQUEST_S = 20e-6
"""Of these, 12 us are a look-up among 740k tokens (recipes/baseline_comparison/results/history)."""

VOCABULARY = 151_936
LOGITS_PASSES = 4
"""Vocabulary of Qwen3, and how often the rejection sampler reads or writes float32 logits: softmax, comparison,
resampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One replica: step time, KV capacity and limits of its scheduler.

    A step that decodes n requests whose contexts sum to S tokens and prefills p tokens that attend to q
    (query, key) pairs takes, with `overlapped`,
    `base_s + per_request_s * n + max(per_token_s * (n + p) + per_pair_s * q, weights_s + per_kv_token_s * S)`,
    the roofline; without, `base_s + per_request_s * n + per_token_s * p + per_pair_s * q + per_kv_token_s * S`,
    the form that is fitted to a measured machine. Draft tokens count as prefill tokens; a step that verifies d of them
    takes `draft_step_s + draft_request_s * n + draft_token_s * d` more.

    Attributes:
        base_s: Cost of any step: scheduling, kernel launches, all-reduce latency, sampling.
        per_request_s: Cost of every decoding request beyond its share of the matrix products.
        per_token_s: Matrix products of one token.
        per_pair_s: Attention of one prefill token to one context token.
        weights_s: Reading the weights once.
        per_kv_token_s: Reading the KV of one context token.
        kv_capacity_tokens: Tokens that fit in the KV cache.
        max_num_seqs: vLLM's limit of the running batch.
        max_num_batched_tokens: vLLM's token budget of a step.
        kv_bytes_per_token: Bytes of KV of one token, for the host tier.
        host_bytes_per_s: Bandwidth between host and device, for the host tier.
        draft_step_s: Cost of verifying any draft at all: another way through the sampler, look-ups.
        draft_request_s: The same for every request of the batch, those without a draft included.
        draft_token_s: Sampling at one draft token's position.
    """

    name: str
    overlapped: bool = True
    base_s: float
    per_request_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0
    weights_s: float = 0.0
    per_kv_token_s: float = 0.0
    kv_capacity_tokens: int
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    kv_bytes_per_token: int = 0
    host_bytes_per_s: float = 0.0
    draft_step_s: float = 0.0
    draft_request_s: float = 0.0
    draft_token_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"hardware {self.name}: {field.name}={value!r} must be a finite number, at least 0")
        for name in ("base_s", "kv_capacity_tokens", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"hardware {self.name}: {name}={getattr(self, name)!r} must be over 0")

    def step_s(self, decodes: int, decode_kv_tokens: int, prefill_tokens: int = 0, prefill_pairs: float = 0.0) -> float:
        """Seconds of one engine step."""
        fixed_s = self.base_s + self.per_request_s * decodes
        kv_s = self.per_kv_token_s * decode_kv_tokens
        prefill_s = self.per_token_s * prefill_tokens + self.per_pair_s * prefill_pairs
        if not self.overlapped:
            return fixed_s + prefill_s + kv_s
        return fixed_s + max(self.per_token_s * decodes + prefill_s, self.weights_s + kv_s)

    def decode_steps_s(self, decodes: int, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` pure decode steps in a row, the contexts growing by one token each in every step."""
        fixed_s = steps * (self.base_s + self.per_request_s * decodes)
        if not self.overlapped:
            return fixed_s + self._kv_read_s(decodes, kv_tokens, 0, steps)
        compute_s = self.per_token_s * decodes
        bound = 0  # steps in which the matrix products take longer than memory
        if self.per_kv_token_s > 0 and decodes:
            bound = math.ceil(((compute_s - self.weights_s) / self.per_kv_token_s - kv_tokens) / decodes)
        elif compute_s > self.weights_s:
            bound = steps
        bound = min(max(bound, 0), steps)
        memory_s = (steps - bound) * self.weights_s + self._kv_read_s(decodes, kv_tokens, bound, steps)
        return fixed_s + bound * compute_s + memory_s

    def draft_s(self, requests: int, draft_tokens: int) -> float:
        """Seconds that a step of so many requests takes longer because it verifies drafts, their computation aside."""
        return self.draft_step_s + self.draft_request_s * requests + self.draft_token_s * draft_tokens

    def _kv_read_s(self, decodes: int, kv_tokens: int, begin: int, end: int) -> float:
        grown = decodes * (end * (end - 1) - begin * (begin - 1)) / 2
        return self.per_kv_token_s * ((end - begin) * kv_tokens + grown)


def _roofline(
    name: str, *, params: float, layers: int, heads: int, kv_heads: int, head_dim: int, flops_per_s: float,
    bytes_per_s: float, memory_bytes: float, devices: int, base_s: float, kv_capacity_tokens: int | None = None,
) -> HardwareProfile:  # fmt: skip
    """A profile from a model's shape (bf16 weights and KV) and a device's datasheet."""
    kv_bytes = 2 * layers * kv_heads * head_dim * 2
    fits = int((KV_SHARE * memory_bytes * devices - 2 * params) / kv_bytes)
    return HardwareProfile(
        name=name,
        base_s=base_s,
        per_request_s=10e-6,
        per_token_s=2 * params / (MFU * flops_per_s * devices),
        per_pair_s=4 * layers * heads * head_dim / (MFU * flops_per_s * devices),
        weights_s=2 * params / (MBU * bytes_per_s * devices),
        per_kv_token_s=kv_bytes / (MBU * bytes_per_s * devices),
        kv_capacity_tokens=fits if kv_capacity_tokens is None else kv_capacity_tokens,
        kv_bytes_per_token=kv_bytes,
        # 55 GB/s is what pinned copies reach on PCIe 5.0 x16 (64 GB/s); one link per device.
        host_bytes_per_s=55e9 * devices,
        draft_step_s=DRAFT_STEP_S,
        draft_request_s=DRAFT_REQUEST_S,
        draft_token_s=LOGITS_PASSES * 4 * VOCABULARY / (MBU * bytes_per_s * devices),
    )


_QWEN3_8B: dict[str, Any] = {"params": 8.2e9, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128}
"""config.json and model card of Qwen/Qwen3-8B: 147,456 bytes of KV per token."""

_QWEN3_32B: dict[str, Any] = {"params": 32.8e9, "layers": 64, "heads": 64, "kv_heads": 8, "head_dim": 128}
"""config.json and model card of Qwen/Qwen3-32B: 262,144 bytes of KV per token."""

_H100: dict[str, Any] = {"flops_per_s": 989e12, "bytes_per_s": 3.35e12, "memory_bytes": 85.5e9}
"""NVIDIA H100 SXM datasheet: dense bf16, HBM3; 79.6 GiB as the driver reports."""

_H200: dict[str, Any] = {"flops_per_s": 989e12, "bytes_per_s": 4.8e12, "memory_bytes": 150.0e9}
"""NVIDIA H200 SXM datasheet: dense bf16, HBM3e; 139.8 GiB as the driver reports."""

PROFILES: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        # Step times of SmolLM2-135M (bf16, greedy) on two cores without speculation: 14.0, 15.3, 25.9 and
        # 62.4 ms at batch 1, 4, 16 and 64 give base and per_request; a token of prefill costs what a token of a
        # batch-64 step with 16 drafts costs (517.8 ms / 1,088 tokens). KV small on purpose: a fleet for tests of
        # thrash. `--hardware FILE.json` takes the numbers of your own machine.
        HardwareProfile(
            name="cpu_2core",
            overlapped=False,
            base_s=0.0132,
            per_request_s=0.00077,
            per_token_s=0.00048,
            per_kv_token_s=3e-8,
            kv_capacity_tokens=16_384,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            kv_bytes_per_token=23_040,
            host_bytes_per_s=5e9,
            # Of the same measurements: one draft per request costs 1.0, 3.0, 13.6 and 55.1 ms at batch 1, 4, 16 and 64,
            # of which 0.48 ms per token are its computation.
            draft_request_s=0.00038,
        ),  # fmt: skip
        # What vLLM reports at gpu_memory_utilization 0.93.
        _roofline("h100_8b", **_QWEN3_8B, **_H100, devices=1, base_s=0.003, kv_capacity_tokens=430_000),
        # Two all-reduces in each of 64 layers at about 15 us of latency make the base larger.
        _roofline("h100x4_32b", **_QWEN3_32B, **_H100, devices=4, base_s=0.005),
        _roofline("h200_8b", **_QWEN3_8B, **_H200, devices=1, base_s=0.003),
    )
}


def load_profile(name: str) -> HardwareProfile:
    """The profile of that name, or read from a JSON file: of `scripts/calibrate.py`, or with `HardwareProfile`'s keys.

    Raises:
        ValueError: No such profile or file, or a key or value in the file is wrong.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if path.suffix != ".json":
        raise ValueError(f"--hardware {name!r} is unknown; expected one of {', '.join(PROFILES)} or a FILE.json")
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"--hardware {name}: cannot be read ({error.strerror}); give the path of a JSON file"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"--hardware {name}: line {error.lineno} is not JSON ({error.msg})") from error
    if isinstance(raw, Mapping) and "step_time" in raw:
        return hardware_of(MachineProfile.from_dict(raw, name), path.stem)
    return profile_from(raw, name)


def hardware_of(profile: MachineProfile, name: str) -> HardwareProfile:
    """The machine that `scripts/calibrate.py` measured."""
    step_time = profile.step_time
    return HardwareProfile(
        name=name,
        overlapped=False,
        base_s=step_time.base_s,
        per_request_s=step_time.row_s,
        per_token_s=step_time.token_s,
        per_kv_token_s=step_time.kv_token_s,
        draft_step_s=step_time.draft_s,
        draft_request_s=step_time.draft_row_s,
        # Here a draft token's computation is counted as a prefilled token's, and this is what comes on top.
        draft_token_s=max(0.0, step_time.draft_token_s - step_time.token_s),
        kv_capacity_tokens=profile.kv_capacity_tokens,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )


def profile_from(raw: Any, where: str) -> HardwareProfile:
    """Build a profile from a mapping; keys left out take the defaults of a fitted (not overlapped) machine.

    Raises:
        ValueError: A key is unknown or missing, or a value has the wrong type or range.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: holds {type(raw).__name__}; expected an object with the keys of HardwareProfile")
    fields = {field.name: field for field in dataclasses.fields(HardwareProfile)}
    values: dict[str, Any] = {"name": Path(where).stem, "overlapped": False}
    for key, value in raw.items():
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}={value!r}; allowed: {', '.join(fields)}")
        kind = str(fields[key].type)
        if kind == "float" and type(value) is int:
            value = float(value)
        if type(value).__name__ != kind:
            raise ValueError(f"{where}: {key}={value!r} is {type(value).__name__}; expected {kind}")
        values[key] = value
    for key in ("base_s", "kv_capacity_tokens"):
        if key not in values:
            raise ValueError(f"{where}: {key} is missing; measure it, or take the one of {', '.join(PROFILES)}")
    return HardwareProfile(**values)
