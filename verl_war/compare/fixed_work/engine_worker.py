"""What a replay does inside an engine's worker, between two runs: forget, remember an earlier step, speculate or not.

Runs share engines, so nothing of one may help the next: neither its text nor, in another arm, what was measured of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_war.compare.fixed_work.results import EarlierText
from verl_war.history.index import stable_id
from verl_war.integration.vllm.proposer import drafter_of
from verl_war.integration.vllm.speculation_drafter import Drafter
from verl_war.integration.vllm.worker import SpeculationCalls
from verl_war.patches import registry

OFF: Mapping[str, Any] = {"mode": "off"}


class ReplayWorkerExtension(SpeculationCalls):
    """Worker extension of the engines of a replay."""

    vllm_config: Any
    _drafters: dict[str, Drafter]

    def replay_check(self) -> None:
        """Raise when a patch that this worker's platform needs is not in force here."""
        registry.check()

    def replay_prepare(
        self, arm: str, settings: Mapping[str, Any] | None, step: int, texts: Sequence[EarlierText]
    ) -> None:
        """Begin a run.

        Args:
            arm: Its name; step times and acceptance that an earlier run of the same arm has measured stay known, as
                they would from one training step to the next.
            settings: Speculation of an engine with WAR's drafts; None switches it off. Others ignore it.
            step: Policy step of the run, far above that of the run before, whose text is forgotten by that.
            texts: Text of the step before.
        """
        if drafter_of(self.model_runner) is not None:
            self._prepare_war(arm, settings, step, texts)
        elif "drafter" in vars(self.model_runner):
            self._prepare_suffix(step, texts)

    def _prepare_war(
        self, arm: str, settings: Mapping[str, Any] | None, step: int, texts: Sequence[EarlierText]
    ) -> None:
        if "_drafters" not in vars(self):
            self._drafters = {}
        drafter = self._drafters.get(arm)
        if drafter is None:
            drafter = self._drafters[arm] = Drafter(self.vllm_config, OFF if settings is None else settings)
        drafter.on_policy_step(step, {})
        self.model_runner.drafter.war = drafter
        for trajectory, group, prompt_tokens, tokens, _ in texts:
            key, text = stable_id(f"{trajectory}@{step - 1}"), np.asarray(tokens, dtype=np.int32)
            drafter.store.begin(key, stable_id(group), step - 1, text[:prompt_tokens])
            drafter.store.append(key, text[prompt_tokens:])
            drafter.store.finish(key)

    def _prepare_suffix(self, step: int, texts: Sequence[EarlierText]) -> None:
        runner = self.model_runner
        runner.drafter = type(runner.drafter)(self.vllm_config)
        cache = runner.drafter.suffix_cache
        for trajectory, _, _, tokens, turns in texts:
            for number, (context, generated) in enumerate(turns):
                request = f"{trajectory}@{step - 1}/{number}"
                cache.start_request(request, np.asarray(tokens[:context], dtype=np.int32))
                cache.add_active_response(request, tokens[context : context + generated])
                cache.stop_request(request)
