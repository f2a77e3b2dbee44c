"""Match finder over all kept text: which tokens followed the last few, here, in siblings, in earlier steps, anywhere.

An LZ77-style index in C++ (`native/`). Text is stored once, as one *segment* per trajectory; every position is
linked to the previous one with the same last few tokens, inside the own segment, its group, and everywhere. A draft
follows the best matches and votes among them. All calls are thread-safe; calls that may take long release the GIL.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_war.core.history_config import SOURCES

try:
    from verl_war.history import _native
except ImportError as error:
    raise ImportError(
        "the C++ part of verl_war.history is not built or was built for another Python; expected the extension "
        f"verl_war.history._native; run `pip install -e .` in the clone (needs g++): {error}"
    ) from error

API_VERSION = 3
"""Raised with every incompatible change of `native/`, so that an old build is noticed."""
if _native.API_VERSION != API_VERSION:
    raise ImportError(
        f"verl_war.history._native has interface version {_native.API_VERSION}, expected {API_VERSION}: the C++ "
        "sources changed since it was built; run `pip install -e .` in the clone"
    )

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

NO_SOURCE = -1
"""`source` of an empty draft."""
NO_GROUP = -1
"""`group` of a trajectory whose group is unknown: it has no siblings."""
MATCH_BUCKETS: tuple[int, ...] = tuple(_native.MATCH_BUCKETS)
"""Smallest match length (tokens) of each bucket of the acceptance table."""


class Draft(NamedTuple):
    """Tokens that are likely to come next.

    Attributes:
        tokens: int32[n]; n = 0 when nothing matched or nothing was likely enough.
        probs: float32[n]; estimated probability that the model takes this token, given that it took those before.
        match_length: Tokens of context that the place shares which decided the first token, at most
            `max_match_tokens`; 0 without a match.
        source: Index into `SOURCES`, or `NO_SOURCE`.
        votes: Earlier places that the draft was voted from.
        score: Expected accepted tokens: sum over the draft of the running product of `probs`.
    """

    tokens: Int32s
    probs: Float32s
    match_length: int
    source: int
    votes: int
    score: float


class DraftBatch(NamedTuple):
    """Drafts of several trajectories in flat arrays; that of row i is `tokens[offsets[i]:offsets[i + 1]]`.

    Attributes:
        offsets: int64[rows + 1].
        tokens: int32[offsets[-1]].
        probs: float32[offsets[-1]], as in `Draft`.
        match_length: int32[rows].
        source: int32[rows].
        votes: int32[rows].
        score: float32[rows].
    """

    offsets: Int64s
    tokens: Int32s
    probs: Float32s
    match_length: Int32s
    source: Int32s
    votes: Int32s
    score: Float32s

    def row(self, index: int) -> Draft:
        """The draft of one row."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return Draft(
            self.tokens[begin:end],
            self.probs[begin:end],
            int(self.match_length[index]),
            int(self.source[index]),
            int(self.votes[index]),
            float(self.score[index]),
        )


class Deltas(NamedTuple):
    """New text of several trajectories; that of row i is `tokens[offsets[i]:offsets[i + 1]]`.

    Attributes:
        keys: int64[rows].
        groups: int64[rows]; `NO_GROUP` when unknown.
        steps: int64[rows]; policy step, -1 when unknown.
        starts: int64[rows]; offset of the row's first token in the trajectory.
        finished: uint8[rows]; 1 when the trajectory ends with this row.
        offsets: int64[rows + 1].
        tokens: int32[offsets[-1]].
    """

    keys: Int64s
    groups: Int64s
    steps: Int64s
    starts: Int64s
    finished: npt.NDArray[np.uint8]
    offsets: Int64s
    tokens: Int32s


INGESTED: tuple[str, ...] = ("applied", "duplicate", "gap", "conflict", "refused")
"""What became of a row: appended; known already, or from before what is known; new segment because text before it is
missing; new segment because it differs from what was known; not kept because live text alone exceeds `max_bytes`."""


class SegmentInfo(NamedTuple):
    """One kept trajectory.

    Attributes:
        group: Its group, or `NO_GROUP`.
        step: Policy step that generated it, or -1.
        first: Offset of the first token still kept; more than 0 once the prompt of a finished one was released.
        length: Tokens ever appended; the kept text is `[first, length)`. Offsets count from the segment's beginning,
            also for text of another replica that does not begin with the trajectory.
        live: Still running, so never evicted.
        frozen: Text was refused because live trajectories alone exceed `max_bytes`; no drafts any more.
    """

    group: int
    step: int
    first: int
    length: int
    live: bool
    frozen: bool


