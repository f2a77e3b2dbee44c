"""Two real vLLM replicas on one CPU machine, and trajectories that are replayed on them: for `bench_placement`.

The replicas are WAR's servers around vLLM's engine, the routers and clients verl's own or WAR's; only what surrounds
them in a training run is missing. The model is of Qwen2's architecture with random weights: every turn generates
exactly the tokens that the trace says, so what they are does not matter.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from verl_war.sim.trace import TrajectorySpec

VOCAB_SIZE = 4096
BLOCK_TOKENS = 64
"""Tokens of a KV block; the simulator's."""
MAX_NUM_BATCHED_TOKENS = 512
MAX_NUM_SEQS = 64

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class Attributes(SimpleNamespace):
    """Configuration of a server: attributes that can also be asked for by name."""

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute of that name."""
        return getattr(self, key, default)


@dataclass(slots=True)
class Work:
    """Work of one replica and the time that it took.

    Attributes:
        steps: Engine iterations.
        decodes: Tokens generated behind the first of a turn.
        prefill_tokens: Prompt tokens computed.
        prefill_pairs: Pairs of a computed prompt token and a context token before it.
        decode_kv_tokens: Context tokens read by decodes, summed.
        busy_s: Time of the iterations.
    """

    steps: float = 0
    decodes: float = 0
    prefill_tokens: float = 0
    prefill_pairs: float = 0
    decode_kv_tokens: float = 0
    busy_s: float = 0.0

    def add(self, prompt: int, cached: int, generated: int) -> None:
        """Count a turn. What a preemption made the engine compute again is not in it."""
        self.decodes += generated - 1
        self.prefill_tokens += prompt - cached
        self.prefill_pairs += (prompt * (prompt + 1) - cached * (cached + 1)) / 2
        self.decode_kv_tokens += (generated - 1) * (prompt + generated / 2)

    def since(self, before: Work) -> dict[str, float]:
        """What came since then."""
        return {name: value - getattr(before, name) for name, value in asdict(self).items()}


class ReplayServer:
    """Ray actor: WAR's server of one replica."""

    def __init__(self, rank: int, model: str, kv_blocks: int) -> None:
        import verl  # noqa: F401 - its plugins
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from verl_war.integration.verl.replica import WarHttpServer
        from verl_war.integration.vllm import telemetry

        telemetry.activate(export_prometheus=False)
        arguments = AsyncEngineArgs(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=MODEL["max_position_embeddings"], max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_TOKENS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, num_gpu_blocks_override=kv_blocks, disable_log_stats=True,
            enable_prefix_caching=True, seed=rank,
        )  # fmt: skip
        server = WarHttpServer.__new__(WarHttpServer)
        server.engine = AsyncLLM.from_engine_args(arguments)
        server.replica_rank, server.global_steps, server._history = rank, 0, None
        server._disaggregation_role, server._submission_paused, server._admitting = "null", False, 0
        server.config = Attributes(max_model_len=8192, response_length=8192, prompt_length=8192, mtp=None,
                                   full_determinism=False, enable_rollout_routing_replay=False)  # fmt: skip
        server.model_config = Attributes(processor=None, lora_rank=0, lora={})
        self._server = server
        self._work = Work()

    async def generate(self, prompt_ids: list[int], **request: Any) -> Any:
        """One turn."""
        output = await self._server.generate(prompt_ids=prompt_ids, **request)
        self._work.add(len(prompt_ids), output.extra_fields["num_cached_tokens"], len(output.token_ids))
        return output

    async def work(self) -> Work:
        """What the turns have cost since the start, and the engine's time for it."""
        snapshot = await self._server.war_snapshot()
        return replace(self._work, steps=snapshot.engine_steps, busy_s=snapshot.busy_s)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> Any:
        """Give a turn up."""
        return await self._server.abort_request(request_id, reset_prefix_cache=reset_prefix_cache)

    async def war_snapshot(self) -> Any:
        """Readings for the router."""
        return await self._server.war_snapshot()

    async def war_check_alive(self) -> None:
        """For the router."""
        await self._server.war_check_alive()

    async def clear(self) -> None:
        """Forget the prefix cache."""
        if not await self._server.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: requests are still running")


