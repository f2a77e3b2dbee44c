"""Reading result files, and how their numbers are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "recipes" / "baseline_comparison" / "results"


def read(path: str) -> Any:
    """What a file below `RESULTS` holds.

    Raises:
        OSError, ValueError: It is missing or no JSON; the message names it.
    """
    file = RESULTS / path
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} is missing; make it again with its bench, or take the mark out") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error})") from error


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join([_row(head), "|" + "---|" * len(head), *(_row(cells) for cells in rows)])


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def spread(mean: float, least: float, most: float) -> str:
    """A ratio and its range."""
    return f"{mean:.2f} ({least:.2f} - {most:.2f})"


def times(ratios: Iterable[float]) -> str:
    """Ratios as the summary of a page has them: `3.7x / 2.6x`."""
    return " / ".join(f"{ratio:.1f}x" for ratio in ratios)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the greatest of some values: `0.96 to 1.10`."""
    texts = [f"{value:{form}}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
