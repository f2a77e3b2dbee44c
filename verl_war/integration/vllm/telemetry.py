"""Engine readings for the router, taken by a vLLM stat logger in the server's process.

The logger is handed to the engine by the patch `vllm_stat_logger`, and only after `activate()`, so that
an engine that does not serve WAR pays nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from verl_war.core.types import ReplicaSnapshot

_export_prometheus: bool | None = None
_active: EngineTelemetry | None = None


def activate(export_prometheus: bool) -> None:
    """Have the next engine of this process report. Called before the engine is made."""
    global _export_prometheus
    _export_prometheus = export_prometheus


def stat_logger_factories() -> list[type]:
    """What the engine is given: the logger after `activate()`, nothing otherwise."""
    return [] if _export_prometheus is None else [EngineTelemetry]


def snapshot() -> ReplicaSnapshot:
    """Readings of this process's engine. Starts a new window for the KV usage peak.

    Raises:
        RuntimeError: No engine has reported to this process.
    """
    if _active is None:
        raise RuntimeError("no engine reports its statistics in this process: the patch vllm_stat_logger did not apply")
    return _active.take_snapshot()


class EngineTelemetry(PrometheusStatLogger):
    """Keeps the latest scheduler statistics and counts preemptions.

    It derives from vLLM's Prometheus logger because vLLM adds that one, at about 95 us a step, unless a
    given logger already is one (vllm/v1/metrics/loggers.py:1370, 0.27.1). With `disable_log_stats` nobody
    reads Prometheus, so its part is left out.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        global _active
        self._export = bool(_export_prometheus)
        if self._export:
            super().__init__(vllm_config, engine_indexes)
        cache = vllm_config.cache_config
        self._kv_capacity_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._scheduler: dict[int, SchedulerStats] = {}
        self._kv_usage_peak = 0.0
        self._preemptions = 0
        self._engine_steps = 0
        _active = self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for every engine iteration."""
        if scheduler_stats is not None:
            self._engine_steps += 1
            self._scheduler[engine_idx] = scheduler_stats
            self._kv_usage_peak = max(self._kv_usage_peak, scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if self._export:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once the engine is up."""
        if self._export:
            super().log_engine_initialized()

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Called by vLLM when the engine sleeps or wakes."""
        if self._export:
            super().record_sleep_state(sleep, level)

    def take_snapshot(self) -> ReplicaSnapshot:
        """Readings now; over data-parallel engines counts add up and the usage is the mean."""
        engines = list(self._scheduler.values())
        usage = sum(stats.kv_cache_usage for stats in engines) / max(1, len(engines))
        peak, self._kv_usage_peak = self._kv_usage_peak, usage
        return ReplicaSnapshot(
            running_requests=sum(stats.num_running_reqs for stats in engines),
            waiting_requests=sum(stats.num_waiting_reqs for stats in engines),
            kv_usage=usage,
            kv_usage_peak=max(peak, usage),
            kv_capacity_tokens=self._kv_capacity_tokens,
            preemptions=self._preemptions,
            engine_steps=self._engine_steps,
        )