def start_servers(directory: Path, replicas: int, kv_blocks: int) -> dict[str, Any]:
    """Start the replicas, each with one thread for its model; returns their handles by name."""
    (directory / "config.json").write_text(json.dumps(MODEL))
    environment = {
        **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": environment}, max_concurrency=1000)(ReplayServer)
    servers = {f"r{rank}": actor.remote(rank, str(directory), kv_blocks) for rank in range(replicas)}
    ray.get([server.war_check_alive.remote() for server in servers.values()])
    return servers


def make_client(arm: str, servers: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, Any]:
    """Router and client of an arm: `stock` is verl's own pair, everything else WAR's with these settings."""
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from verl_war.integration.verl.client import war_client_of
    from verl_war.integration.verl.router import WarRouterActor

    rollout = {"name": "vllm", "full_determinism": False, "custom": {"war": settings}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    if arm == "stock":
        router = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers)
        return router, LLMServerClient(config=config, load_balancer_handle=router)
    router = WarRouterActor.remote(servers, {})
    return router, war_client_of(LLMServerClient(config=config, load_balancer_handle=router))


@dataclass(slots=True)
class Replayed:
    """What one replay came to."""

    makespan_s: float = 0.0
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    router_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    war: dict[str, float] = field(default_factory=dict)


async def replay(arm: str, servers: dict[str, Any], specs: Sequence[TrajectorySpec], settings: Any) -> Replayed:
    """Run all trajectories from empty caches until the last has ended."""
    await asyncio.gather(*(server.clear.remote() for server in servers.values()))
    before = await read(servers)
    router, client = make_client(arm, servers, settings)
    done = Replayed()
    await router.__ray_ready__.remote()  # its process starts up for seconds, in both arms
    if arm != "stock":
        await router.join.remote(client.war_config, False, "replay", None, None)
        await router.begin_step.remote(0, len(specs), sum(spec.group_id == specs[0].group_id for spec in specs))
    router_cpu_s = await router.__ray_call__.remote(_cpu_s)
    begin_s, client_cpu_s = time.perf_counter(), _cpu_s()
    await asyncio.gather(*(_trajectory(client, spec, done, arm != "stock") for spec in specs))
    done.makespan_s = time.perf_counter() - begin_s
    done.client_cpu_s = _cpu_s() - client_cpu_s
    done.router_cpu_s = await router.__ray_call__.remote(_cpu_s) - router_cpu_s
    if arm != "stock":
        done.war = await router.step_metrics.remote()
        client.link._listening.cancel()  # or it waits for the router to come back
    for name, snapshot in (await read(servers)).items():
        done.preemptions += snapshot.preemptions - before[name].preemptions
        done.busy_s[name] = snapshot.busy_s - before[name].busy_s
    ray.kill(router)
    return done


def _cpu_s(_actor: Any = None) -> float:
    """CPU time of this process."""
    return time.process_time()


async def read(servers: dict[str, Any]) -> dict[str, Any]:
    """Readings of all replicas."""
    return dict(zip(servers, await asyncio.gather(*(it.war_snapshot.remote() for it in servers.values())), strict=True))


async def _trajectory(client: Any, spec: TrajectorySpec, done: Replayed, is_war: bool) -> None:
    from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

    await asyncio.sleep(spec.start_s)
    identity = TrajectoryIdentity(
        trajectory_id=spec.trajectory_id, group_id=spec.group_id, policy_step=0, validate=False
    )
    current_trajectory.set(identity)
    context = prompt_of(spec)
    for number, turn in enumerate(spec.turns):
        sampling = {"max_tokens": turn.output_tokens, "ignore_eos": True, "temperature": 1.0}
        output = await client.generate(spec.trajectory_id, prompt_ids=context, sampling_params=sampling)
        if len(output.token_ids) != turn.output_tokens:
            raise RuntimeError(f"{spec.trajectory_id}: {len(output.token_ids)} tokens, expected {turn.output_tokens}")
        done.turns += 1
        done.prompt_tokens += len(context)
        done.output_tokens += turn.output_tokens
        done.cached_tokens += output.extra_fields["num_cached_tokens"]
        if number + 1 < len(spec.turns):
            await asyncio.sleep(turn.tool_s)
            context = context + output.token_ids + text(f"{spec.trajectory_id}/{number}", turn.tool_tokens)
    if is_war:
        client.end_trajectory(spec.trajectory_id, failed=False)


def prompt_of(spec: TrajectorySpec) -> list[int]:
    """First context: what all trajectories share, then what the group shares."""
    return text("system", spec.system_tokens) + text(spec.group_id, spec.prompt_tokens - spec.system_tokens)


def text(name: str, tokens: int) -> list[int]:
    """So many token ids, the same for the same name."""
    rng = random.Random(name)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(tokens)]
