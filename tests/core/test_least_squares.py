"""The solver against brute force, the rule for outliers, and how good a fit says it is."""

import itertools
import random

import pytest

from verl_war.core.least_squares import OUTLIER_RATIO, PERSISTENT_MEASUREMENTS, NonNegativeFit, OutlierRule
from verl_war.core.least_squares import solve_nonnegative as solve


def positive_definite(size, rng):
    root = [[rng.gauss(0, 1) for _ in range(size)] for _ in range(size)]
    return [
        [sum(root[k][i] * root[k][j] for k in range(size)) + (0.05 if i == j else 0.0) for j in range(size)]
        for i in range(size)
    ]


def cost(matrix, target, x):
    quadratic = sum(a * b * c for a, row in zip(x, matrix, strict=True) for b, c in zip(row, x, strict=True))
    return quadratic / 2 - sum(t * v for t, v in zip(target, x, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_solver_finds_the_least_of_all_supports(size):
    rng = random.Random(size)
    for _ in range(200):
        matrix = positive_definite(size, rng)
        target = [rng.gauss(0, 2) for _ in range(size)]
        found = solve(matrix, target)
        assert min(found) >= 0.0
        best = 0.0
        for support in itertools.chain.from_iterable(
            itertools.combinations(range(size), n) for n in range(1, size + 1)
        ):
            inner = [[matrix[i][j] for j in support] for i in support]
            free = solve_unbounded(inner, [target[i] for i in support])
            if min(free) >= 0:
                x = [0.0] * size
                for i, value in zip(support, free, strict=True):
                    x[i] = value
                best = min(best, cost(matrix, target, x))
        assert cost(matrix, target, found) == pytest.approx(best, abs=1e-9)


def solve_unbounded(matrix, target):
    """Cramer's rule."""

    def det(rows):
        if not rows:
            return 1.0
        return sum((-1) ** j * rows[0][j] * det([row[:j] + row[j + 1 :] for row in rows[1:]]) for j in range(len(rows)))

    whole = det(matrix)
    return [
        det([row[:i] + [t] + row[i + 1 :] for row, t in zip(matrix, target, strict=True)]) / whole
        for i in range(len(target))
    ]


def test_one_stall_is_bounded_and_a_change_is_believed():
    rule = OutlierRule()
    assert rule.bounded(1.2, 1.0) == 1.2
    assert rule.bounded(100.0, 1.0) == OUTLIER_RATIO and rule.bounded(0.9, 1.0) == 0.9
    assert rule.bounded(0.0001, 1.0) == 1 / OUTLIER_RATIO and rule.bounded(100.0, 1.0) == OUTLIER_RATIO
    seen = [rule.bounded(100.0, 1.0) for _ in range(PERSISTENT_MEASUREMENTS)]
    assert seen[-1] == 100.0 and rule.is_persistent
    assert rule.bounded(1.0, 1.0) == 1.0 and not rule.is_persistent


def fitted(truth, points=400, noise=0.0, seed=0, **arguments):
    rng = random.Random(seed)
    fit = NonNegativeFit(len(truth), **{"half_life": 1e9, "prior_observations": 4.0, **arguments})
    for _ in range(points):
        features = [1.0, *(rng.uniform(0, 10) for _ in truth[1:])]
        value = sum(c * f for c, f in zip(truth, features, strict=True)) * rng.uniform(1 - noise, 1 + noise)
        fit.add(1.0, features, value, value)
    return fit


def test_coefficients_and_their_goodness():
    truth = (3.0, 0.5, 2.0)
    found = (clean := fitted(truth)).solve((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert found == pytest.approx(truth, rel=0.01) and clean.r2(found) > 0.999
    noisy = fitted(truth, noise=0.5)
    assert 0.3 < noisy.r2(noisy.solve((1.0,) * 3, (1.0,) * 3)) < 0.9
    assert noisy.r2((30.0, 0.0, 0.0)) < 0.0, "worse than the mean"
    assert clean.observations == pytest.approx(400)


def test_forgetting_bounds_what_is_remembered():
    fit = fitted((1.0, 1.0), points=2000, half_life=50.0)
    assert fit.count == pytest.approx(50 / 0.693, rel=0.02) and fit.observations == pytest.approx(144, rel=0.02)


def test_without_variation_the_prior_decides_and_its_level_is_fitted():
    fit = NonNegativeFit(2, half_life=1e9, prior_observations=4.0)
    assert fit.level((1.0, 1.0)) == 1.0 and fit.r2((1.0, 1.0)) is None and fit.observations == 0.0
    assert fit.solve((1.0, 2.0), (1.0, 1.0)) == (1.0, 2.0)
    for _ in range(50):
        fit.add(1.0, (1.0, 3.0), 14.0, 14.0)
    level = fit.level((1.0, 2.0))
    assert level == pytest.approx(2.0), "7 was expected"
    assert fit.solve((2.0, 4.0), (2.0, 4.0)) == pytest.approx((2.0, 4.0))
    assert fit.r2((2.0, 4.0)) is None, "nothing varied"
