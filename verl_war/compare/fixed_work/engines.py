"""Real vLLM engines on one machine, each in a Ray actor that serves turns as WAR's server does in a training run.

Only what surrounds the server in training is missing: no trainer, no weights' updates. `WarHttpServer` generates, gives
readings to the router and exchanges history; with `kind="plain"` nothing of WAR is in the engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray

from verl_war.compare.fixed_work.arms import SPECULATION, EngineKind
from verl_war.core.config import WarConfig, parse_war_config

BLOCK_TOKENS = 64
"""Tokens of a KV block; the simulator's."""
MAX_NUM_BATCHED_TOKENS = 512
MAX_NUM_SEQS = 64

MEMORY_EVERY_S = 1.0
"""How often the memory of an engine is looked at: a look takes milliseconds, and it grows over seconds."""

ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""One thread for each model: two on contended cores ran 25 times slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is started with.

    Attributes:
        model: Directory of a checkpoint, or of a configuration alone with `load_format="dummy"`.
        kv_tokens: Capacity of its KV cache.
        max_model_len: Longest context.
    """

    model: str
    kv_tokens: int
    max_model_len: int
    kind: EngineKind = "plain"
    load_format: str = "auto"
    dtype: str = "float32"

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `AsyncEngineArgs`."""
        arguments: dict[str, Any] = {
            **{"model": self.model, "load_format": self.load_format, "dtype": self.dtype, "skip_tokenizer_init": True},
            **{"enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": True},
            **{"max_model_len": self.max_model_len, "max_num_seqs": MAX_NUM_SEQS, "block_size": BLOCK_TOKENS},
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            # vLLM keeps one block for itself.
            "num_gpu_blocks_override": self.kv_tokens // BLOCK_TOKENS + 1,
            "worker_extension_cls": "verl_war.compare.fixed_work.engine_worker.ReplayWorkerExtension",
        }
        if self.kind == "sync":
            arguments["async_scheduling"] = False
        if self.kind == "priority":
            arguments["scheduling_policy"] = "priority"
        if self.kind in ("war", "suffix"):
            arguments |= _drafting(self.kind)
        return arguments


def _drafting(kind: EngineKind) -> dict[str, Any]:
    from verl_war.integration.verl.replica_history import engine_settings
    from verl_war.integration.vllm.proposer import engine_options

    speculation = parse_war_config(SPECULATION).speculation
    if kind == "war":
        return engine_options(engine_settings(speculation), speculation.max_draft_tokens)
    longest = speculation.max_draft_tokens
    return {"speculative_config": {"method": "suffix", "num_speculative_tokens": longest}}


def machine_dtype() -> str:
    """bfloat16 where the processor multiplies it, float32 elsewhere: emulated it takes several times as long."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


class _Attributes(SimpleNamespace):
    """Configuration of a server: attributes that can also be asked for by name."""

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute of that name."""
        return getattr(self, key, default)


class ReplayServer:
    """Ray actor: one replica."""

    def __init__(self, rank: int, spec: EngineSpec) -> None:
        import verl  # noqa: F401 - its plugins
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from verl_war.compare.fixed_work.draft_counter import DraftCounter
        from verl_war.integration.verl.replica import WarHttpServer
        from verl_war.integration.vllm import telemetry

        telemetry.activate(export_prometheus=False)
        arguments = AsyncEngineArgs(seed=rank, **spec.arguments())
        server = WarHttpServer.__new__(WarHttpServer)
        server.engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[DraftCounter])
        server.replica_rank, server.global_steps, server._history, server._turns = rank, 0, None, {}
        server.node_rank = 0
        server._disaggregation_role, server._submission_paused, server._admitting = "null", False, 0
        length = spec.max_model_len
        server.config = _Attributes(max_model_len=length, response_length=length, prompt_length=length, mtp=None,
                                    full_determinism=False, enable_rollout_routing_replay=False)  # fmt: skip
        server.model_config = _Attributes(processor=None, lora_rank=0, lora={})
        self._server = server
        self._kind = spec.kind
        self._peak_rss_bytes = 0
        self._watching: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Answer once the engine serves with all patches that it needs."""
        await self._server.engine.collective_rpc("replay_check")
        self._watching = asyncio.create_task(self._watch_memory())

    async def prepare(self, arm: str, config: WarConfig, step: int, texts: Sequence[Any] = ()) -> None:
        """Begin a run with an empty prefix cache; see `ReplayWorkerExtension.replay_prepare`.

        Raises:
            RuntimeError: Requests of an earlier run are still there.
        """
        from verl_war.integration.verl.replica_history import ReplicaHistory, engine_settings

        engine = self._server.engine
        if not await engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: requests are still running")
        await self.war_share_with([])
        speculation = config.speculation
        settings = engine_settings(speculation) if speculation.enabled and self._kind == "war" else None
        await engine.collective_rpc("replay_prepare", args=(arm, settings, step, list(texts)))
        rank = self._server.replica_rank
        self._server._history = ReplicaHistory(engine, speculation, rank) if settings is not None else None
        self._server.global_steps = step
        self._peak_rss_bytes = 0

    async def generate(self, **request: Any) -> Any:
        """One turn."""
        return await self._server.generate(**request)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> Any:
        """Give a turn up."""
        return await self._server.abort_request(request_id, reset_prefix_cache=reset_prefix_cache)

    async def drafts(self) -> tuple[int, int]:
        """Draft tokens verified and accepted since the engine started."""
        from verl_war.compare.fixed_work.draft_counter import counts

        return counts()

    async def peak_rss_bytes(self) -> int:
        """Most memory of the replica's processes together in this run, pages that they share counted for each."""
        self._look_at_memory()
        return self._peak_rss_bytes

    async def war_snapshot(self) -> Any:
        """Readings for the router."""
        return await self._server.war_snapshot()

    async def war_check_alive(self) -> None:
        """For the router."""
        await self._server.war_check_alive()

    async def war_wait_for_engine(self) -> None:
        """For the router."""
        await self._server.war_wait_for_engine()

    async def war_speculation_stats(self) -> dict[str, Any] | None:
        """For the router."""
        return await self._server.war_speculation_stats()

    async def war_share_with(self, peers: list[Any]) -> None:
        """For the router."""
        await self._server.war_share_with(peers)

    async def war_history_apply(self, batch: bytes) -> None:
        """For other replicas."""
        await self._server.war_history_apply(batch)

    async def _watch_memory(self) -> None:
        while True:
            self._look_at_memory()
            await asyncio.sleep(MEMORY_EVERY_S)

    def _look_at_memory(self) -> None:
        process = psutil.Process(os.getpid())
        rss_bytes = process.memory_info().rss
        for child in process.children(recursive=True):
            try:
                rss_bytes += child.memory_info().rss
            except psutil.NoSuchProcess:  # it has just ended
                continue
        self._peak_rss_bytes = max(self._peak_rss_bytes, rss_bytes)


async def start_servers(
    spec: EngineSpec, replicas: int, environment: Mapping[str, str] = ENVIRONMENT
) -> dict[str, Any]:
    """Start replicas; returns their handles by name once all of them serve."""
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": dict(environment)}, max_concurrency=1000)(ReplayServer)
    servers = {f"r{rank}": actor.remote(rank, spec) for rank in range(replicas)}
    await asyncio.gather(*(server.check.remote() for server in servers.values()))
    return servers


def stop_servers(servers: Mapping[str, Any]) -> None:
    """End replicas, whatever they are doing."""
    for server in servers.values():
        ray.kill(server)
