"""Saving and loading a history: format version, checksum, and the identity of tokenizer and model.

Layout: magic, version, length of the header; header (JSON); tokens of all texts, int32 little endian; blake2b digest
of everything before it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl_war.core.history_config import OnDamage
from verl_war.history.index import NO_GROUP, Int32s
from verl_war.history.store import HistoryStore

logger = logging.getLogger(__name__)

MAGIC = b"VWHIST\x00\x00"
VERSION = 1
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the header
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20


class HistoryError(RuntimeError):
    """A file or batch of history that cannot be used."""


def save(store: HistoryStore, path: str | os.PathLike[str]) -> int:
    """Write all text; the file appears whole or not at all.

    Text that is still growing is written as far as it is: after a restart its trajectory begins anew, with this as text
    of its group.

    Returns:
        Bytes written.
    """
    path = Path(path)
    index = store.index
    texts, rows = [], []
    for key in index.keys().tolist():
        try:
            info = index.info(key)
            if info.length > info.first:
                texts.append(index.text(key))
                rows.append([info.group, info.step, len(texts[-1])])
        except KeyError:
            continue  # evicted meanwhile
    header = {
        "fingerprint": store.fingerprint,
        "vocab_size": store.vocab_size,
        "policy_step": store.policy_step,
        "texts": rows,
    }
    return _write(path, json.dumps(header).encode(), texts)


def _write(path: Path, header: bytes, texts: list[Int32s]) -> int:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        with os.fdopen(descriptor, "wb") as file:
            pieces = (text.astype("<i4", copy=False).tobytes() for text in texts)
            for data in itertools.chain((PREFIX.pack(MAGIC, VERSION, len(header)), header), pieces):
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return size


def load(store: HistoryStore, path: str | os.PathLike[str], on_damage: OnDamage = "error") -> int:
    """Add the text of a file to a store, oldest first, within the store's limits.

    Args:
        store: Usually empty; what it holds stays.
        path: Written by `save`.
        on_damage: What to do with a damaged file: raise, or leave the store as it is, with a warning.

    Returns:
        Texts added.

    Raises:
        HistoryError: The file is damaged (unless discarded), or of another format version, tokenizer or model.
        OSError: It cannot be read.
    """
    if on_damage not in ("error", "discard"):
        raise ValueError(f"on_damage={on_damage!r} must be 'error' or 'discard'")
    with open(path, "rb") as file:
        try:
            header = _check(file, Path(path))
            _require_same_tokens(header, store, path)
            texts = list(_texts(file, header, store.vocab_size))
        except _Damaged as damage:
            message = f"history file {path} is damaged: {damage}; expected a file written by this version's save()"
            if on_damage == "error":
                raise HistoryError(f"{message}; delete it, or load with on_damage='discard' to start clean") from None
            logger.warning("%s; starting with an empty history", message)
            return 0
    for group, step, tokens in texts:
        store.index.restore(group, step, tokens)
    newest = max((step for _, step, _ in texts), default=0)
    store.on_step(max(store.policy_step, header["policy_step"], newest, 0))
    return len(texts)


class _Damaged(Exception):
    """What is wrong with a file."""


def _check(file: BinaryIO, path: Path) -> dict[str, Any]:
    """The header of a file that is whole; the file is positioned behind it."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise _Damaged(f"it has {size} bytes, expected at least {PREFIX.size + DIGEST_BYTES}")
    magic, version, header_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise _Damaged(f"it begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise HistoryError(
            f"history file {path} has format version {version}, this version of verl_war reads {VERSION}; delete the "
            "file to start without history"
        )
    if header_bytes > min(MAX_HEADER_BYTES, size - PREFIX.size - DIGEST_BYTES):
        raise _Damaged(f"its header claims {header_bytes} bytes of {size}")
    digest = hashlib.blake2b(prefix, digest_size=DIGEST_BYTES)
    left = size - PREFIX.size - DIGEST_BYTES
    while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        left -= len(chunk)
    if file.read() != digest.digest():
        raise _Damaged("its checksum does not fit its content")
    file.seek(PREFIX.size)
    try:
        header: dict[str, Any] = json.loads(file.read(header_bytes))
        _require_sound(header)
        total = sum(length for _, _, length in header["texts"])
    except (ValueError, TypeError, KeyError) as error:
        raise _Damaged(f"its header is not readable ({error})") from None
    if PREFIX.size + header_bytes + 4 * total + DIGEST_BYTES != size:
        raise _Damaged(f"its header announces {total} tokens, which do not fit its {size} bytes")
    return header


def _require_sound(header: dict[str, Any]) -> None:
    """Raise unless the header is as `save` writes it; the checksum only says that it is as it was written."""
    if not isinstance(header["fingerprint"], str):
        raise ValueError(f"fingerprint {header['fingerprint']!r}")
    groups_and_steps = (number for group, step, _ in header["texts"] for number in (group, step))
    for number in (header["vocab_size"], header["policy_step"], *groups_and_steps):
        if type(number) is not int or not NO_GROUP <= number < 1 << 63:
            raise ValueError(f"{number!r} for a group, a step or the size of the vocabulary")
    for _, _, length in header["texts"]:
        if type(length) is not int or length < 0:
            raise ValueError(f"length {length!r} of a text")


def _require_same_tokens(header: dict[str, Any], store: HistoryStore, path: object) -> None:
    found, expected = (header["fingerprint"], header["vocab_size"]), (store.fingerprint, store.vocab_size)
    if found != expected:
        raise HistoryError(
            f"history file {path} is of tokenizer/model {found[0]!r} with {found[1]} token ids, and this run has "
            f"{expected[0]!r} with {expected[1]}: its token ids would be garbage; delete the file or name another"
        )


def _texts(file: BinaryIO, header: dict[str, Any], vocab_size: int) -> Iterator[tuple[int, int, Int32s]]:
    for group, step, length in header["texts"]:
        tokens = np.frombuffer(file.read(4 * length), "<i4").astype(np.int32)
        if tokens.size and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
            raise _Damaged(f"a text has token ids outside 0 to {vocab_size - 1}")
        yield group, step, tokens
