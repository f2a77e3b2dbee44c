"""What the tools ``search`` and ``open`` answer: bounded texts for any arguments, and no exceptions."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from recipes.search_agent.corpus import MAX_ID_CHARS, Document
from recipes.search_agent.index import CorpusIndex, tokenize

MAX_TITLE_CHARS = 100
"""Longer titles are cut in results, so that a corpus without real titles cannot fill the context."""

_MAX_SNIPPET_WORDS = 10
"""Words of the query that a snippet is centred on; each one slows the scan of a long text down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """How much the tools show, and how long they may take."""

    top_k: int = 3
    snippet_chars: int = 30
    page_chars: int = 1_000
    max_query_chars: int = 300
    """Longer queries are refused: their cost grows with their length."""
    timeout_s: float = 10.0
    """A look-up takes milliseconds; the deadline is for a machine that hangs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"tool config: {field.name} is {value!r}; expected a number above 0")
            if field.name != "timeout_s" and not isinstance(value, int):
                raise ValueError(f"tool config: {field.name} is {value!r}; expected a whole number")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RetrievalConfig:
        """Read the options of a tool configuration.

        Raises:
            ValueError: an option is unknown or has a wrong value.
        """
        allowed = [field.name for field in fields(cls)]
        if unknown := sorted(raw.keys() - set(allowed)):
            raise ValueError(f"tool config: unknown key {unknown[0]!r}; allowed are corpus_path, {', '.join(allowed)}")
        return cls(**raw)


def search(index: CorpusIndex, config: RetrievalConfig, arguments: Any) -> str:
    """Answer a call of ``search``: one line a document, the most relevant first."""
    query = arguments.get("query") if isinstance(arguments, dict) else None
    if not isinstance(query, str) or not query.strip():
        return "Error: search needs a query with at least one word."
    if len(query) > config.max_query_chars:
        return f"Error: the query has {len(query)} characters, at most {config.max_query_chars} are allowed."
    documents = index.search(query, config.top_k)
    if not documents:
        return "No results."
    words = tokenize([query])[0]
    return neutralise("\n".join(_result_line(document, words, config.snippet_chars) for document in documents))


def _result_line(document: Document, words: list[str], snippet_chars: int) -> str:
    title = " ".join(document.title[:MAX_TITLE_CHARS].split())
    return f"{title} [{document.doc_id}] {_snippet(document.text, words, snippet_chars)}"


def _snippet(text: str, words: list[str], num_chars: int) -> str:
    """Return whole words around the first place in the text where a word of the query stands."""
    pattern = "|".join(map(re.escape, words[:_MAX_SNIPPET_WORDS]))
    found = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    start = max(0, found.start() - num_chars // 4) if found else 0
    if start > 0:
        start = text.find(" ", start) + 1
    end = start + num_chars
    if end < len(text):
        end = max(text.rfind(" ", start, end + 1), start) if " " in text[start : end + 1] else end
    shown = " ".join(text[start:end].split())
    return f"{'...' if start > 0 else ''}{shown}{'...' if end < len(text) else ''}"


def open_document(index: CorpusIndex, config: RetrievalConfig, arguments: Any) -> str:
    """Answer a call of ``open``: title and text, in pages when the text is long (``id#2`` is the second page)."""
    doc_id = arguments.get("doc_id") if isinstance(arguments, dict) else None
    if isinstance(doc_id, int) and not isinstance(doc_id, bool):
        doc_id = str(doc_id)
    if not isinstance(doc_id, str) or not doc_id.strip():
        return "Error: open needs a doc_id from the search results."
    document, page = _find(index, doc_id.strip())
    if document is None:
        return neutralise(f"Error: there is no document {doc_id[:MAX_ID_CHARS]!r}; use an id from the search results.")
    pages = split_pages(document.text, config.page_chars)
    if not 1 <= page <= len(pages):
        return f"Error: {document.doc_id} has pages 1 to {len(pages)}."
    return neutralise(_page_text(document, pages, page))


def _find(index: CorpusIndex, doc_id: str) -> tuple[Document | None, int]:
    """Return the document and page number that an id names; an id that itself ends in ``#2`` goes first."""
    if (document := index.get(doc_id)) is not None:
        return document, 1
    name, _, page = doc_id.rpartition("#")
    is_number = page.isascii() and page.isdecimal() and len(page) < 10
    return (index.get(name), int(page)) if is_number else (None, 1)


def _page_text(document: Document, pages: list[str], page: int) -> str:
    title = " ".join(document.title[:MAX_TITLE_CHARS].split())
    text = f"{title}\n{pages[page - 1]}"
    if len(pages) == 1:
        return text
    rest = f"; the next is {document.doc_id}#{page + 1}" if page < len(pages) else ""
    return f"{text}\n(page {page} of {len(pages)}{rest})"


def split_pages(text: str, page_chars: int) -> list[str]:
    """Cut a text into pages of at most ``page_chars`` characters, between words where there are any."""
    pages = []
    start = 0
    while len(text) - start > page_chars:
        end = text.rfind(" ", start + 1, start + page_chars + 1)
        end = end if end > start else start + page_chars
        pages.append(text[start:end].strip())
        start = end
    pages.append(text[start:].strip())
    return [page for page in pages if page] or [""]


_TAG_START = re.compile(r"<(?=[/|!?A-Za-z])")


def neutralise(text: str) -> str:
    """Break up everything in a tool's output that a chat template or the reward could take for markup.

    Otherwise a document could end the tool's turn (``<|im_end|>`` becomes a special token) or answer the question.
    """
    return _TAG_START.sub("< ", text)
