"""Engine telemetry with vLLM's real statistics objects."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.upstream

PRELUDE = """
import time
from types import SimpleNamespace
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats
import verl_war.integration.vllm.plugin as plugin
plugin.register()
from verl_war.integration.vllm import telemetry

config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16))

def start():
    telemetry.activate(export_prometheus=False)
    (factory,) = loggers.load_stat_logger_plugin_factories()
    return factory(vllm_config=config, engine_indexes=[0])

def record(engine, usage=0.5, preempted=0, running=3, waiting=1, computed=0, generated=0, latencies=(), again=(0, 0),
           accepted=None):
    iteration = IterationStats()
    iteration.num_preempted_reqs = preempted
    iteration.prompt_token_stats.computed = computed
    iteration.num_generation_tokens = generated
    iteration.time_to_first_tokens_iter = list(latencies)
    scheduler = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)
    scheduler.prefix_cache_stats.preempted_queries, scheduler.prefix_cache_stats.preempted_hits = again
    if accepted is not None:
        scheduler.spec_decoding_stats = SpecDecodingStats(num_spec_tokens=4, num_accepted_tokens=accepted)
    engine.record(scheduler, iteration)
"""

READINGS = """
assert loggers.load_stat_logger_plugin_factories() == [], "an engine that does not serve WAR gets nothing"
try:
    telemetry.snapshot(unfinished_requests=1)
except RuntimeError as error:
    assert "vllm_stat_logger" in str(error)
else:
    raise AssertionError("no engine, but a snapshot")

engine = start()
assert isinstance(engine, loggers.PrometheusStatLogger), "vLLM would add its own"
record(engine, usage=0.75, preempted=2, computed=100, generated=1)
record(engine, usage=0.25, preempted=1, generated=3, again=(50, 20))
engine.record(None, None)
first, second = telemetry.snapshot(4), telemetry.snapshot(4)
assert (first.running_requests, first.waiting_requests, first.kv_usage, first.kv_usage_peak) == (3, 1, 0.25, 0.75)
assert (first.kv_capacity_tokens, first.preemptions, first.engine_steps) == (160, 3, 2)
assert first.computed_tokens == 100 + 1 + 3 + 30, "prefill, decode, and what a preemption had computed again"
assert first.kv_token_steps == 160.0
assert first.row_steps == 1 + 3
assert second.kv_usage_peak == 0.25, "the peak's window starts anew"
record(engine, usage=0.25, generated=9, accepted=6)
assert telemetry.snapshot(4).row_steps == 1 + 3 + 3, "what was accepted took no row of its own"
third = telemetry.snapshot(0)
assert third.is_idle and third.running_requests == 0, "aborted while the engine was paused"
record(engine, running=0, waiting=0)
fourth = telemetry.snapshot(2)
assert (fourth.running_requests, fourth.waiting_requests) == (0, 2) and not fourth.is_idle, "it hung while idle"
"""

BUSY = """
clock = telemetry.EngineClock()
clock.on_report(100.0, True, [])              # first chunk of a prefill that began at 97
clock.on_report(102.0, True, [5.0])           # its first token, 5 s after it arrived
assert clock.busy_s == 5.0
clock.on_report(103.0, False, [])             # done: 1 s more
assert clock.busy_s == 6.0
clock.on_report(110.0, True, [0.5])           # 7 s of pause but for the 0.5 s of the iteration that ended it
assert clock.busy_s == 6.5
clock.on_report(111.0, True, [100.0])         # a request that had waited: only the first of a busy period counts
assert clock.busy_s == 7.5
clock.on_idle(112.0)                          # its requests were aborted
clock.on_report(200.0, True, [1e9])           # never more than the pause
assert clock.busy_s == 7.5 + 88.0, clock.busy_s
clock.on_report(201.0, False, [])
clock.on_idle(250.0)
clock.on_report(300.0, True, [])
clock.on_report(301.0, True, [])
assert clock.busy_s == 7.5 + 88.0 + 2.0
"""

COST = """
import json
engine = start()
scheduler = SchedulerStats(num_running_reqs=64, num_waiting_reqs=8, kv_cache_usage=0.5)
iteration = IterationStats()
iteration.num_generation_tokens = 64
def seconds(count):
    begin_s = time.process_time()
    for _ in range(count):
        engine.record(scheduler, iteration)
    return (time.process_time() - begin_s) / count
seconds(1000)
print(json.dumps({"record_us": 1e6 * min(seconds(5000) for _ in range(7))}))
"""


def run(script):
    result = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("script", [READINGS, BUSY], ids=["readings", "busy seconds"])
def test_readings_of_an_engine(script):
    run(script)


def test_a_step_pays_microseconds():
    import json

    cost = json.loads(run(COST).splitlines()[-1])
    print(cost)
    assert cost["record_us"] < 50, "0.25% of a step of 20 ms, on a machine far slower than the one it was measured on"
