"""WAR's half of the proposer: gives drafts to the engine, and keeps every error in drafting away from it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from verl_war.core.config_parsing import parse
from verl_war.core.history_config import HISTORY_KEY, SHARE_BYTES_PER_S, HistoryConfig
from verl_war.core.speculation_limits import SPECULATION_KEY, SpeculationLimits, change_limits
from verl_war.core.step_time import StepTime
from verl_war.history.store import HistoryStore
from verl_war.integration.vllm.speculation import Speculation
from verl_war.integration.vllm.speculation_exchange import HistoryExchange
from verl_war.integration.vllm.speculation_step import KvRoom, StepInput
from verl_war.integration.vllm.speculation_text import LiveRequest, describe

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
"""What decides which text a token id stands for."""


def make_store(vllm_config: VllmConfig, settings: Mapping[str, Any]) -> HistoryStore:
    """The history of one worker.

    Raises:
        ValueError: A setting is unknown or out of range.
    """
    model = vllm_config.model_config
    return HistoryStore(
        parse(HistoryConfig, settings, HISTORY_KEY),
        vocab_size=model.get_vocab_size(),
        fingerprint=fingerprint(str(model.tokenizer), model.get_vocab_size()),
    )


def fingerprint(tokenizer: str, vocab_size: int) -> str:
    """Identity of the token ids: the tokenizer's files where it is a folder, its name where it is not."""
    digest = hashlib.blake2b(str(vocab_size).encode(), digest_size=16)
    files = [path for name in TOKENIZER_FILES if (path := Path(tokenizer) / name).is_file()]
    for path in files:
        digest.update(path.read_bytes())
    if not files:
        digest.update(tokenizer.encode())
    return digest.hexdigest()


def held_blocks(table: Any, rows: int) -> int:
    """KV blocks in the first `rows` of one of vLLM's block tables; those that rows share count once."""
    ids, counts = table.block_table.np[:rows], table.num_blocks_per_row[:rows]
    held = ids[np.arange(ids.shape[1]) < counts[:, None]]
    return len(np.unique(held)) // int(table.blocks_per_kv_block)


class Drafter:
    """Drafts of one worker; an error in drafting ends drafting, never decoding."""

    def __init__(self, vllm_config: VllmConfig, settings: Mapping[str, Any]) -> None:
        """Make the index and the planner.

        Raises:
            ValueError: A setting is unknown or out of range.
        """
        settings = dict(settings)
        self.store = make_store(vllm_config, settings.pop("history", {}))
        self.exchange = HistoryExchange(self.store, settings.pop("share_bytes_per_s", SHARE_BYTES_PER_S))
        self.max_model_len = vllm_config.model_config.max_model_len
        self._block_tokens = vllm_config.cache_config.block_size
        raw = settings.pop("step_time", None)
        self._prior = None if raw is None else parse(StepTime, raw, f"{SPECULATION_KEY}.step_time")
        self.speculation = Speculation(self.store, change_limits(SpeculationLimits(), settings), prior=self._prior)
        self.disabled = ""
        self.faults = 0
        # Drafts are taken from the first rank of a tensor-parallel group; the others would look up in vain.
        self.drafts_here = get_tp_group().rank_in_group == 0
        self._runner: Any = None

    @property
    def is_active(self) -> bool:
        """Whether this worker drafts; after an error its text is neither added to nor aged."""
        return self.drafts_here and not self.disabled

    def attach(self, runner: Any) -> None:
        """Called by the model runner before every proposal; it holds the requests' sampling parameters."""
        self._runner = runner

    def propose(self, max_tokens: int, input_batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Drafts for every row of the batch; none, for good, after the first error in drafting."""
        if not self.is_active or self.speculation.rests(input_batch.req_ids):
            return [[] for _ in sampled]
        try:
            return self.speculation.step(self._step_input(input_batch, sampled), max_tokens)
        # Whatever it is: drafting is an optimisation, and the tokens of the model do not depend on it.
        except Exception as error:
            self._disable(error)
            return [[] for _ in sampled]

    def set_limits(self, params: Mapping[str, Any]) -> None:
        """New limits from the next step on. Naming a `mode` other than off ends a stop after an error.

        Raises:
            ValueError: A parameter is unknown or out of range; nothing changes then.
        """
        old = self.speculation.limits
        self.speculation.change(params)
        if old.mode != self.speculation.limits.mode:
            logger.info("speculation: %s -> %s (told to)", old.mode, self.speculation.limits.mode)
        if self.disabled and params.get("mode", "off") != "off":
            logger.info("speculation: off -> %s (told to, after %s)", params["mode"], self.disabled)
            self.disabled = ""
            self.speculation = Speculation(self.store, self.speculation.limits, prior=self._prior)

    def on_policy_step(self, step: int, rewards: Mapping[str, float]) -> None:
        """The weights are those of policy step `step` from now on; see `Speculation.on_policy_step`."""
        if self.disabled:
            return
        try:
            self.speculation.on_policy_step(step, rewards)
        except Exception as error:  # as in `propose`
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self.faults += 1
        self.disabled = f"{type(error).__name__}: {error}"
        logger.exception(
            "speculation: on -> off (error in drafting; decoding goes on without drafts until "
            "war_set_speculation names a mode)"
        )

    def report(self) -> dict[str, Any]:
        """Counters and what is in force; see `Speculation.report`."""
        report = self.speculation.report()
        report.update(faults=self.faults, disabled=self.disabled or report["watchdog"])
        report.update((f"exchange/{name}", value) for name, value in self.exchange.stats().items())
        return report

    def _step_input(self, batch: Any, sampled: list[list[int]]) -> StepInput:
        num_tokens = batch.num_tokens_no_spec[: len(sampled)]
        return StepInput(
            req_ids=batch.req_ids,
            num_tokens=num_tokens,
            sampled=sampled,
            verified_tokens=lambda row: len(batch.spec_token_ids[row]),
            describe=lambda row: self._describe(batch, row),
            is_alive=self._runner.requests.__contains__,
            kv=self._kv_room(batch, len(sampled)),
        )

    def _kv_room(self, batch: Any, rows: int) -> KvRoom:
        tables, num_blocks = batch.block_table.block_tables, self._runner.kv_cache_config.num_blocks
        block_tokens = self._block_tokens

        def free_tokens() -> int:
            held = sum(held_blocks(table, rows) for table in tables)
            return int((num_blocks - held) // len(tables) * block_tokens)

        # A token takes a block of every group of layers.
        return KvRoom(
            capacity_tokens=num_blocks // len(tables) * block_tokens,
            block_tokens=block_tokens,
            free_tokens=free_tokens,
        )

    def _describe(self, batch: Any, row: int) -> LiveRequest | None:
        req_id = batch.req_ids[row]
        state = self._runner.requests[req_id]
        params = state.sampling_params
        if params is None or state.prompt_token_ids is None:
            return None  # pooling, or a prompt of embeddings: there is no text
        try:
            name, group, step = describe(req_id, params.extra_args)
        except ValueError as error:
            self.speculation.texts.note_refusal(error)
            return None
        prompt_tokens = int(batch.num_prompt_tokens[row])
        eos = params.eos_token_id
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, prompt_tokens + params.max_tokens)
        return LiveRequest(
            name=name,
            group=group,
            step=step,
            prompt=np.array(batch.token_ids_cpu[row, :prompt_tokens], dtype=np.int32),
            outputs=state.output_token_ids,
            limit_tokens=limit,
            free_tokens=prompt_tokens + params.min_tokens,
            stop_ids=frozenset((*(params.stop_token_ids or ()), *([] if eos is None else [eos]))),
        )
