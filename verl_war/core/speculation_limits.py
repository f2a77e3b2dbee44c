"""Settings of speculation that the engines obey."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_war.core.config_parsing import ROOT_KEY, parse, require_range

SPECULATION_KEY = f"{ROOT_KEY}.speculation"

Mode = Literal["auto", "always", "off"]

MAX_DRAFT_TOKENS = 64
"""Longest draft that can be asked for; vLLM's rejection sampler stops at 128 (rejection_sampler.py:33, 0.27.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLimits:
    """What the drafts of one replica may be. Every field has a default that suits an unknown machine.

    Attributes:
        mode: `auto` drafts when it pays, `always` whenever text is found, `off` never.
        max_draft_tokens: Longest draft of a request in one step.
        max_step_draft_tokens: Most draft tokens of a whole step; bounds the step's memory and its look-up.
        max_batch: Requests in the batch above which nothing is drafted.
        min_token_prob: A draft ends where the index thinks its continuation less likely than this.
        min_gain: Gain in tokens per second from which drafting begins; below it the estimate's error decides.
        favour_long_turns: Whether turns that have lasted long get longer drafts than throughput asks for, since a step
            ends with its last turn (`core.turn_lengths`). Off: on two cores 9 of 12 paired steps were slower with it.
        dwell_s: Least time between two changes of the regime, which is whether drafts pay at a replica's load. A step
            for which they do not pay goes without at once; the regime only changes when that lasts.
        probe_interval_s: Least time between two drafts made only to measure their cost.
        probe_draft_tokens: Length of those drafts.
        probe_share: Share of the time that probes may take.
        watchdog_acceptance: Accepted over drafted tokens below which `core.watchdog` switches speculation off.
        watchdog_min_tokens: Draft tokens that it must have seen.
        watchdog_retry_s: Time after which it lets speculation try again; doubles every time, up to 16 times this.
    """

    mode: Mode = "auto"
    max_draft_tokens: int = 24
    max_step_draft_tokens: int = 1024
    max_batch: int = 256
    min_token_prob: float = 0.1
    min_gain: float = 0.03
    favour_long_turns: bool = False
    dwell_s: float = 10.0
    probe_interval_s: float = 5.0
    probe_draft_tokens: int = 4
    probe_share: float = 0.004
    watchdog_acceptance: float = 0.02
    watchdog_min_tokens: int = 1000
    watchdog_retry_s: float = 60.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"{SPECULATION_KEY}.mode={self.mode!r} must be one of {', '.join(get_args(Mode))}")
        for name, (low, high) in _RANGES.items():
            require_range(self, SPECULATION_KEY, name, low, high)


_RANGES: dict[str, tuple[float, float]] = {
    "max_draft_tokens": (1, MAX_DRAFT_TOKENS),
    "max_step_draft_tokens": (1, 65536),
    "max_batch": (1, 65536),
    "min_token_prob": (0.0, 1.0),
    "min_gain": (0.0, 10.0),
    "dwell_s": (0.0, 86_400.0),
    "probe_interval_s": (0.0, 86_400.0),
    "probe_draft_tokens": (1, MAX_DRAFT_TOKENS),
    "probe_share": (1e-6, 1.0),
    "watchdog_acceptance": (0.0, 1.0),
    "watchdog_min_tokens": (1, 1_000_000_000),
    "watchdog_retry_s": (0.0, 86_400.0),
}


def change_limits(limits: SpeculationLimits, params: Mapping[str, Any]) -> SpeculationLimits:
    """``limits`` with the fields in ``params`` replaced.

    Raises:
        ValueError: A name is unknown, a value has the wrong type or is out of range.
    """
    return parse(SpeculationLimits, {**dataclasses.asdict(limits), **params}, SPECULATION_KEY)
