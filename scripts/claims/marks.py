"""Marks in a document, and the text between them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping

Make = Callable[..., str]

CLAIMS: dict[str, Make] = {}
"""Name in a mark -> what makes the text of its words."""

MARK = re.compile(r"<!--\s*(?:r:(?P<words>.*?)|/r)\s*-->", re.S)

FIRST_ON_LINE = re.compile(r"[\s>*+-]*")
"""What may stand before a mark for it still to be the first thing on its line."""


class ClaimError(Exception):
    """A mark or the result file behind it is not as it must be."""


def claim(make: Make) -> Make:
    """Let marks use a function by its name.

    Raises:
        ValueError: Another function has that name already.
    """
    if make.__name__ in CLAIMS:
        raise ValueError(f"the name {make.__name__!r} is taken by {CLAIMS[make.__name__].__module__}; choose another")
    CLAIMS[make.__name__] = make
    return make


def rendered(document: str, text: str, claims: Mapping[str, Make] = CLAIMS) -> str:
    """The text with everything between its marks made anew.

    Raises:
        ClaimError: A mark is unknown or not closed, or what it stands for cannot be made; names document and line.
    """
    parts: list[str] = []
    position = 0
    opened: re.Match[str] | None = None
    for mark in MARK.finditer(text):
        if (mark["words"] is None) == (opened is None):
            raise _unpaired(document, text, opened or mark)
        if opened is None:
            opened = mark
            parts.append(text[position : mark.end()])
        else:
            parts += [_inside(document, text, opened, mark, claims), mark[0]]
            opened = None
        position = mark.end()
    if opened is not None:
        raise _unpaired(document, text, opened)
    return "".join([*parts, text[position:]])


def _inside(document: str, text: str, opened: re.Match[str], closed: re.Match[str], claims: Mapping[str, Make]) -> str:
    where = f"{_place(document, text, opened)}: {opened[0]}"
    made = _make(where, opened["words"].split(), claims)
    if text.startswith("\n", opened.end()):
        return f"\n{made}\n"
    if "\n" in made:
        raise ClaimError(f"{where} makes a table; put both marks on lines of their own")
    line = text[text.rfind("\n", 0, opened.start()) + 1 : opened.start()]
    if FIRST_ON_LINE.fullmatch(line):
        # A comment at the beginning of a line would make all of the line HTML, without Markdown.
        raise ClaimError(f"{where} begins a line; put a word of the sentence before it")
    return made


def _make(where: str, words: list[str], claims: Mapping[str, Make]) -> str:
    name, *arguments = words or [""]
    if name not in claims:
        raise ClaimError(f"{where}: {name!r} is unknown; expected one of {', '.join(sorted(claims))}")
    signature = inspect.signature(claims[name])
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ClaimError(f"{where}: {error}; expected the words of {name}{signature}") from error
    try:
        return claims[name](*arguments)
    except LookupError as error:
        raise ClaimError(f"{where}: its result file has no {error}") from error
    except (OSError, ValueError) as error:
        raise ClaimError(f"{where}: {error}") from error


def _unpaired(document: str, text: str, mark: re.Match[str]) -> ClaimError:
    missing = "has no mark that opens it" if mark["words"] is None else "is not closed by <!-- /r -->"
    return ClaimError(f"{_place(document, text, mark)}: {mark[0]} {missing}")


def _place(document: str, text: str, mark: re.Match[str]) -> str:
    line = text.count("\n", 0, mark.start()) + 1
    return f"{document}:{line}"
