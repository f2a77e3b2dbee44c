"""Series over time in bounded memory: bins of equal width that are merged in pairs whenever there are too many."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BINS = 720
"""A plot is about so many pixels wide; half as many are left after a merge."""

FIRST_WIDTH_S = 0.05
"""Width of the bins of a journal of half a minute or less."""

SAMPLES_PER_BIN = 4
"""A bin of a gauge is the mean of so many samples, so that wide bins show no chance moments."""

Sample = tuple[str, str, float]
"""Name of a gauge, replica (empty: the fleet), value."""

Floats = npt.NDArray[np.floating[Any]]


class _Series:
    """Sums and number of samples of each bin."""

    __slots__ = ("sums", "samples")

    def __init__(self) -> None:
        # Not NumPy's: single numbers are written, which these do four times as fast.
        self.sums = array("d", bytes(8 * MAX_BINS))
        self.samples = array("d", bytes(8 * MAX_BINS))

    def merge(self) -> None:
        """Make one bin of every two."""
        for values in (self.sums, self.samples):
            merged = np.frombuffer(values).reshape(-1, 2).sum(axis=1)
            values[:] = array("d", np.concatenate([merged, np.zeros(len(merged))]).tobytes())


class Timeline:
    """Gauges, which are sampled, and counters, whose increments are added up.

    Args:
        sample: Gives the gauges as they are now; what is not given has no value then.
    """

    def __init__(self, sample: Callable[[], Iterable[Sample]]) -> None:
        self._sample = sample
        self._begin_s: float | None = None
        self._next_s = 0.0
        self._now_s = 0.0
        self._width_s = FIRST_WIDTH_S
        self._series: dict[tuple[str, str], _Series] = {}

    @property
    def width_s(self) -> float:
        """Width of a bin."""
        return self._width_s

    @property
    def begin_s(self) -> float:
        """Time of the first event."""
        return self._begin_s or 0.0

    @property
    def end_s(self) -> float:
        """Time of the last event."""
        return self._now_s

    def edges(self) -> Floats:
        """Edges of the bins, in seconds since the first event; one more than there are bins."""
        return self._width_s * np.arange(self._bins() + 1)

    def advance(self, now_s: float) -> None:
        """Nothing has happened up to this time: sample the gauges. To be called before the event is applied."""
        if self._begin_s is None:
            self._begin_s = self._next_s = self._now_s = now_s
        self._now_s = max(self._now_s, now_s)
        while self._next_s < self._now_s:
            position = self._bin_of(self._next_s)
            for name, replica_id, value in self._sample():
                series = self._of(name, replica_id)
                series.sums[position] += value
                series.samples[position] += 1
            self._next_s += self._width_s / SAMPLES_PER_BIN

    def add(self, name: str, replica_id: str, amount: float) -> None:
        """A counter grew by so much, now."""
        self._of(name, replica_id).sums[self._bin_of(self._now_s)] += amount

    def replicas(self, name: str) -> list[str]:
        """Replicas of which there is such a series."""
        return [replica_id for known, replica_id in self._series if known == name]

    def mean(self, name: str, replica_id: str = "") -> Floats:
        """Mean of a gauge in each bin; NaN where it had no value."""
        series = self._series.get((name, replica_id), _Series())
        bins = self._bins()
        return ratio(np.array(series.sums[:bins]), np.array(series.samples[:bins]))

    def sums(self, name: str, replica_id: str | None = None) -> Floats:
        """What was added to a counter in each bin, of one replica or of all."""
        names = self.replicas(name) if replica_id is None else [replica_id]
        total = np.zeros(self._bins())
        for series in (self._series.get((name, it)) for it in names):
            if series is not None:
                total += np.array(series.sums[: len(total)])
        return total

    def _bins(self) -> int:
        return int((self._now_s - self.begin_s) / self._width_s) + 1

    def _bin_of(self, at_s: float) -> int:
        while (position := int((at_s - self.begin_s) / self._width_s)) >= MAX_BINS:
            self._width_s *= 2
            for series in self._series.values():
                series.merge()
        return position

    def _of(self, name: str, replica_id: str) -> _Series:
        series = self._series.get((name, replica_id))
        if series is None:
            series = self._series[name, replica_id] = _Series()
        return series


def ratio(part: Floats, whole: Floats) -> Floats:
    """One over the other; NaN where there is nothing to divide by."""
    result: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return result
