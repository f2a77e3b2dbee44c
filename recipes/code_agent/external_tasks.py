"""Tasks of the SWE-smith / SWE-Gym shape from a local ``.parquet`` or ``.jsonl`` file.

Fields of a row:

========================== ==========================================================================================
``instance_id``            unique name
``problem_statement``      text for the agent
``FAIL_TO_PASS``           list of test ids, or its JSON text; ``["*"]`` means exit status 0 of the test command
``PASS_TO_PASS``           the same; may be missing
``test_command``           shell command that prints pytest's status lines; may be missing: pytest on the tests' files
one of ``files``,          ``files``: object of path to text, or its JSON text;
``snapshot``               ``snapshot``: directory or archive, relative to the file with the rows (``snapshots.py``)
``patch``                  unified diff. With ``patch_role="fix"`` (SWE-Gym) it repairs the snapshot and is only
                           checked; with ``patch_role="bug"`` (SWE-smith) it breaks the snapshot and is applied
``test_patch``             unified diff of the tests; may be missing. Hidden from the agent, applied for scoring
========================== ==========================================================================================

Other fields are ignored. Every error names the row (from 0) and the field.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from recipes.code_agent.diffs import apply_diff
from recipes.code_agent.snapshots import read_text
from recipes.code_agent.tasks import EXIT_STATUS_TEST, Task

PATCH_ROLES = ("fix", "bug")
_ROWS_PER_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTask:
    """A task and its patch, which only scripts may know."""

    task: Task
    patch: str


def read_tasks(path: Path, patch_role: str = "fix") -> Iterator[ExternalTask]:
    """Yield the tasks of a file.

    Raises:
        ValueError: the file can't be read, or a row is malformed.
    """
    if patch_role not in PATCH_ROLES:
        raise ValueError(f"patch_role is {patch_role!r}; expected one of {', '.join(PATCH_ROLES)}")
    places: dict[str, int] = {}
    for index, row in enumerate(_rows(path)):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {index}: expected an object, got {type(row).__name__}")
        try:
            external = _read_row(row, path.parent, patch_role)
        except ValueError as error:
            raise ValueError(f"{path}: row {index}: {error}") from error
        name = external.task.task_id
        if name in places:
            raise ValueError(f"{path}: row {index}: instance_id {name!r} is also that of row {places[name]}")
        places[name] = index
        yield external
    if not places:
        raise ValueError(f"{path}: no rows; expected at least one")


def _rows(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a .parquet or .jsonl file")
    if path.suffix == ".jsonl":
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise ValueError(f"{path}: expected a name that ends in .parquet or .jsonl")


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for index, line in enumerate(file):
            try:
                yield json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(f"{path}: row {index}: expected a JSON object, got {line[:60]!r} ({error})") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a parquet file ({error})") from error


def _read_row(row: dict[str, Any], folder: Path, patch_role: str) -> ExternalTask:
    files, snapshot = _sources(row, folder)
    read = _reader(files, snapshot)
    patch, statement = _text(row, "patch"), _text(row, "problem_statement")
    patched = _applied(row, "patch", read)
    if patch_role == "bug":
        files |= _without_removals("patch", patched)
        read = _reader(files, snapshot)
    hidden = _applied(row, "test_patch", read) if row.get("test_patch") else {}
    hidden_files = _without_removals("test_patch", hidden)
    fail_to_pass, pass_to_pass = _test_ids(row, "FAIL_TO_PASS"), _test_ids(row, "PASS_TO_PASS", required=False)
    if patch.strip() in statement:
        raise ValueError("field 'problem_statement' holds the patch; remove it, the agent would only copy it")
    task = Task(
        task_id=_text(row, "instance_id"),
        statement=statement,
        files=files,
        snapshot=None if snapshot is None else str(snapshot),
        test_files=_test_files(fail_to_pass + pass_to_pass),
        hidden_files=hidden_files,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        test_command=_test_command(row, fail_to_pass + pass_to_pass),
    )
    return ExternalTask(task=task, patch=patch)


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {name!r} is {value!r:.60}; expected a text that is not empty")
    return value


def _sources(row: dict[str, Any], folder: Path) -> tuple[dict[str, str], Path | None]:
    given = [name for name in ("files", "snapshot") if row.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"fields 'files' and 'snapshot': {len(given)} of them given; expected exactly one")
    if given == ["snapshot"]:
        return {}, (folder / _text(row, "snapshot")).resolve()
    files = _decoded(row, "files")
    # A parquet file has the same paths in every row, with nulls for those that a row lacks.
    files = {path: text for path, text in files.items() if text is not None} if isinstance(files, dict) else files
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"field 'files' is {files!r:.60}; expected an object of path to text")
    return files, None


def _decoded(row: dict[str, Any], name: str) -> Any:
    value = row.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"field {name!r}: broken JSON ({error})") from error


def _test_ids(row: dict[str, Any], name: str, required: bool = True) -> tuple[str, ...]:
    value = _decoded(row, name)
    if value is None and not required:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"field {name!r} is {value!r:.60}; expected a list of test ids")
    if required and not value:
        raise ValueError(f"field {name!r} is empty; expected at least one test id")
    return tuple(value)


def _reader(files: dict[str, str], snapshot: Path | None) -> Callable[[str], str | None]:
    def read(path: str) -> str | None:
        if path in files or snapshot is None:
            return files.get(path)
        return read_text(snapshot, path)

    return read


def _applied(row: dict[str, Any], name: str, read: Callable[[str], str | None]) -> dict[str, str | None]:
    try:
        return apply_diff(_text(row, name), read)
    except ValueError as error:
        raise ValueError(f"field {name!r}: {error}") from error


def _without_removals(name: str, changed: dict[str, str | None]) -> dict[str, str]:
    for path, text in changed.items():
        if text is None:
            raise ValueError(f"field {name!r} removes {path}; only changed and new files are supported")
    return {path: text for path, text in changed.items() if text is not None}


def _test_files(test_ids: tuple[str, ...]) -> tuple[str, ...]:
    paths = (test_id.split("::")[0] for test_id in test_ids if "::" in test_id)
    return tuple(dict.fromkeys(paths))


def _test_command(row: dict[str, Any], test_ids: tuple[str, ...]) -> str:
    if row.get("test_command") is not None:
        return _text(row, "test_command")
    paths = _test_files(test_ids)
    if EXIT_STATUS_TEST in test_ids or not paths:
        raise ValueError("field 'test_command' is missing; expected a command, as the test ids name no files")
    return "python -m pytest -q -rA -p no:cacheprovider " + shlex.join(paths)
