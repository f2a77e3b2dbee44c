"""`python -m scripts.claims`: write the generated parts of all documents, or with `--check` only compare them."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.claims import code, costs, engines, fixed_work, fleets, live, unchanged  # noqa: F401  (what marks name)
from scripts.claims.marks import ClaimError, rendered

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "verl_war/METRICS.md",
    "recipes/baseline_comparison/README.md",
    "recipes/baseline_comparison/gpu/README.md",
)
EXIT_DIFFERENT = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Return the exit status: 0, 1 when a document differs from its sources, 2 when a mark or a file is wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.claims", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; show what would be changed")
    options = parser.parse_args(arguments)
    try:
        changed = {name: (text, new) for name in DOCUMENTS for text, new in [_both(root, name)] if text != new}
    except ClaimError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    for name, (text, new) in changed.items():
        if options.check:
            lines = difflib.unified_diff(text.splitlines(), new.splitlines(), name, f"{name}, as it should be", n=0)
            sys.stdout.write("\n".join([*(line.rstrip("\n") for line in lines), ""]))
        else:
            (root / name).write_text(new)
            sys.stdout.write(f"wrote {name}\n")
    return EXIT_DIFFERENT if options.check and changed else 0


def _both(root: Path, name: str) -> tuple[str, str]:
    text = (root / name).read_text()
    return text, rendered(name, text)


if __name__ == "__main__":
    sys.exit(main())
