"""What WAR itself takes: the router's decisions and the draft index."""

from __future__ import annotations

from scripts.claims.marks import claim
from scripts.claims.results import read, span


@claim
def router_decision(quantity: str) -> str:
    """Microseconds of placing a turn, over all sizes of fleet: `p50_us` or `p99_us`."""
    return span((row["events"]["on_turn"][quantity] for row in read("router/router.json")["core"]), ".0f")


@claim
def router_rate() -> str:
    """Decisions a second of the Ray actor, over all sizes of fleet."""
    return span((row["decisions_per_s"] for row in read("router/router.json")["actor"]), ",.0f")


@claim
def index_cost(arm: str, quantity: str) -> str:
    """What a draft index takes per token, over all sizes of text."""
    rows = [row for row in read("history/results.json")["sizes"]["results"] if row["arm"] == arm]
    return span((row[quantity] for row in rows), ".2g" if quantity.endswith("us_per_token") else ".0f")


@claim
def index_lookup(arm: str, quantity: str) -> str:
    """Microseconds of a look-up that finds something: `p50_us` or `p99_us`."""
    rows = [row for row in read("history/results.json")["sizes"]["results"] if row["arm"] == arm]
    return span((row["hit"][quantity] for row in rows), ".0f")
