"""Engine telemetry with vLLM's real statistics objects."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.upstream

SCRIPT = """
from types import SimpleNamespace
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
import verl_war.integration.vllm.plugin as plugin
plugin.register()
from verl_war.integration.vllm import telemetry

assert loggers.load_stat_logger_plugin_factories() == [], "an engine that does not serve WAR gets nothing"
try:
    telemetry.snapshot()
except RuntimeError as error:
    assert "vllm_stat_logger" in str(error)
else:
    raise AssertionError("no engine, but a snapshot")

telemetry.activate(export_prometheus=False)
(factory,) = loggers.load_stat_logger_plugin_factories()
config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16))
manager_view = factory(vllm_config=config, engine_indexes=[0])
assert isinstance(manager_view, loggers.PrometheusStatLogger), "vLLM would add its own"

def record(usage, preempted):
    iteration = IterationStats()
    iteration.num_preempted_reqs = preempted
    manager_view.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=usage), iteration)

record(0.75, 2)
record(0.25, 1)
manager_view.record(None, None)
first, second = telemetry.snapshot(), telemetry.snapshot()
assert (first.running_requests, first.waiting_requests, first.kv_usage, first.kv_usage_peak) == (3, 1, 0.25, 0.75)
assert (first.kv_capacity_tokens, first.preemptions, first.engine_steps) == (160, 3, 2)
assert second.kv_usage_peak == 0.25, "the peak's window starts anew"
"""


def test_readings_of_an_engine():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
