"""Replays trajectories as an engine would generate them, and counts how many drafted tokens came true."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scripts.history_texts import Trajectory
from verl_war.history.index import MATCH_BUCKETS, SOURCES, DraftBatch, HistoryIndex, match_bucket


class Drafter(Protocol):
    """A draft index as the replay drives it; rows are numbers of trajectories."""

    name: str

    def begin_step(self, step: int) -> None: ...
    def begin_turn(self, row: int, trajectory: Trajectory, end: int) -> None: ...
    def append(self, rows: Sequence[int], texts: Sequence[np.ndarray]) -> None: ...
    def draft(self, rows: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]: ...
    def feedback(self, accepted: Sequence[int]) -> None: ...
    def end(self, row: int) -> None: ...


@dataclass(slots=True)
class Tally:
    """Totals of a replay. `accepted / lookups` + 1 is what an engine step commits per request."""

    lookups: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    draft_s: float = 0.0
    append_s: float = 0.0

    def row(self) -> dict[str, float]:
        """For the report."""
        lookups = max(1, self.lookups)
        return {
            "lookups": self.lookups,
            "mean_accepted_tokens": round(self.accepted / lookups, 3),
            "mean_drafted_tokens": round(self.drafted / lookups, 3),
            "accepted_of_drafted": round(self.accepted / max(1, self.drafted), 3),
            "generated_tokens": self.generated,
            "draft_us_per_lookup": round(1e6 * self.draft_s / lookups, 2),
            "append_us_per_token": round(1e6 * self.append_s / max(1, self.generated), 2),
        }


@dataclass(slots=True)
class _Running:
    row: int
    trajectory: Trajectory
    turns: list[tuple[int, int]]
    at: int = 0


def replay(drafter: Drafter, trajectories: Sequence[Trajectory], *, concurrent: int, max_draft: int) -> list[Tally]:
    """Generate all trajectories step by step, `concurrent` at a time; returns one tally per policy step."""
    tallies = []
    for step in sorted({trajectory.step for trajectory in trajectories}):
        tally = Tally()
        drafter.begin_step(step)
        waiting = [(row, t) for row, t in enumerate(trajectories) if t.step == step and t.is_generated.any()]
        waiting.reverse()
        running: list[_Running] = []
        while waiting or running:
            while waiting and len(running) < concurrent:
                row, trajectory = waiting.pop()
                running.append(_Running(row, trajectory, list(trajectory.turns())))
                _begin_turn(drafter, running[-1])
            _engine_step(drafter, running, max_draft, tally)
            running = [each for each in running if each.turns]
        tallies.append(tally)
    return tallies


def _begin_turn(drafter: Drafter, each: _Running) -> None:
    each.at = each.turns[0][0]
    drafter.begin_turn(each.row, each.trajectory, each.at)


def _engine_step(drafter: Drafter, running: list[_Running], max_draft: int, tally: Tally) -> None:
    # The first token of a turn comes from the prefill, without a draft.
    decoding = [each for each in running if each.at > each.turns[0][0]]
    most = [min(max_draft, each.turns[0][1] - each.at) for each in decoding]
    contexts = [each.trajectory.tokens[max(0, each.at - 64) : each.at] for each in decoding]
    begin = time.perf_counter()
    drafts = drafter.draft([each.row for each in decoding], contexts, most)
    tally.draft_s += time.perf_counter() - begin
    accepted = {each.row: _agreeing(each, draft) for each, draft in zip(decoding, drafts, strict=True)}
    drafter.feedback(list(accepted.values()))
    tally.lookups += len(decoding)
    tally.drafted += sum(map(len, drafts))
    tally.accepted += sum(accepted.values())
    texts = []
    for each in running:
        count = min(accepted.get(each.row, 0) + 1, each.turns[0][1] - each.at)
        texts.append(each.trajectory.tokens[each.at : each.at + count])
        each.at += count
        tally.generated += count
    begin = time.perf_counter()
    drafter.append([each.row for each in running], texts)
    tally.append_s += time.perf_counter() - begin
    for each in running:
        if each.at == each.turns[0][1]:
            each.turns.pop(0)
            if each.turns:
                _begin_turn(drafter, each)
            else:
                drafter.end(each.row)


def _agreeing(each: _Running, draft: np.ndarray) -> int:
    truth = each.trajectory.tokens[each.at : each.at + len(draft)]
    differs = np.flatnonzero(truth != draft)
    return int(differs[0]) if len(differs) else len(draft)


class Ours:
    """Our index, with some of its sources; learns its acceptance table from the replay as an engine would."""

    def __init__(self, name: str, vocab_size: int, *, min_prob: float = 0.1, learn: bool = True, **options: object):
        self.name = name
        self.index = HistoryIndex(vocab_size=vocab_size, **options)  # type: ignore[arg-type]
        self.min_prob = min_prob
        self.learn = learn
        self.trials = np.full((len(SOURCES), len(MATCH_BUCKETS)), 8.0)
        self.hits = self.trials * [0.15, 0.2, 0.35, 0.6, 0.65, 0.75, 0.8, 0.85, 0.85, 0.9, 0.9, 0.95]
        self.batch: DraftBatch | None = None

    def begin_step(self, step: int) -> None:
        self.index.set_step(step, 8)
        self.index.collect()

    def begin_turn(self, row: int, trajectory: Trajectory, end: int) -> None:
        if row in self.index:
            self.index.extend(row, trajectory.tokens[:end], start=0)
        else:
            self.index.begin(row, trajectory.group, trajectory.step, trajectory.tokens[:end])

    def append(self, rows: Sequence[int], texts: Sequence[np.ndarray]) -> None:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        self.index.extend_batch(np.array(rows, np.int64), np.full(len(rows), -1), offsets, np.concatenate(texts))

    def draft(self, rows: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        batch = self.index.draft_batch(np.array(rows, np.int64), np.array(most, np.int32), self.min_prob)
        self.batch = batch
        return np.split(batch.tokens, batch.offsets[1:-1]) if rows else []

    def feedback(self, accepted: Sequence[int]) -> None:
        """Count what came of the tokens that single matches predicted."""
        batch = self.batch
        if not self.learn or batch is None:
            return
        for row, count in enumerate(accepted):
            drafted = int(batch.offsets[row + 1] - batch.offsets[row])
            for ahead in range(min(drafted, count + 1)):
                bucket = match_bucket(int(batch.match_length[row]) + ahead)
                self.trials[batch.source[row], bucket] += 1
                self.hits[batch.source[row], bucket] += ahead < count
        self.index.set_acceptance(self.hits / self.trials)

    def end(self, row: int) -> None:
        self.index.finish(row)


class Arctic:
    """arctic-inference's cache, driven as vLLM's `SuffixDecodingProposer` does: a new request for every turn."""

    def __init__(self, name: str = "arctic-inference", *, depth: int = 24, warm: bool = True) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.name = name
        self.warm = warm
        self.depth = depth
        self._make = lambda: SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=100_000)
        self.cache = self._make()
        self._turn: dict[int, int] = {}

    def begin_step(self, step: int) -> None:
        if not self.warm:
            self.cache = self._make()

    def begin_turn(self, row: int, trajectory: Trajectory, end: int) -> None:
        self.end(row)
        self._turn[row] = self._turn.get(row, 0) + 1
        self.cache.start_request((row, self._turn[row]), np.ascontiguousarray(trajectory.tokens[:end]))

    def append(self, rows: Sequence[int], texts: Sequence[np.ndarray]) -> None:
        for row, text in zip(rows, texts, strict=True):
            self.cache.add_active_response((row, self._turn[row]), np.ascontiguousarray(text))

    def draft(self, rows: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        drafts = []
        for row, context, tokens in zip(rows, contexts, most, strict=True):
            tail = np.ascontiguousarray(context[-self.depth :])
            draft = self.cache.speculate((row, self._turn[row]), tail, max_spec_tokens=tokens, min_token_prob=0.1)
            drafts.append(np.array(draft.token_ids, np.int32))
        return drafts

    def feedback(self, accepted: Sequence[int]) -> None:
        """It learns nothing."""

    def end(self, row: int) -> None:
        if row in self._turn and (row, self._turn[row]) in self.cache.active_requests:
            self.cache.stop_request((row, self._turn[row]))


__all__ = ["SOURCES", "Arctic", "Ours", "Tally", "replay"]
