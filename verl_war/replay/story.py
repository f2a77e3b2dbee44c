"""The life of one trajectory in words: when it was held, why it moved, where its turns ran."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_war.core.journal import JournalError, time_of
from verl_war.core.types import Reason
from verl_war.replay.reader import records

REASONS: dict[str, str] = {
    Reason.STICKY: "its conversation is at home there",
    Reason.LEAST_INFLIGHT: "fewest requests in flight",
    Reason.DETERMINISTIC: "hash of its conversation (full_determinism)",
    Reason.PRICED: "least price of the replicas looked at",
    Reason.GROUP: "joins the siblings that were placed just before, whose prompt is in the cache",
    Reason.MOVED: "cheaper than its home, the lost cache included",
    Reason.RESUMED: "its KV fits again",
    Reason.OVERSIZE: "its context is larger than any replica's KV",
    Reason.STARVED: "held for max_hold_s; its KV does not fit",
    Reason.DEADLINE: "its sandbox would expire; its KV does not fit",
}
"""Each reason of a placement, as the answer to "why there and why now"."""

TERMS: dict[str, str] = {
    "prefill_s": "prefill of what the cache lacks",
    "offload_s": "fetching from host memory",
    "queue_s": "prefill queued before it",
    "decode_s": "decoding",
    "overflow_s": "KV overflow",
}
"""Terms of a price in words; others are shown by their names."""


def story(path: Path, trajectory_id: str) -> list[str]:
    """What happened to a trajectory, one line per event, times from the begin of the journal.

    Raises:
        JournalError: The file is damaged, or knows no such trajectory.
    """
    teller = _Teller(trajectory_id)
    lines: list[str] = []
    seen: set[str] = set()
    for number, record in records(path):
        if number == 1 and (not isinstance(record, Mapping) or "war_journal" not in record):
            raise JournalError(f"{path}:1: no header of a WAR journal")
        try:
            turn = record.get("turn")
            if turn is not None:
                seen.add(turn["trajectory_id"])
            lines += teller.tell(record)
        except JournalError as error:
            raise JournalError(f"{path}:{number}: {error}") from error
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise JournalError(f"{path}:{number}: damaged event ({type(error).__name__}: {error})") from error
    if not lines:
        close = ", ".join(difflib.get_close_matches(trajectory_id, seen, n=3)) or "none like it"
        raise JournalError(f"trajectory {trajectory_id!r} is not in {path} ({len(seen)} are; similar: {close})")
    return lines


class _Teller:
    """Picks one trajectory out of the records."""

    def __init__(self, trajectory_id: str) -> None:
        self._trajectory_id = trajectory_id
        self._begin_s: float | None = None
        self._is_over = False
        self._turns: dict[str, int] = {}
        self._homes: dict[str, str] = {}

    def tell(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Sentences about an event and about the turns that it let start."""
        at_s = time_of(record)
        if at_s is None:
            return
        if self._begin_s is None:
            self._begin_s = at_s
        if self._is_over:
            return
        clock = f"{at_s - self._begin_s:9.3f} s  "
        starts = [start for start in record.get("starts", []) if start["trajectory_id"] == self._trajectory_id]
        event = record["event"]
        if event == "turn" and record["turn"]["trajectory_id"] == self._trajectory_id:
            yield clock + self._asks(record["turn"], record.get("error", ""), starts)
        elif event == "turn_end" and record["trajectory_id"] == self._trajectory_id:
            yield clock + self._ends(record)
        elif event == "turn_abandoned" and record["session_id"] in self._turns:
            yield clock + "its client gives the held turn up"
        elif event == "trajectory_end" and record["trajectory_id"] == self._trajectory_id:
            self._is_over = True
            yield clock + ("fails" if record["failed"] else "is finished")
        elif event == "replica_down" and record["replica_id"] in self._homes.values():
            yield clock + f"its replica {record['replica_id']} {'breaks' if record['is_lost'] else 'leaves the pool'}"
        for start in starts:
            yield clock + self._starts(start)

    def _asks(self, turn: Mapping[str, Any], error: str, starts: list[Mapping[str, Any]]) -> str:
        session = turn["session_id"]
        number = self._turns[session] = self._turns.get(session, 0) + 1
        asks = f"asks for turn {number} of conversation {session}: {turn['prompt_tokens']} tokens"
        if error:
            return f"{asks}; refused: {error}"
        if any(start["session_id"] == session for start in starts):
            return asks
        paused = ", so the conversation is paused" if number > 1 else ""
        return f"{asks}; held: its KV does not fit{paused}"

    def _starts(self, start: Mapping[str, Any]) -> str:
        session, replica = start["session_id"], start["replica_id"]
        home = self._homes.get(session)
        self._homes[session] = replica
        verb = "runs" if home in (None, replica) else f"moves from {home} and runs"
        held = f" after {start['held_s']:.3f} s of holding" if start["held_s"] > 0 else ""
        why = REASONS.get(start["reason"], start["reason"])
        return f"{verb} on {replica}{held}: {why} ({start['reason']}){_price(start['price_s'])}"

    def _ends(self, record: Mapping[str, Any]) -> str:
        result = record["result"]
        where = f"turn ends on {record['replica_id']}"
        if result["failed"]:
            return f"{where}: it failed"
        cached = result["num_cached_tokens"]
        hits = "" if cached is None else f", {cached} prompt tokens from the cache"
        aborted = ", given up by the engine" if result["aborted"] else ""
        return f"{where}: {result['completion_tokens']} tokens generated{hits}{aborted}"


def _price(terms: Mapping[str, float]) -> str:
    """Terms of a price that matter, in words."""
    if not terms:
        return ""
    parts = [f"{TERMS.get(name, name)} {value:.3f} s" for name, value in terms.items()
             if name not in ("total", "saved_s") and value >= 0.0005]  # fmt: skip
    saved = f", saves {terms['saved_s']:.3f} s" if "saved_s" in terms else ""
    return f"; price {terms.get('total', 0.0):.3f} s = {' + '.join(parts) or 'nothing'}{saved}"
