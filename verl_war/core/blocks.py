"""Chain hashes of context blocks: what the router may know of a prompt without its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 8
"""64 bits: among 10^6 live blocks a chance collision has a probability of about 3 in 10^8."""


def block_chain_hashes(token_ids: Sequence[int], block_size_tokens: int) -> tuple[int, ...]:
    """Hash every full block of the context together with all blocks before it.

    Two contexts share their first n blocks exactly when their first n hashes are equal, which is
    how vLLM's prefix cache matches blocks too.

    Args:
        token_ids: The context, non-negative 64-bit ids.
        block_size_tokens: Tokens per block, at least 1.

    Returns:
        One 64-bit hash per full block; a trailing partial block has none.

    Source: the idea of chained block hashes is vLLM's (vllm/v1/core/kv_cache_utils.py, 0.27.1).
    """
    tokens = array("q", token_ids)
    hashes: list[int] = []
    parent = b""
    for end in range(block_size_tokens, len(tokens) + 1, block_size_tokens):
        parent = blake2b(parent + tokens[end - block_size_tokens : end].tobytes(), digest_size=_DIGEST_BYTES).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)
