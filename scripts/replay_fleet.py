"""Two real vLLM replicas with a model of random weights, for `bench_placement`.

Every turn generates exactly the tokens that the trace says, so what they are does not matter. Engines, routers and
agent loops are those of `verl-war compare --mode fixed-work`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_war.compare.fixed_work.arms import Arm
from verl_war.compare.fixed_work.engines import EngineSpec, start_servers
from verl_war.compare.fixed_work.replay import Engines, Step, replay
from verl_war.compare.fixed_work.results import Replayed
from verl_war.compare.fixed_work.texts import RandomTexts
from verl_war.sim.trace import TrajectorySpec

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 8192

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


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


class Fleet:
    """The replicas.

    Args:
        engines: Their handles.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._steps = 0

    @classmethod
    async def start(cls, directory: Path, replicas: int, kv_tokens: int) -> Fleet:
        """Start them, each with one thread for its model."""
        (directory / "config.json").write_text(json.dumps(MODEL))
        spec = EngineSpec(model=str(directory), kv_tokens=kv_tokens, max_model_len=MAX_MODEL_LEN, load_format="dummy")
        return cls(Engines(servers=await start_servers(spec, replicas), kv_tokens=kv_tokens))

    async def replay(self, arm: Arm, specs: Sequence[TrajectorySpec], seed: int) -> Replayed:
        """Run all trajectories from empty caches until the last has ended."""
        self._steps += 1
        step = Step(specs=specs, texts=RandomTexts(VOCAB_SIZE), number=self._steps, seed=seed)
        return await replay(arm, self._engines, step)

    async def work(self, arm: Arm, specs: Sequence[TrajectorySpec], seed: int) -> list[dict[str, float]]:
        """The same; returns the work of each replica in it."""
        before = await self._snapshots()
        done = await self.replay(arm, specs, seed)
        after = await self._snapshots()
        rows = []
        for name, snapshot in after.items():
            work = Work(steps=snapshot.engine_steps - before[name].engine_steps, busy_s=done.busy_s[name])
            for turn in done.turns:
                if turn.replica_id == name:
                    work.add(turn.prompt_tokens, turn.cached_tokens, turn.output_tokens)
            rows.append(asdict(work))
        return rows

    async def _snapshots(self) -> dict[str, Any]:
        servers = self._engines.servers
        return dict(
            zip(servers, await asyncio.gather(*(it.war_snapshot.remote() for it in servers.values())), strict=True)
        )
