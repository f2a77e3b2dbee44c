"""Check of a verl dataset: verl drops or trips over a malformed row far from where it came in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

REQUIRED_COLUMNS = ("data_source", "prompt", "agent_name", "reward_model", "extra_info")
"""What our agent loops and rewards read; no row may lack one."""

ROLES = ("system", "user", "assistant", "tool")

_ROWS_PER_BATCH = 256
"""Rows with a whole repository inside weigh up to a megabyte, and one batch is in memory at a time."""

_READ_BUFFER_BYTES = 1 << 20
"""Without a buffer pyarrow reads a whole column of a row group, often of the whole file, at once."""


def check_rows(path: str | Path) -> int:
    """Check every row of a verl dataset, a ``.parquet`` or ``.jsonl`` file, and return how many there are.

    Memory stays bounded by a few hundred rows.

    Raises:
        ValueError: the file or a row is malformed; the message names file, row (from 0), field, what was found there
            and what was expected.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a .parquet or .jsonl file, prepare the data first")
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: the name ends in {path.suffix!r}; expected one of {', '.join(readers)}")
    num_rows = 0
    for num_rows, row in enumerate(readers[path.suffix](path), start=1):
        _check_row(row, f"{path} row {num_rows - 1}")
    if num_rows == 0:
        raise ValueError(f"{path}: no rows; expected one or more")
    return num_rows


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False) as file:
            _check_columns(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=list(REQUIRED_COLUMNS)):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a parquet file, got something unreadable ({error})") from error


def _check_columns(names: Iterable[str], path: Path) -> None:
    for name in REQUIRED_COLUMNS:
        if name not in names:
            raise ValueError(f"{path}: column {name!r} is missing; found {sorted(names)}")


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            try:
                yield json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"{path} row {number}: expected a JSON object in UTF-8, got {line[:60]!r} ({error})"
                ) from error


def _check_row(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: found {_shown(row)}; expected an object")
    for name in REQUIRED_COLUMNS:
        if row.get(name) is None:
            found = "null" if name in row else f"missing; the row has {sorted(row)}"
            raise ValueError(f"{place}: field {name!r} is {found}; expected a value")
    for name in ("data_source", "agent_name"):
        _check_text(row[name], f"field {name!r}", place)
    for name in ("reward_model", "extra_info"):
        if not isinstance(row[name], dict):
            raise ValueError(f"{place}: field {name!r} is {_shown(row[name])}; expected an object")
    if row["reward_model"].get("ground_truth") is None:
        raise ValueError(f"{place}: field 'reward_model.ground_truth' is missing or null; expected a value")
    _check_prompt(row["prompt"], place)


def _check_prompt(prompt: Any, place: str) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{place}: field 'prompt' is {_shown(prompt)}; expected a non-empty list of chat messages")
    for number, message in enumerate(prompt):
        name = f"prompt[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: field {name!r} is {_shown(message)}; expected an object with role and content")
        if message.get("role") not in ROLES:
            role = _shown(message.get("role"))
            raise ValueError(f"{place}: field '{name}.role' is {role}; expected one of {', '.join(ROLES)}")
        _check_text(message.get("content"), f"field '{name}.content'", place)
    if prompt[-1]["role"] != "user":
        raise ValueError(f"{place}: the last message of 'prompt' has role {prompt[-1]['role']!r}; expected 'user'")


def _check_text(value: Any, name: str, place: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {name} is {_shown(value)}; expected a non-empty text")


def _shown(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"


def main(paths: list[str]) -> None:
    """Check the files of a command line: ``python -m recipes.datasets FILE...``."""
    for path in paths:
        try:
            num_rows = check_rows(path)
        except ValueError as error:
            raise SystemExit(f"dataset check failed: {error}") from error
        sys.stdout.write(f"{path}: {num_rows} rows are well formed\n")


if __name__ == "__main__":
    main(sys.argv[1:])
