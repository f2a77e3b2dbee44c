"""Write the tables that the README shares with the code: `python scripts/update_readme.py`."""

from __future__ import annotations

import re
from pathlib import Path

from verl_war.core import speculation_report, step_stats
from verl_war.support import format_matrix

README = Path(__file__).parents[1] / "README.md"


def metrics_table() -> str:
    """Markdown table of all metrics."""
    metrics = step_stats.METRICS | speculation_report.METRICS
    rows = [f"| `{name}` | {unit} | {source} |" for name, (unit, source) in metrics.items()]
    return "\n".join(["| metric | unit | what it is |", "|---|---|---|", *rows])


def rendered(readme: str) -> str:
    """The README with its tables as the code has them."""
    for name, table in {"metrics": metrics_table(), "support": format_matrix()}.items():
        block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
        readme, count = re.subn(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _: block, readme, flags=re.S)  # noqa: B023
        if count != 1:
            raise ValueError(f"README.md has {count} places marked <!-- {name} -->; expected one")
    return readme


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
