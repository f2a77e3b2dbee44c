"""Documents of a corpus and the JSONL files that hold them.

A corpus is one JSON object a line: ``{"id": "d17", "title": "Oakford", "text": "Oakford is a town. ..."}``. Further
fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ID_CHARS = 100
"""The agent has to copy an id; one longer than this is more likely a mistake in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document; ``doc_id`` is what the agent opens it with."""

    doc_id: str
    title: str
    text: str


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each line of a JSONL file; ``place`` names file and line for error messages.

    Raises:
        ValueError: there is no such file, it has no rows, or a line is not a JSON object in UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a JSONL file")
    number = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield f"{path} line {number}", _parse(line, f"{path} line {number}")
    if number == 0:
        raise ValueError(f"{path}: the file is empty; expected one JSON object a line")


def _parse(line: bytes, place: str) -> dict[str, Any]:
    if not line.strip():
        raise ValueError(f"{place}: the line is empty; expected a JSON object, remove the line")
    try:
        row = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{place}: expected a JSON object in UTF-8, got {line[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(row).__name__} {row!r:.60}")
    return row


def text_field(row: dict[str, Any], name: str, place: str) -> str:
    """Return a field that must hold a text with something in it.

    Raises:
        ValueError: the field is missing, no text, or blank.
    """
    if name not in row:
        raise ValueError(f"{place}: field {name!r} is missing; the row has {sorted(row)}")
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: field {name!r} is {value!r:.60}; expected a non-empty text")
    return value


def read_corpus(path: Path) -> list[Document]:
    """Read a whole corpus.

    Raises:
        ValueError: the file or a row is malformed, or an id occurs twice; the message names file, line and field.
    """
    documents = []
    places: dict[str, str] = {}
    for place, row in read_rows(path):
        doc_id = _id_field(row, place)
        if doc_id in places:
            raise ValueError(f"{place}: field 'id' is {doc_id!r}, as in {places[doc_id]}; ids must be unique")
        places[doc_id] = place
        title, text = text_field(row, "title", place), text_field(row, "text", place)
        documents.append(Document(doc_id=doc_id, title=title.strip(), text=text.strip()))
    return documents


def _id_field(row: dict[str, Any], place: str) -> str:
    doc_id = text_field(row, "id", place)
    if not doc_id.isprintable() or doc_id != doc_id.strip() or "<" in doc_id or len(doc_id) > MAX_ID_CHARS:
        raise ValueError(
            f"{place}: field 'id' is {doc_id!r:.120}; expected at most {MAX_ID_CHARS} printable characters "
            "without '<' and without blanks at the ends, because the agent has to copy it"
        )
    return doc_id


def write_corpus(path: Path, documents: Iterable[Document]) -> None:
    """Write documents as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            row = {"id": document.doc_id, "title": document.title, "text": document.text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
