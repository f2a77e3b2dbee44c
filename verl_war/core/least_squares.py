"""Non-negative least squares of a stream of measured times: forgetting, a prior, outliers, goodness."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

OUTLIER_RATIO = 5.0
"""A measurement this many times slower or faster than expected counts as if at that bound: weight updates, first-time
compilation and a process that was not scheduled tell nothing of the work."""

PERSISTENT_MEASUREMENTS = 3
"""So many in a row beyond the same bound are no outliers: what was expected is wrong."""

REFIT_SHARE = 0.03
"""New observations, as a share of those remembered, from which the fit is solved again: it moves by little more."""


LEAST_SIZE = 0.01
"""Values that are all smaller, in proportion to their size, do not make the prior's weight vanish."""


@dataclass(slots=True)
class OutlierRule:
    """Tells a stall from a change: see `OUTLIER_RATIO` and `PERSISTENT_MEASUREMENTS`."""

    _beyond: int = 0
    """Measurements in a row over the upper bound; negative under the lower one."""

    def bounded(self, value: float, expected: float) -> float:
        """The value, or the bound if it is beyond one and those before it were not."""
        low, high = expected / OUTLIER_RATIO, expected * OUTLIER_RATIO
        if low <= value <= high:
            self._beyond = 0
            return value
        side = 1 if value > high else -1
        self._beyond = self._beyond + side if self._beyond * side > 0 else side
        return value if self.is_persistent else min(max(value, low), high)

    @property
    def is_persistent(self) -> bool:
        """Whether the last measurement and those before it show that the expectation is wrong."""
        return abs(self._beyond) >= PERSISTENT_MEASUREMENTS


class NonNegativeFit:
    """Coefficients, all at least 0, of a linear function of features of which the first is always 1.

    Errors are relative ones: they are divided by the size of what is measured, so that iterations that prefill for a
    second don't outweigh the decoding ones. The prior pulls every coefficient, in proportion to its scale, and less the
    more was measured; where the features tell nothing, as when they never change, it decides.

    Args:
        features: Number of features.
        half_life: Observations this old count half.
        prior_observations: Weight of the prior, in observations.
    """

    __slots__ = ("_half_life", "_pairs", "_places", "_prior_observations", "_squares", "_sums", "_unfitted", "count")

    def __init__(self, features: int, *, half_life: float, prior_observations: float) -> None:
        self.count = 0.0
        self._half_life = half_life
        self._prior_observations = prior_observations
        # Weighted sums of all products of two of (features, value), upper triangle.
        self._pairs = [(i, j) for i in range(features + 1) for j in range(i, features + 1)]
        self._places = [
            [self._pairs.index((min(i, j), max(i, j))) for j in range(features + 1)] for i in range(features)
        ]
        self._sums = [0.0] * len(self._pairs)
        self._squares = 0.0
        self._unfitted = 0.0

    def add(self, count: float, features: Sequence[float], value: float, size: float) -> None:
        """Take in ``count`` observations with these mean features and this mean value, typically of ``size``."""
        keep = 0.5 ** (count / self._half_life)
        weight = count / (size * size)
        point = (*features, value)
        self._sums = [
            old * keep + weight * point[i] * point[j] for old, (i, j) in zip(self._sums, self._pairs, strict=True)
        ]
        self.count = self.count * keep + count
        self._squares = self._squares * keep * keep + count * count
        self._unfitted += count

    @property
    def observations(self) -> float:
        """Effective number of independent additions, from how unequal their weights are.

        Source: Kish 1965, Survey Sampling: (sum of weights)^2 / sum of squared weights.
        """
        return self.count * self.count / self._squares if self._squares else 0.0

    def level(self, prior: Sequence[float]) -> float:
        """The factor by which the prior as a whole fits best; 1 before anything was measured."""
        if not self.count:
            return 1.0
        gram, moment, _ = self._moments()
        rest = sum(p * g * q for p, row in zip(prior, gram, strict=True) for g, q in zip(row, prior, strict=True))
        return sum(p * m for p, m in zip(prior, moment, strict=True)) / rest if rest > 0 else 1.0

    @property
    def is_due(self) -> bool:
        """Whether enough is new that solving again is worth its time."""
        return self._unfitted > 0 and self._unfitted >= REFIT_SHARE * self.count

    def solve(self, prior: Sequence[float], scale: Sequence[float]) -> tuple[float, ...]:
        """The coefficients, pulled towards ``prior``; ``scale`` is how far each may be off, all over 0."""
        self._unfitted = 0.0
        if not self.count:
            return tuple(prior)
        gram, moment, squares = self._moments()
        share = self._prior_observations * min(1.0, self._prior_observations / self.count)
        pull = share * max(squares / self.count, LEAST_SIZE**2) / len(scale)
        for i, row in enumerate(gram):
            for j in range(len(row)):
                row[j] *= scale[i] * scale[j]
            row[i] += pull
        target = [m * s + pull * p / s for m, s, p in zip(moment, scale, prior, strict=True)]
        return tuple(x * s for x, s in zip(solve_nonnegative(gram, target), scale, strict=True))

    def r2(self, coefficients: Sequence[float]) -> float | None:
        """Share of the weighted variance that these coefficients explain; None where nothing varied.

        Source: coefficient of determination, 1 - sum of squared errors over sum of squares about the mean.
        """
        gram, moment, squares = self._moments()
        if not self.count:
            return None
        spread = squares - moment[0] ** 2 / gram[0][0]
        if spread <= 1e-9 * squares:
            return None
        explained = sum(c * m for c, m in zip(coefficients, moment, strict=True))
        predicted = sum(
            c * g * d for c, row in zip(coefficients, gram, strict=True) for g, d in zip(row, coefficients, strict=True)
        )
        return 1.0 - (squares - 2 * explained + predicted) / spread

    def _moments(self) -> tuple[list[list[float]], list[float], float]:
        """Sums of products of two features, of a feature and the value, and of the value's square."""
        sums = self._sums
        gram = [[sums[place] for place in places] for places in self._places]
        return gram, [row.pop() for row in gram], sums[-1]


def solve_nonnegative(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises x'Ax / 2 - t'x for a positive definite matrix A.

    Source: Murty 1974, Note on a Bard-type scheme for solving the complementarity problem: of the variables that are
    negative, or held at 0 where the slope points inwards, the last changes sides. Ends for every such matrix.
    """
    size = len(target)
    free = list(range(size))
    slack = 1e-9 * max(map(abs, target))
    x: list[float] = []
    for _ in range(1 << size):
        x = _solve_free(matrix, target, free)
        for i in reversed(range(size)):
            if x[i] < 0 if i in free else target[i] - sum(map(operator.mul, matrix[i], x)) > slack:
                break
        else:
            return x
        free = [j for j in range(size) if (j in free) != (j == i)]
    return [max(0.0, value) for value in x]  # rounding at a boundary


def _solve_free(matrix: Sequence[Sequence[float]], target: Sequence[float], free: Sequence[int]) -> list[float]:
    """Gaussian elimination over the free variables, the others 0; a positive definite matrix needs no pivoting."""
    rows = [[*(matrix[i][j] for j in free), target[i]] for i in free]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            if factor:
                for j in range(k + 1, len(row)):
                    row[j] -= factor * pivot[j]
    x = [0.0] * len(target)
    for k in reversed(range(len(rows))):
        row = rows[k]
        rest = row[-1] - sum(row[j] * x[free[j]] for j in range(k + 1, len(rows)))
        x[free[k]] = rest / row[k]
    return x
