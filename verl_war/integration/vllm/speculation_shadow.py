"""Look-ups while speculation is off, compared with what the model then says: acceptance at no cost to the engine.

A draft token d is accepted with probability p(d), and without speculation the model samples d with probability p(d):
how often the sampled tokens agree with a draft is an unbiased estimate of its acceptance. The batch pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_war.integration.vllm.speculation_text import LiveRequest

if TYPE_CHECKING:
    from verl_war.integration.vllm.speculation import Speculation

PROBE_ROWS = 8
"""Requests that are looked up at a time."""

PROBE_TOKENS = 8
"""Length of a shadow draft; so many steps pass before it is compared."""

MIN_INTERVAL_S = 0.2
"""Least time between two shadow look-ups."""

MAX_SHARE = 0.002
"""Share of the time that shadow look-ups may take, the reading of text that was not read in included."""


@dataclass(slots=True)
class _Shadow:
    request: LiveRequest
    at: int
    tokens: list[int]
    kind: int


class ShadowProbes:
    """Keeps acceptance known while nothing is drafted."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._waiting: list[_Shadow] = []
        self._wait_steps = 0
        self._due_s = 0.0
        self._first_row = 0

    def step(self, rows: Sequence[LiveRequest | None], now: float, steps: int) -> None:
        """Called in steps without drafts, `steps` after the last call; mostly returns at once."""
        if self._speculation.limits.mode != "auto":
            return
        if self._waiting:
            self._wait_steps -= steps
            if self._wait_steps > 0:
                return
            self._compare()
        if now < self._due_s:
            return
        self._look_up(rows)
        clock = self._speculation._clock
        self._due_s = clock() + max(MIN_INTERVAL_S, (clock() - now) / MAX_SHARE)

    def _look_up(self, rows: Sequence[LiveRequest | None]) -> None:
        speculation = self._speculation
        candidates = [r for r in rows if r is not None and not r.refused and r.outputs]
        if not candidates:
            return
        start = self._first_row % len(candidates)
        picked = (candidates[start:] + candidates[:start])[:PROBE_ROWS]
        self._first_row += PROBE_ROWS
        for request in picked:
            speculation.texts.catch_up(request)
        picked = [request for request in picked if not request.refused]
        batch, kinds = speculation.look_up(picked, np.full(len(picked), PROBE_TOKENS, dtype=np.int32))
        speculation.counts.shadow_lookups += len(picked)
        speculation.observe_mix(kinds)
        for row, (request, kind) in enumerate(zip(picked, kinds, strict=True)):
            if kind >= 0:
                tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tolist()
                self._waiting.append(_Shadow(request, len(request.outputs), tokens, kind))
        self._wait_steps = PROBE_TOKENS + 1

    def _compare(self) -> None:
        """What the model said since, against what would have been drafted."""
        acceptance = self._speculation.planner.acceptance
        for shadow in self._waiting:
            said = shadow.request.outputs[shadow.at : shadow.at + len(shadow.tokens)]
            accepted = 0
            while accepted < len(said) and said[accepted] == shadow.tokens[accepted]:
                accepted += 1
            acceptance.observe(shadow.kind, len(said), accepted)
        self._waiting = []
