"""One turn on a replica, and a replica's totals."""

from __future__ import annotations

from dataclasses import dataclass

from verl_war.sim.draft_world import TurnDrafts
from verl_war.sim.kv_cache import Path


class Request:
    """One turn on a replica.

    Attributes:
        path: Its context in the prefix cache; the last part is its own.
        cached_tokens: Prompt tokens found cached when it was first scheduled, vLLM's `num_cached_tokens`.
        generated: Tokens sampled so far; they survive a preemption.
        computed: Tokens of the context whose KV is computed, valid while it prefills.
        decode_context, decode_begin: Context and step counter at which it began to decode; accepted draft tokens count
            as if it had begun with them.
        drafts: What look-ups find in its text; None where nothing drafts.
    """

    __slots__ = (
        "key", "path", "prompt_tokens", "output_tokens", "priority", "order", "cached_tokens", "generated", "computed",
        "decode_context", "decode_begin", "decoding", "admission", "drafts",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        path: Path,
        prompt_tokens: int,
        output_tokens: int,
        priority: int = 0,
        drafts: TurnDrafts | None = None,
    ) -> None:
        self.key = key
        self.path = path
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.priority = priority
        self.order = 0
        self.cached_tokens = -1
        self.generated = 0
        self.computed = 0
        self.decode_context = 0
        self.decode_begin = 0
        self.decoding = False
        self.admission = -1
        self.drafts = drafts

    @property
    def known_drafts(self) -> TurnDrafts:
        """What look-ups find; for replicas that draft."""
        assert self.drafts is not None
        return self.drafts

    def position(self, step: int) -> int:
        """Tokens sampled before this step, while it decodes."""
        return self.generated + step - self.decode_begin

    def context(self, step: int) -> int:
        """Tokens whose KV is computed before this step, while it decodes."""
        return self.decode_context + step - self.decode_begin

    @property
    def target(self) -> int:
        """Tokens to compute before it decodes (again)."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Counters:
    """Totals of a replica since it started."""

    engine_steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_token_steps: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    used_blocks_peak: int = 0

    def since(self, before: Counters) -> Counters:
        """What was added since, the peak excepted."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in self.__slots__}
        return Counters(**grown | {"used_blocks_peak": self.used_blocks_peak})
