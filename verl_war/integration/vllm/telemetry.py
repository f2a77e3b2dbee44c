"""Engine readings for the router, taken by a vLLM stat logger in the server's process.

The logger is handed to the engine by the patch `vllm_stat_logger`, and only after `activate()`, so that
an engine that does not serve WAR pays nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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


def snapshot(unfinished_requests: int) -> ReplicaSnapshot:
    """Readings of this process's engine. Starts a new window for the KV usage peak.

    Args:
        unfinished_requests: Those that the engine's front end knows. An engine whose requests were aborted while it is
            paused, as trainers do before a weight update, reports no iteration that would say so; nor does one that
            hung before it was given requests.

    Raises:
        RuntimeError: No engine has reported to this process.
    """
    if _active is None:
        raise RuntimeError("no engine reports its statistics in this process: the patch vllm_stat_logger did not apply")
    return _active.take_snapshot(unfinished_requests)


@dataclass(slots=True)
class EngineClock:
    """Seconds that one engine spends in iterations: the time between two reports of it while it has requests.

    Nothing reports the begin of an iteration, so the first one after a pause is timed from the arrival of a request
    that got its first token, as soon as one does: that iteration is the one that prefills.
    """

    busy_s: float = 0.0
    _last_s: float = 0.0
    _has_work: bool = False
    _began_s: float = 0.0
    _pause_s: float = 0.0
    """Of the pause before the current busy period, as far as its first iteration may reach into it; 0 = settled."""

    def on_report(self, now_s: float, has_work: bool, first_token_latencies_s: list[float]) -> None:
        """Take in the report of an iteration that has just ended.

        Args:
            now_s: Time of this process.
            has_work: Whether requests are left in the engine.
            first_token_latencies_s: Arrival to first token of the requests that got theirs in this iteration.
        """
        if self._has_work:
            self.busy_s += now_s - self._last_s
        elif self._last_s:
            self._began_s, self._pause_s = now_s, now_s - self._last_s
        else:
            self._began_s, self._pause_s = now_s, float("inf")
        if self._pause_s and first_token_latencies_s:
            before_s = max(first_token_latencies_s) - (now_s - self._began_s)
            self.busy_s += min(max(0.0, before_s), self._pause_s)
            self._pause_s = 0.0
        self._last_s, self._has_work = now_s, has_work

    def on_idle(self, now_s: float) -> None:
        """The engine was found without requests: a pause has begun."""
        if self._has_work:
            self._last_s, self._has_work = now_s, False


class EngineTelemetry(PrometheusStatLogger):
    """Keeps the latest scheduler statistics and sums of what the engine did.

    It derives from vLLM's Prometheus logger because vLLM adds that one, at about 95 us a step, unless a
    given logger already is one (vllm/v1/metrics/loggers.py:1370, 0.27.1). With `disable_log_stats` nobody
    reads Prometheus, so its part is left out. `record` then takes 0.6 us a step (measured by
    tests/integration/test_telemetry.py on a Xeon core, Python 3.11).
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
        self._computed_tokens = 0
        self._row_steps = 0
        self._kv_usage_steps = 0.0
        self._clocks: dict[int, EngineClock] = {}
        _active = self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for every engine iteration."""
        first_token_latencies_s: list[float] = []
        generated = 0
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            # A prompt is counted in the iteration that completes it, also when it was computed in chunks.
            generated = iteration_stats.num_generation_tokens
            self._computed_tokens += iteration_stats.prompt_token_stats.computed + generated
            first_token_latencies_s = iteration_stats.time_to_first_tokens_iter
        if scheduler_stats is not None:
            self._engine_steps += 1
            self._scheduler[engine_idx] = scheduler_stats
            usage = scheduler_stats.kv_cache_usage
            self._kv_usage_peak = max(self._kv_usage_peak, usage)
            self._kv_usage_steps += usage
            # What a request was given beyond one token came from drafts.
            drafts = scheduler_stats.spec_decoding_stats
            self._row_steps += max(0, generated - (drafts.num_accepted_tokens if drafts is not None else 0))
            # Contexts computed again after a preemption are in no request's prompt statistics.
            prefix = scheduler_stats.prefix_cache_stats
            self._computed_tokens += prefix.preempted_queries - prefix.preempted_hits
            clock = self._clocks.get(engine_idx)
            if clock is None:
                clock = self._clocks[engine_idx] = EngineClock()
            has_work = scheduler_stats.num_running_reqs > 0 or scheduler_stats.num_waiting_reqs > 0
            clock.on_report(time.perf_counter(), has_work, first_token_latencies_s)
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

    def take_snapshot(self, unfinished_requests: int) -> ReplicaSnapshot:
        """Readings now; over data-parallel engines counts add up and the usage is the mean."""
        if not unfinished_requests:
            for clock in self._clocks.values():
                clock.on_idle(time.perf_counter())
        engines = list(self._scheduler.values())
        usage = sum(stats.kv_cache_usage for stats in engines) / max(1, len(engines))
        peak, self._kv_usage_peak = self._kv_usage_peak, usage
        running = min(unfinished_requests, sum(stats.num_running_reqs for stats in engines))
        return ReplicaSnapshot(
            running_requests=running,
            waiting_requests=unfinished_requests - running,
            kv_usage=usage,
            kv_usage_peak=max(peak, usage),
            kv_capacity_tokens=self._kv_capacity_tokens,
            preemptions=self._preemptions,
            engine_steps=self._engine_steps,
            computed_tokens=self._computed_tokens,
            kv_token_steps=self._kv_usage_steps * self._kv_capacity_tokens,
            busy_s=sum(clock.busy_s for clock in self._clocks.values()),
            row_steps=float(self._row_steps),
        )
