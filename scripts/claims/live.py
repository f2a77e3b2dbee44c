"""Real training with stock verl and with WAR: `verl-war compare --mode live`."""

from __future__ import annotations

from typing import Any

from scripts.claims.marks import claim
from scripts.claims.results import read, table

QUANTITIES = ("generated tokens", "rollout s, median", "step s, median", "response tokens per rollout s, median")


def _summary(folder: str) -> Any:
    return read(f"{folder}/report.json")["summary"]


@claim
def live(*folders: str) -> str:
    """Both arms' numbers and their ratio, with the range over the repeats, for each folder."""
    lines = []
    for folder in folders:
        summary = _summary(folder)
        for name in QUANTITIES:
            base, other = (summary["arms"][arm]["quantities"][name] for arm in ("stock", "war"))
            found = summary["ratios"]["war"][name]
            low, high = found["repeats_min_max"]
            lines.append(
                [f"`{folder}`", name, _short(base), _short(other), f"{found['ratio']:.2f} ({low:.2f} - {high:.2f})"]
            )
    return table(["training", "", "stock verl", "WAR", "WAR / stock verl"], lines)


@claim
def live_rate(*folders: str) -> str:
    """Tokens per rollout second over stock verl's, one number for each folder."""
    rows = (_summary(folder)["ratios"]["war"]["response tokens per rollout s, median"] for folder in folders)
    return " / ".join(f"{row['ratio']:.2f}x" for row in rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
