"""What an engine step leaves behind for the drafts of the next one. Knows no vLLM classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_war.integration.vllm.speculation_text import LiveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """KV cache of the engine.

    Attributes:
        capacity_tokens: All of it.
        block_tokens: One block.
        free_tokens: Gives what no running request holds; counts blocks, and is asked only when it may be short.
    """

    capacity_tokens: int
    block_tokens: int
    free_tokens: Callable[[], int]


@dataclass(slots=True, kw_only=True)
class StepInput:
    """What one engine step left behind, as views of the model runner's state.

    Attributes:
        req_ids: Requests in the batch, by row.
        num_tokens: int32[rows], tokens of each context, the newly sampled ones included.
        sampled: New tokens of each row; empty for a prompt that is not read to its end.
        verified_tokens: Gives the number of draft tokens that the step verified for a row.
        describe: Gives the request of a row that is new in the batch; None when it can't draft.
        is_alive: Tells whether the engine still has a request, which it may have preempted.
        kv: Where drafts have to find room.
    """

    req_ids: Sequence[str]
    num_tokens: npt.NDArray[np.int32]
    sampled: Sequence[Sequence[int]]
    verified_tokens: Callable[[int], int]
    describe: Callable[[int], LiveRequest | None]
    is_alive: Callable[[str], bool]
    kv: KvRoom