def stable_id(name: str) -> int:
    """Key or group number of a name (trajectory id, prompt hash), the same in every process; in [0, 2**60)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 4


def match_bucket(match_length: int) -> int:
    """Column of the acceptance table for a match of this many tokens (1 or more)."""
    return _native.match_bucket(match_length)


class HistoryIndex:
    """Native index. Keys are in [0, 2**60), groups in [0, 2**63) or `NO_GROUP`; see `stable_id`.

    Bad arguments raise ValueError naming argument, value and expectation, and change nothing; an unknown key raises
    KeyError. Token arrays are int32, one-dimensional; other integer arrays and sequences are converted.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_bytes: int = 512 << 20,
        min_match_own: int = 2,
        min_match_group: int = 2,
        min_match_global: int = 3,
        max_match_tokens: int = 64,
        max_candidates: int = 32,
        age_decay: float = 0.8,
        vote_prior: float = 4.0,
        sources: tuple[str, ...] = SOURCES,
    ) -> None:
        """Make an empty index.

        Args:
            vocab_size: Token ids must be in [0, vocab_size).
            max_bytes: Memory of all text and tables; finished segments are evicted to stay under it.
            min_match_own: Tokens of context that must match inside the own text, 1 to 8.
            min_match_group: The same in the texts of the group.
            min_match_global: The same in all other texts.
            max_match_tokens: Longest context compared, `max(min_match_*)` to 256.
            max_candidates: Most recent matching places looked at per scope, 1 to 256.
            age_decay: Factor on a vote for every policy step of age, over 0 to 1.
            vote_prior: Votes' worth of the measured acceptance against disagreeing places, over 0.
            sources: Which of `SOURCES` may draft. Tables of scopes that none needs are not built.
        """
        unknown = set(sources) - set(SOURCES)
        if unknown:
            raise ValueError(f"sources={sources!r} has unknown names {sorted(unknown)}; allowed: {', '.join(SOURCES)}")
        self._native = _native.Index(
            vocab_size=vocab_size,
            max_bytes=max_bytes,
            min_match=(min_match_own, min_match_group, min_match_global),
            max_match_tokens=max_match_tokens,
            max_candidates=max_candidates,
            age_decay=age_decay,
            vote_prior=vote_prior,
            source_mask=sum(1 << SOURCES.index(name) for name in sources),
        )

    def begin(self, key: int, group: int, step: int, prompt: npt.ArrayLike) -> None:
        """Start a live segment with the context of its first turn, which may be empty.

        Siblings share that prompt, so only its last `max_match_tokens` are indexed beyond the own scope.

        Raises:
            ValueError: The key exists already; a token is outside the vocabulary.
        """
        self._native.begin(key, group, step, _tokens(prompt))

    def extend(self, key: int, tokens: npt.ArrayLike, start: int | None = None) -> int:
        """Append text (generated tokens, tool outputs); returns the new length of the segment.

        Args:
            key: A live segment.
            tokens: Text from offset `start` of the trajectory on.
            start: Offset of `tokens[0]`; what is known already is compared and skipped. None: at the end.

        Raises:
            ValueError: `start` is behind the end (a gap), or known text differs; see `common_prefix`.
        """
        return self._native.extend(key, -1 if start is None else start, _tokens(tokens))

    def extend_batch(self, keys: Int64s, starts: Int64s, offsets: Int64s, tokens: Int32s) -> None:
        """`extend` for several segments in one call: row i gets `tokens[offsets[i]:offsets[i + 1]]` at `starts[i]`.

        A start of -1 means at the end. All rows are checked before any is appended. A key may occur once.
        """
        self._native.extend_batch(keys, starts, offsets, tokens)

    def common_prefix(self, key: int, context: npt.ArrayLike) -> int:
        """Tokens that a re-sent context and the segment have in common, from the first one on.

        Equal to the segment's length unless the agent loop edited its context. About 1 us per 4,000 tokens. 0 when
        the segment's beginning is not kept (it finished).
        """
        return self._native.common_prefix(key, _tokens(context))

    def draft(self, key: int, max_tokens: int, min_prob: float = 0.1, context: npt.ArrayLike | None = None) -> Draft:
        """Draft what follows the end of a segment, or `context` (its last tokens) instead of the end."""
        given = None if context is None else _tokens(context)
        return DraftBatch(*self._native.draft(key, max_tokens, min_prob, given)).row(0)

    def draft_batch(self, keys: Int64s, max_tokens: Int32s, min_prob: float = 0.1) -> DraftBatch:
        """Draft for every row, without the GIL.

        Args:
            keys: int64[rows]; segments whose end is the context of that row.
            max_tokens: int32[rows]; 0 gives an empty draft at no cost.
            min_prob: A draft ends where the running product of `probs` would fall below this, in [0, 1].
        """
        return DraftBatch(*self._native.draft_batch(keys, max_tokens, min_prob))

    def set_acceptance(self, table: npt.ArrayLike) -> None:
        """Replace the prior acceptance of a single match: float[len(SOURCES), len(MATCH_BUCKETS)] in [0, 1].

        Entry [s, b] = measured probability that the token which one match of source s predicts is accepted.
        """
        self._native.set_acceptance(np.ascontiguousarray(table, dtype=np.float32))

    def finish(self, key: int) -> None:
        """End a live segment: it may be evicted from now on, and its prompt is released."""
        self._native.finish(key)

    def retire(self, key: int) -> None:
        """Finish a segment, if it is live, and keep its text under a key of its own: the key is free for a new one."""
        self._native.retire(key)

    def drop(self, key: int) -> None:
        """Forget a segment, live or finished. Its memory is released by the next `collect`."""
        self._native.drop(key)

    def set_step(self, step: int, window_steps: int) -> int:
        """Tell the current policy step; forgets finished segments of step < `step - window_steps`. Returns how many.

        Their memory is released by the next `collect`.
        """
        return self._native.set_step(step, window_steps)

    def collect(self, max_ms: float | None = None) -> bool:
        """Evict down to `max_bytes` and give memory back to the operating system; no GIL, in slices under 1 ms.

        Evicts finished segments, oldest policy step first, then least recently used. To be called off the decode
        path; `extend` does a little of the same work when the index is over its limit.

        Args:
            max_ms: Return after about this many milliseconds, to go on in the next call. None: until done.

        Returns:
            True when nothing is left to do.
        """
        return self._native.collect(-1.0 if max_ms is None else max_ms)

    def take_new(self, max_tokens: int, max_rows: int = 1 << 31) -> Deltas:
        """Text of this replica's segments that was not taken before, for other replicas; no GIL.

        A prompt is not shared, except for its last `max_match_tokens`: siblings elsewhere have it themselves.
        """
        return Deltas(*self._native.take_new(max_tokens, max_rows))

    def ingest(self, deltas: Deltas) -> Int32s:
        """Take in text of another replica, without the GIL, behind the decode path, in slices of under 1 ms.

        It never touches segments of this replica, even of the same key. Overlaps and duplicates are skipped; a row
        that does not continue what is known of its key begins a new segment, and the text before stays.

        Returns:
            int32[rows] of `INGESTED`.
        """
        return self._native.ingest(*deltas)

    def restore(self, group: int, step: int, tokens: npt.ArrayLike) -> int:
        """Add the text of a finished segment of an earlier process; returns the key that it got."""
        return self._native.restore(group, step, _tokens(tokens))

    def __contains__(self, key: int) -> bool:
        return self._native.contains(key)

    def __len__(self) -> int:
        return self._native.num_segments()

    def keys(self) -> Int64s:
        """Keys of all segments, in order of `begin`."""
        return self._native.keys()

    def info(self, key: int) -> SegmentInfo:
        """What is known of a segment."""
        return SegmentInfo(*self._native.info(key))

    def text(self, key: int, start: int | None = None, end: int | None = None) -> Int32s:
        """Copy of the kept tokens of a segment, optionally only those of offsets [start, end)."""
        return self._native.text(key, -1 if start is None else start, -1 if end is None else end)

    def stats(self) -> dict[str, int]:
        """Counters.

        `bytes` (text and tables, also what waits to be released), `tokens` (kept), `segments`, `live_segments`,
        `live_tokens`, `evicted_segments`, `evicted_tokens`, `refused_tokens`, `drafts`, `drafted_tokens`.
        """
        return self._native.stats()


def _tokens(values: npt.ArrayLike) -> Int32s:
    """As int32[n] without wrapping: ids that int32 cannot hold stay recognisably wrong."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens have shape {array.shape} and dtype {array.dtype}; expected one dimension of integers")
    if array.dtype == np.int32:
        return np.ascontiguousarray(array)
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            index = int(np.argmax((array < -(2**31)) | (array >= 2**31)))
            raise ValueError(f"tokens[{index}]={int(array[index])} is not a token id: expected 0 or more, under 2**31")
    return array.astype(np.int32)
