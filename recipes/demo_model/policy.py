"""A local stand-in for verl's inference servers: transformers, one batch for all requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verl.workers.rollout.replica import TokenOutput

MAX_TURN_TOKENS = 256
"""The longest turns that the demo policy has learnt have about half as many; a turn that goes on is lost anyway."""
GATHER_S = 0.2
"""How long requests wait for others to share their batch; tools answer within a few hundredths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    prompt_ids: list[int]
    answer: asyncio.Future[list[int]]


class BatchingPolicy:
    """Samples the turns of concurrent episodes; has the ``generate`` of verl's LLM client.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        temperature: of all requests, above 0.
        seed: of the sampling; the order in which tools answer still decides who shares a batch.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, temperature: float, seed: int
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}, expected more than 0")
        self.model, self.tokenizer, self.temperature = model.eval(), tokenizer, temperature
        self._waiting: list[_Request] = []
        self._num_playing = 0
        self._arrival = asyncio.Event()
        self._entropy_sum, self._num_sampled = 0.0, 0
        torch.manual_seed(seed)

    async def generate(self, *, prompt_ids: list[int], **_others: Any) -> TokenOutput:
        """Return the tokens of one turn up to and including the end of the turn."""
        request = _Request(prompt_ids=prompt_ids, answer=asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrival.set()
        return TokenOutput(token_ids=await request.answer)

    def leave(self) -> None:
        """Say that an episode is over, so that nobody waits for its next request."""
        self._num_playing -= 1
        self._arrival.set()

    def mean_entropy(self) -> float:
        """Return the mean entropy in nats of the distributions that tokens were sampled from."""
        return self._entropy_sum / max(1, self._num_sampled)

    @asynccontextmanager
    async def serving(self, num_episodes: int) -> AsyncIterator[None]:
        """Answer requests inside the block."""
        self._num_playing = num_episodes
        server = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            server.cancel()
            await asyncio.wait([server])

    async def _serve(self) -> None:
        while True:
            await self._gather()
            batch, self._waiting = self._waiting, []
            if not batch:
                continue
            try:
                turns = await asyncio.to_thread(self._sample, [request.prompt_ids for request in batch])
            except RuntimeError as error:
                # Hand torch's errors to the episodes: nobody awaits this task while they wait for their answers.
                for request in batch:
                    request.answer.set_exception(error)
                raise
            for request, turn in zip(batch, turns, strict=True):
                request.answer.set_result(turn)

    async def _gather(self) -> None:
        """Wait until every episode asks, or until nothing new has come for a while."""
        while not self._waiting or len(self._waiting) < self._num_playing:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), GATHER_S if self._waiting else None)
            except asyncio.TimeoutError:
                return

    @torch.no_grad()
    def _sample(self, prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        pad_id, end_id = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        token_ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        result = self.model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TURN_TOKENS,
            eos_token_id=end_id,
            pad_token_id=pad_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        turns = [_up_to(end_id, row) for row in result.sequences[:, width:].tolist()]
        for step, logits in enumerate(result.logits):
            entropies = torch.distributions.Categorical(logits=logits.float() / self.temperature).entropy()
            alive = torch.tensor([step < len(turn) for turn in turns])
            self._entropy_sum += entropies[alive].sum().item()
            self._num_sampled += int(alive.sum())
        return turns


def _up_to(end_id: int, token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(end_id) + 1] if end_id in token_ids else token_ids
