"""Permutation tests of two samples that come in groups, and a bootstrap interval of paired groups.

Trajectories of one prompt resemble one another, so labels of arms are never permuted over prompts.
Source: Good, Permutation, Parametric and Bootstrap Tests of Hypotheses, chapters 3 and 7; Holm, A Simple Sequentially
Rejective Multiple Test Procedure (1979); Davison and Hinkley, Bootstrap Methods and their Application, section 3.8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.bool_]
"""True for the second arm: one per row, or a row of them per permutation."""

Floats = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]

CHUNK = 500
"""Permutations at a time: some 10 MB of labels for the largest comparison."""

MAX_EXACT_GROUPS = 12
"""Up to 4,096 ways to swap groups are enumerated instead of drawn."""

ROUNDING = 1e-9
"""Sums of the same numbers in another order differ by less; such permutations count as equal to what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSample:
    """A comparison of two samples in one quantity.

    Attributes:
        difference: Second arm minus first, mean over groups weighted by their sizes.
        ks: Kolmogorov-Smirnov distance of the two samples.
        p_difference: Share of permutations with a difference at least as large, in either direction.
        p_ks: The same of the distance.
    """

    difference: float
    ks: float
    p_difference: float
    p_ks: float


def within_groups(labels: Labels, groups: Groups, count: int, rng: np.random.Generator) -> Iterator[Labels]:
    """``count`` permutations of the labels inside every group.

    Exact when trajectories of a group are independent and have the same distribution in both arms.
    """
    order = np.argsort(groups, kind="stable")
    for size in _chunks(count):
        drawn = np.argsort(groups[order] + rng.random((size, len(labels))), axis=1)
        permuted = np.empty((size, len(labels)), dtype=bool)
        permuted[:, order] = labels[order][drawn]
        yield permuted


def swapped_groups(labels: Labels, groups: Groups, count: int, rng: np.random.Generator) -> Iterator[Labels]:
    """``count`` times swap the two arms of every group, or not, with equal chance.

    Exact when groups are independent of one another, whatever the trajectories of a group have in common.
    """
    for size in _chunks(count):
        flips = rng.random((size, int(groups.max()) + 1)) < 0.5
        yield labels ^ flips[:, groups]


def every_swap(labels: Labels, groups: Groups) -> Iterator[Labels]:
    """All ways to swap the arms of groups, that of the data included."""
    flips = np.array(list(itertools.product([False, True], repeat=int(groups.max()) + 1)))
    for begin in range(0, len(flips), CHUNK):
        yield labels ^ flips[begin : begin + CHUNK][:, groups]


def compare(
    values: Mapping[str, Floats], labels: Labels, groups: Groups, permutations: Iterable[Labels], has_identity: bool
) -> dict[str, TwoSample]:
    """Compare the arms in each quantity, all with the same permutations.

    Args:
        values: Quantity -> one value per row.
        labels: Which rows are of the second arm.
        groups: Rows of a group differ in nothing but the arm and chance.
        permutations: From one of the functions above.
        has_identity: Whether the labels of the data are among them.
    """
    statistics = {name: _Statistics(column, labels, groups) for name, column in values.items()}
    seen = {name: both(labels[None, :]) for name, both in statistics.items()}
    at_least = {name: np.zeros(2) for name in values}
    count = 0
    for chunk in permutations:
        count += len(chunk)
        for name, both in statistics.items():
            at_least[name] += (np.abs(both(chunk)) >= np.abs(seen[name]) - ROUNDING).sum(axis=1)
    extra = 0 if has_identity else 1  # the data are one of the permutations, or p could be 0
    result = {}
    for name in values:
        p_difference, p_ks = (at_least[name] + extra) / (count + extra)
        difference, ks = seen[name][:, 0]
        result[name] = TwoSample(
            difference=float(difference), ks=float(ks), p_difference=float(p_difference), p_ks=float(p_ks)
        )
    return result


class _Statistics:
    """Difference of means and Kolmogorov-Smirnov distance for many labellings of the same rows."""

    def __init__(self, values: Floats, labels: Labels, groups: Groups) -> None:
        sizes = np.bincount(groups)
        treated = np.bincount(groups, weights=labels)
        # Weighted by n0 n1 / (n0 + n1), the sum of a group's differences is the sum of its centred treated values.
        self._centred = values - (np.bincount(groups, weights=values) / sizes)[groups]
        self._weight = float((treated * (sizes - treated) / sizes).sum())
        self._order = np.argsort(values, kind="stable")
        ordered = values[self._order]
        self._last_of_ties = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))

    def __call__(self, labels: Labels) -> Floats:
        """Two rows, difference and distance, with a column for each labelling."""
        difference = labels @ self._centred / self._weight
        ordered = labels[:, self._order]
        treated = np.cumsum(ordered, axis=1)
        base = np.arange(1, ordered.shape[1] + 1) - treated
        gaps = treated / treated[:, -1:] - base / base[:, -1:]
        return np.stack([difference, np.abs(gaps[:, self._last_of_ties]).max(axis=1)])


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those below alpha errs in the whole family with a chance of at most alpha."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def paired_interval(
    differences: Sequence[Floats], resamples: int, confidence: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Bootstrap interval of the mean over runs, percentile method in two levels: runs, then prompts of each run.

    Few runs alone would give too narrow an interval; drawing prompts anew in each makes up for most of it. Intervals of
    95% from three runs still hold in 88% of simulated cases (`tests/compare/unchanged`).

    Args:
        differences: For each run (pair of arms), the difference of the arms for each of its prompts.
        resamples: How often to draw.
        confidence: Of the interval.
        rng: Source of chance.
    """
    means = np.empty(resamples)
    for number in range(resamples):
        runs = rng.integers(len(differences), size=len(differences))
        means[number] = np.mean([rng.choice(differences[run], len(differences[run])).mean() for run in runs])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _chunks(count: int) -> Iterator[int]:
    for begin in range(0, count, CHUNK):
        yield min(CHUNK, count - begin)
