"""What the draft planner costs in an engine step: CPU time of its calls, by requests in the batch.

    python scripts/bench_planner.py                 # half a minute
    python scripts/bench_planner.py --rows 64 --profile

Every step makes the calls of a live engine: a decision, then with drafts the count of classes, the allocation, each
verified draft and the measured step. Times are CPU time of the thread, of the fastest of several rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from verl_war.core.history_config import SOURCES
from verl_war.core.speculation import DraftPlanner
from verl_war.core.speculation_limits import SpeculationLimits
from verl_war.sim.draft_world import CLASS_MATCHES

ROWS = (1, 16, 64, 256)
WARM_STEPS = 600
ROUNDS = 7
STEPS_PER_ROUND = 300
FOUND_SHARE = 0.6
"""Share of the look-ups that find a draft, in text that repeats itself."""

CLASSES = (20, 53, 71)
"""Of the drafts that are found."""

PLAIN_S, ROW_S, DRAFT_S, DRAFT_TOKEN_S = 0.01, 2e-5, 5e-4, 2e-6
"""Of the engine: a GPU, on which drafts pay at every batch size of `ROWS`."""


class Engine:
    """A steady batch whose drafts are accepted in part.

    Args:
        rows: Requests in the batch.
        drafts: Whether text is found; without, only decisions and plain steps are left.
        clock: Tells seconds.
    """

    def __init__(self, rows: int, drafts: bool, clock: Callable[[], float] = time.thread_time) -> None:
        self.planner = DraftPlanner(SpeculationLimits(), SOURCES, CLASS_MATCHES)
        self._rows, self._drafts, self._clock = rows, drafts, clock
        self._rng = random.Random(rows)
        self._now_s, self._kv_tokens = 0.0, 4000.0 * rows
        self.spent_s: Counter[str] = Counter()

    def step(self) -> None:
        """One engine step; what its calls took is added to `spent_s`."""
        rows, rng, planner = self._rows, self._rng, self.planner
        limit = self._timed("lookup_limit", lambda: planner.lookup_limit(rows, self._kv_tokens, self._now_s))
        tokens = accepted = drafting = 0
        share = FOUND_SHARE if self._drafts else 0.0
        kinds = [rng.choice(CLASSES) if rng.random() < share else -1 for _ in range(rows)]
        planner.acceptance.observe_mix(Counter(kinds), rows)  # an engine looks some up even when it drafts nothing
        if limit:
            found = [min(limit, 1 + rng.randrange(16)) if kind >= 0 else 0 for kind in kinds]
            chosen = self._timed("allocate", lambda: planner.allocate(rows, self._kv_tokens, kinds, found))
            hits = [rng.randrange(length + 1) for length in chosen]
            verified = [item for item in zip(kinds, chosen, hits, strict=True) if item[1]]
            self._timed("observe_draft", lambda: [planner.observe_draft(*item) for item in verified])
            tokens, accepted, drafting = sum(chosen), sum(hits), len(verified)
        seconds = PLAIN_S + ROW_S * rows + (DRAFT_S + DRAFT_TOKEN_S * tokens if tokens else 0.0)
        seconds *= rng.uniform(0.95, 1.05)
        self._timed(
            "observe_step",
            lambda: planner.observe_step(
                rows=rows, kv_tokens=self._kv_tokens, drafting_rows=drafting, draft_tokens=tokens,
                accepted_tokens=accepted, seconds=seconds,
            ),
        )  # fmt: skip
        self._now_s += seconds
        self._kv_tokens += rows + accepted

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        begin_s = self._clock()
        result = call()
        self.spent_s[name] += self._clock() - begin_s
        return result


CALLS = ("lookup_limit", "allocate", "observe_draft", "observe_step")


def measure(rows: int, drafts: bool) -> dict[str, float]:
    """Microseconds per engine step of each call, in the fastest round."""
    engine = Engine(rows, drafts)
    for _ in range(WARM_STEPS):
        engine.step()
    rounds = []
    for _ in range(ROUNDS):
        engine.spent_s.clear()
        for _ in range(STEPS_PER_ROUND):
            engine.step()
        rounds.append({name: 1e6 * engine.spent_s[name] / STEPS_PER_ROUND for name in CALLS})
    return min(rounds, key=lambda spent: sum(spent.values()))


def profile(rows: int) -> None:
    """Print where a drafting planner spends its time."""
    engine = Engine(rows, drafts=True, clock=float)
    for _ in range(WARM_STEPS):
        engine.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS_PER_ROUND):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="requests in the batch (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="show functions instead of times")
    options = parser.parse_args()
    sizes = [int(word) for word in options.rows.split(",")]
    if options.profile:
        for rows in sizes:
            profile(rows)
        return
    print("us per engine step".ljust(24) + "".join(f"{name:>15}" for name in (*CALLS, "all")))
    for drafts in (True, False):
        for rows in sizes:
            spent = measure(rows, drafts)
            label = f"{rows} rows, " + ("drafts" if drafts else "nothing found")
            print(label.ljust(24) + "".join(f"{us:>15.1f}" for us in (*spent.values(), sum(spent.values()))))


if __name__ == "__main__":
    main()
