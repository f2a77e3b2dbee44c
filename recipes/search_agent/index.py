"""BM25 search over a corpus, built once per process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import bm25s

from recipes.search_agent.corpus import Document, read_corpus

TITLE_WEIGHT = 3
"""How often a title counts: a long text that mentions a name often must not outrank the document about it."""


class CorpusIndex:
    """Documents by id and by relevance. Read-only after construction, so threads may share it."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Index the documents.

        Raises:
            ValueError: none of them holds a word.
        """
        self._documents = documents
        self._by_id = {document.doc_id: document for document in documents}
        words = tokenize([f"{f'{document.title} ' * TITLE_WEIGHT}{document.text}" for document in documents])
        if not any(words):
            raise ValueError(f"corpus: none of the {len(documents)} documents holds a word; expected at least one")
        self._bm25 = bm25s.BM25(backend="numpy")
        self._bm25.index(words, show_progress=False)

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, doc_id: str) -> Document | None:
        """Return the document with this id, if there is one."""
        return self._by_id.get(doc_id)

    def search(self, query: str, top_k: int) -> list[Document]:
        """Return up to ``top_k`` documents that share a word with the query, the most relevant first."""
        numbers, scores = self._bm25.retrieve(
            tokenize([query]), k=min(top_k, len(self)), show_progress=False, backend_selection="numpy"
        )
        return [self._documents[n] for n, score in zip(numbers[0], scores[0], strict=True) if score > 0]


def tokenize(texts: list[str]) -> list[list[str]]:
    """Split texts into lower-case words.

    No stop words are dropped: a name may consist of nothing else, and BM25 gives frequent words little weight anyway.
    """
    return bm25s.tokenize(texts, stopwords=None, token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False)


_INDEXES: dict[Path, tuple[tuple[int, int], CorpusIndex]] = {}
_LOADING = threading.Lock()


def load_index(path: Path) -> CorpusIndex:
    """Return the index of a corpus file, built at the first call in this process and again if the file has changed.

    Raises:
        ValueError: the file is missing or malformed.
    """
    if not path.is_file():
        raise ValueError(f"corpus_path is {str(path)!r}; expected a JSONL file, prepare the data first")
    path = path.resolve()
    stat = path.stat()
    version = (stat.st_mtime_ns, stat.st_size)
    with _LOADING:
        known = _INDEXES.get(path)
        if known is None or known[0] != version:
            known = _INDEXES[path] = (version, CorpusIndex(read_corpus(path)))
        return known[1]
