"""Exchange of text between replicas inside a step: what to send, how fast, as which bytes. No transport, no clock.

The sender asks its `Outbox` from time to time, off the decode path, and hands the bytes to every other replica, whose
`Inbox` takes them in. Nothing on the decode path knows of it: the index itself remembers what was taken.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from verl_war.history.index import INGESTED, NO_GROUP, Deltas, HistoryIndex
from verl_war.history.persistence import HistoryError

HEADER = struct.Struct("<4sBBHIII")  # magic, version, bytes per token, fingerprint check, rows, tokens, crc32
MAGIC = b"VWDL"
VERSION = 1
ROW_BYTES = 8 + 8 + 4 + 4 + 4 + 1


def encode(deltas: Deltas, fingerprint: str, vocab_size: int) -> bytes:
    """Bytes of a batch: 29 for every row and 2, 3 or 4 for every token, by the size of the vocabulary."""
    width = 2 if vocab_size <= 1 << 16 else 3 if vocab_size <= 1 << 24 else 4
    rows = len(deltas.keys)
    tokens = deltas.tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    body = b"".join(
        (
            deltas.keys.astype("<i8").tobytes(),
            deltas.groups.astype("<i8").tobytes(),
            deltas.steps.astype("<i4").tobytes(),
            deltas.starts.astype("<u4").tobytes(),
            np.diff(deltas.offsets).astype("<u4").tobytes(),
            deltas.finished.tobytes(),
            tokens,
        )
    )
    check = zlib.crc32(fingerprint.encode()) & 0xFFFF
    return HEADER.pack(MAGIC, VERSION, width, check, rows, len(deltas.tokens), zlib.crc32(body)) + body


def decode(batch: bytes, fingerprint: str, vocab_size: int) -> Deltas:
    """The reverse of `encode`.

    Raises:
        HistoryError: The bytes are damaged, or of another format, tokenizer or model.
    """
    if len(batch) < HEADER.size:
        raise HistoryError(f"a batch of history has {len(batch)} bytes; expected at least {HEADER.size}")
    magic, version, width, check, rows, count, crc = HEADER.unpack_from(batch)
    if (magic, version) != (MAGIC, VERSION):
        raise HistoryError(
            f"a batch of history is of format {magic!r} {version}, expected {MAGIC!r} {VERSION}: all replicas must run "
            "the same version of verl_war"
        )
    body = memoryview(batch)[HEADER.size :]
    if len(body) != rows * ROW_BYTES + count * width or zlib.crc32(body) != crc or not 2 <= width <= 4:
        raise HistoryError(f"a batch of history with {rows} rows and {count} tokens is damaged (checksum or length)")
    if check != zlib.crc32(fingerprint.encode()) & 0xFFFF:
        raise HistoryError(
            f"a batch of history is of another tokenizer or model than {fingerprint!r}: its token ids would be garbage"
        )
    columns, at = [], 0
    for dtype in ("<i8", "<i8", "<i4", "<u4", "<u4", "u1"):
        columns.append(np.frombuffer(body, dtype, rows, at))
        at += rows * np.dtype(dtype).itemsize
    wide = np.zeros((count, 4), np.uint8)
    wide[:, :width] = np.frombuffer(body, np.uint8, count * width, at).reshape(count, width)
    keys, groups, steps, starts, lengths, finished = columns
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = wide.view("<u4").reshape(-1).astype(np.int32)
    if offsets[-1] != count or (count and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size)):
        raise HistoryError(
            f"a batch of history has token ids outside 0 to {vocab_size - 1}, or rows that do not add up"
        )
    return Deltas(
        keys.astype(np.int64),
        groups.astype(np.int64),
        steps.astype(np.int64),
        starts.astype(np.int64),
        finished.astype(np.uint8),
        offsets,
        tokens,
    )


class Outbox:
    """Takes new text out of an index as encoded batches, at no more than so many bytes per second."""

    def __init__(
        self, index: HistoryIndex, *, vocab_size: int, fingerprint: str, bytes_per_s: float, burst_bytes: float
    ) -> None:
        """Start with a full burst.

        Args:
            index: Whose text to send.
            vocab_size: Of the index.
            fingerprint: Of the store.
            bytes_per_s: Long-run bound.
            burst_bytes: What may be sent at once after a pause.
        """
        if not bytes_per_s > 0 or not burst_bytes >= HEADER.size + ROW_BYTES + 4:
            raise ValueError(
                f"bytes_per_s={bytes_per_s!r} must be over 0 and burst_bytes={burst_bytes!r} at least "
                f"{HEADER.size + ROW_BYTES + 4}"
            )
        self._index = index
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._credit_bytes = burst_bytes
        self._credited_s: float | None = None
        self._width = 2 if vocab_size <= 1 << 16 else 3 if vocab_size <= 1 << 24 else 4
        self.sent_bytes = 0
        self.sent_tokens = 0

    def take(self, max_bytes: int, now_s: float) -> bytes:
        """The next batch; empty when there is nothing new or the rate is used up.

        Args:
            max_bytes: Bound on this batch.
            now_s: A clock that never goes back.
        """
        if self._credited_s is not None:
            earned = max(0.0, now_s - self._credited_s) * self._bytes_per_s
            self._credit_bytes = min(self._burst_bytes, self._credit_bytes + earned)
        self._credited_s = now_s
        room = min(max_bytes, self._credit_bytes) - HEADER.size
        pieces: list[Deltas] = []
        while room >= ROW_BYTES + self._width:
            # A quarter of the room for rows: few of them leave it to the next round, many share it.
            rows = max(1, int(room / 4 / ROW_BYTES))
            piece = self._index.take_new(int((room - rows * ROW_BYTES) / self._width), rows)
            if not len(piece.keys):
                break
            room -= len(piece.keys) * ROW_BYTES + len(piece.tokens) * self._width
            pieces.append(piece)
        if not pieces:
            return b""
        deltas = _joined(pieces)
        batch = encode(deltas, self._fingerprint, self._vocab_size)
        self._credit_bytes -= len(batch)
        self.sent_bytes += len(batch)
        self.sent_tokens += len(deltas.tokens)
        return batch


def _joined(pieces: list[Deltas]) -> Deltas:
    offsets = [np.zeros(1, np.int64)]
    for piece in pieces:
        offsets.append(piece.offsets[1:] + offsets[-1][-1])
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return Deltas(*columns)._replace(offsets=np.concatenate(offsets))


class Inbox:
    """Takes batches of other replicas into an index. Tolerates duplicates, overlaps, gaps and restarts."""

    def __init__(self, index: HistoryIndex, *, vocab_size: int, fingerprint: str) -> None:
        self._index = index
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self.received_bytes = 0
        self.received_tokens = 0
        self.rows = dict.fromkeys(INGESTED, 0)
        """Rows by what became of them."""

    def apply(self, batch: bytes) -> None:
        """Take in one batch; lets the decode path go first after every few hundred tokens, without the GIL.

        Raises:
            HistoryError: The batch cannot be used; nothing of it was.
        """
        if not batch:
            return
        deltas = decode(batch, self._fingerprint, self._vocab_size)
        keys = deltas.keys
        if (keys < 0).any() or (keys >= 1 << 60).any() or (deltas.groups < NO_GROUP).any() or (deltas.steps < -1).any():
            raise HistoryError("a batch of history has keys, groups or steps that cannot be")
        self.received_bytes += len(batch)
        self.received_tokens += len(deltas.tokens)
        for code, count in zip(*np.unique(self._index.ingest(deltas), return_counts=True), strict=True):
            self.rows[INGESTED[code]] += int(count)
