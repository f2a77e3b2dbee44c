"""A real vLLM engine behind WAR's server: its readings, and what a client meets when it hangs or is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.e2e]

ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio, json, os, signal, sys, time
from types import SimpleNamespace
import verl  # its plugins
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from verl_war.integration.verl.failures import GONE_ERRORS, TURN_ERRORS
from verl_war.integration.verl.replica import WarHttpServer
from verl_war.integration.vllm import telemetry

MODEL, NO_STATS = sys.argv[1], sys.argv[2] == "True"

class Config(SimpleNamespace):
    get = lambda self, key, default=None: getattr(self, key, default)

def server_of(engine):
    server = WarHttpServer.__new__(WarHttpServer)
    server.engine, server.replica_rank, server.global_steps = engine, 0, 3
    server._disaggregation_role, server._submission_paused, server._admitting = "null", False, 0
    server.node_rank, server._turns, server._rejecting = 0, {}, False
    server._resume_event = asyncio.Event()
    server.config = Config(max_model_len=1024, response_length=600, prompt_length=400, full_determinism=False,
                           enable_rollout_routing_replay=False, mtp=None)
    server.model_config = Config(processor=None, lora_rank=0, lora={})
    return server

async def main():
    telemetry.activate(export_prometheus=not NO_STATS)
    arguments = AsyncEngineArgs(model=MODEL, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
                                disable_log_stats=NO_STATS, enable_prefix_caching=True)
    engine = AsyncLLM.from_engine_args(arguments)
    server = server_of(engine)
    def turn(request_id, tokens, prompt=tuple(20 + i % 60 for i in range(300))):
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": True}
        return server.generate(prompt_ids=list(prompt), sampling_params=params, request_id=request_id)
    seen = {}
    output = await turn("one", 30)
    first = await server.war_snapshot()
    output = await turn("two", 10)
    second = await server.war_snapshot()
    seen["answers"] = len(output.token_ids)
    seen["first"] = [first.computed_tokens, first.engine_steps, first.running_requests]
    seen["cached"] = output.extra_fields["num_cached_tokens"]
    seen["second_computed"] = second.computed_tokens - first.computed_tokens
    before, begin = second, time.perf_counter()
    await asyncio.gather(*(turn(f"many{i}", 100) for i in range(4)))
    took = time.perf_counter() - begin
    after = await server.war_snapshot()
    seen["busy_share"] = (after.busy_s - before.busy_s) / took
    await asyncio.sleep(1.0)
    seen["idle_busy_s"] = (await server.war_snapshot()).busy_s - after.busy_s
    seen["kv_per_step"] = (after.kv_token_steps - before.kv_token_steps) / (after.engine_steps - before.engine_steps)

    (pid,) = [process.pid for process in engine.engine_core.resources.engine_manager.processes]
    os.kill(pid, signal.SIGSTOP)
    late = asyncio.ensure_future(turn("late", 5))
    while (hung := await server.war_snapshot()).is_idle:
        await asyncio.sleep(0.01)
    seen["hung"] = [hung.running_requests, hung.waiting_requests]
    await server.abort_request("late", reset_prefix_cache=False)
    answer = asyncio.ensure_future(server.war_wait_for_engine())
    await asyncio.wait((answer,), timeout=2.0)
    seen["aborted"] = [(await server.war_snapshot()).is_idle, answer.done(), (await late).stop_reason]
    os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(answer, 60)

    server._submission_paused = True
    parked = asyncio.ensure_future(turn("parked", 5))
    await asyncio.sleep(0.1)
    answer = await server.abort_request("parked", reset_prefix_cache=False)
    await asyncio.wait((parked,), timeout=10)
    seen["parked"] = [answer["aborted"], parked.cancelled()]
    seen["unknown"] = (await server.abort_request("unknown", reset_prefix_cache=False))["aborted"]
    server._submission_paused = False

    doomed = asyncio.ensure_future(turn("doomed", 600))
    await asyncio.sleep(0.1)
    running = await server.war_snapshot()
    seen["running"] = running.running_requests
    os.kill(pid, signal.SIGKILL)
    async def error_of(call):
        try:
            await asyncio.wait_for(call, 60)
        except Exception as error:
            return [type(error).__name__, isinstance(error, GONE_ERRORS), isinstance(error, TURN_ERRORS), str(error)]
        return ["none", False, False, ""]
    seen["in flight"] = await error_of(doomed)
    seen["next"] = await error_of(turn("next", 5))
    seen["reading"] = await error_of(server.war_snapshot())
    seen["waiting"] = await error_of(server.war_wait_for_engine())
    print("SEEN" + json.dumps(seen), flush=True)
    os._exit(0)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("disable_log_stats", [True, False])
def test_an_engine_that_is_read_stopped_and_killed(tmp_path, disable_log_stats):
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    model = ROOT / "recipes" / "demo_model" / "checkpoint"
    environment = {
        **{"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }
    command = [sys.executable, str(script), str(model), str(disable_log_stats)]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
    lines = [line for line in result.stdout.splitlines() if line.startswith("SEEN")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    seen = json.loads(lines[0].removeprefix("SEEN"))
    print(seen)

    computed, steps, running = seen["first"]
    assert computed == 300 + 30 and 30 <= steps <= 32 and running == 0
    assert 0 < seen["cached"] < 300 and seen["second_computed"] == 300 - seen["cached"] + 10, "hits are not computed"
    assert 0.5 < seen["busy_share"] <= 1.05 and seen["idle_busy_s"] == 0.0
    # Four contexts of 300 to 400 tokens in blocks of 128, of which they share two.
    assert 256 + 4 * 100 < seen["kv_per_step"] < 4 * 512
    assert seen["hung"] == [0, 1], "a request that a stopped engine was given shows"
    assert seen["aborted"] == [True, False, "aborted"], "only the engine itself can say whether it goes on"
    assert seen["parked"] == [True, True], "one that waits at verl's gate never reaches the engine"
    assert seen["unknown"] is False
    assert seen["running"] == 1
    for met in ("in flight", "next", "reading", "waiting"):
        name, is_gone, is_retried, message = seen[met]
        assert (name, is_gone, is_retried) == ("ReplicaFailedError", True, True), seen[met]
        assert "engine of replica 0 is dead" in message
