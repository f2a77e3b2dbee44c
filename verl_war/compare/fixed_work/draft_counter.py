"""Counts what an engine drafts, the same way for WAR's drafts and for vLLM's own."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

_drafted_tokens = 0
_accepted_tokens = 0


def counts() -> tuple[int, int]:
    """Draft tokens verified and accepted by the engines of this process."""
    return _drafted_tokens, _accepted_tokens


class DraftCounter(StatLoggerBase):
    """vLLM's statistics of verified drafts, summed."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        pass

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for every engine iteration."""
        global _drafted_tokens, _accepted_tokens
        if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
            _drafted_tokens += scheduler_stats.spec_decoding_stats.num_draft_tokens
            _accepted_tokens += scheduler_stats.spec_decoding_stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Called by vLLM once the engine is up."""
