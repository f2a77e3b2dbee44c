"""WAR's half of the proposer: gives drafts to the engine, and keeps every error in drafting away from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from verl_war.core.speculation_limits import SpeculationLimits, change_limits
from verl_war.history.index import HistoryIndex
from verl_war.integration.vllm.proposer import CONFIG_KEY
from verl_war.integration.vllm.speculation import Speculation, StepInput
from verl_war.integration.vllm.speculation_text import LiveRequest, describe

logger = logging.getLogger(__name__)

HISTORY_BYTES = 512 << 20
"""Memory of one worker's index unless told otherwise: about 4 million tokens, several steps of 1,000 trajectories."""


def make_index(vllm_config: VllmConfig, max_bytes: int, sources: tuple[str, ...]) -> HistoryIndex:
    """The draft index of one worker."""
    return HistoryIndex(vocab_size=vllm_config.model_config.get_vocab_size(), max_bytes=max_bytes, sources=sources)


class Drafter:
    """Drafts of one worker; an error in drafting ends drafting, never decoding."""

    def __init__(self, vllm_config: VllmConfig, settings: Mapping[str, Any]) -> None:
        """Make the index and the planner.

        Raises:
            ValueError: A setting is unknown or out of range.
        """
        settings = dict(settings)
        history_bytes = settings.pop("history_bytes", HISTORY_BYTES)
        if type(history_bytes) is not int or history_bytes < 1 << 20:
            raise ValueError(f"{CONFIG_KEY}.history_bytes={history_bytes!r} must be an integer of at least 1 MiB")
        limits = change_limits(SpeculationLimits(), settings)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.speculation = Speculation(make_index(vllm_config, history_bytes, limits.sources), limits)
        self.disabled = ""
        self.faults = 0
        # Drafts are taken from the first rank of a tensor-parallel group; the others would look up in vain.
        self._drafts_here = get_tp_group().rank_in_group == 0
        self._runner: Any = None

    def attach(self, runner: Any) -> None:
        """Called by the model runner before every proposal; it holds the requests' sampling parameters."""
        self._runner = runner

    def propose(self, max_tokens: int, input_batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Drafts for every row of the batch; none, for good, after the first error in drafting."""
        if self.disabled or not self._drafts_here:
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
            self.speculation = Speculation(self.speculation.index, self.speculation.limits)

    def on_policy_step(self, step: int, window_steps: int) -> None:
        """The weights are those of policy step `step` from now on."""
        self._guarded(lambda: self.speculation.on_policy_step(step, window_steps))

    def end_trajectories(self, names: Sequence[str]) -> None:
        """These trajectories have ended."""
        self._guarded(lambda: [self.speculation.texts.finish_trajectory(name) for name in names])

    def _guarded(self, action: Callable[[], Any]) -> None:
        if self.disabled:
            return
        try:
            action()
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
        return report

    def _step_input(self, batch: Any, sampled: list[list[int]]) -> StepInput:
        num_tokens = batch.num_tokens_no_spec[: len(sampled)]
        return StepInput(
            req_ids=batch.req_ids,
            num_tokens=num_tokens,
            sampled=sampled,
            verified_tokens=lambda row: len(batch.spec_token_ids[row]),
            describe=lambda row: self._describe(batch, row),
        )

    def _describe(self, batch: Any, row: int) -> LiveRequest | None:
        req_id = batch.req_ids[row]
        state = self._runner.requests[req_id]
        params = state.sampling_params
        if params is None or state.prompt_token_ids is None:
            return None  # pooling, or a prompt of embeddings: there is no text
        name, group, step = describe(req_id, params.extra_args)
        prompt_tokens = int(batch.num_prompt_tokens[row])
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
        )
