"""Permutation tests against distributions that are known, and numbers worked out by hand."""

import numpy as np
import pytest

from verl_war.compare.unchanged.two_samples import (
    compare,
    every_swap,
    holm,
    paired_interval,
    swapped_groups,
    within_groups,
)


def one_test(values, labels, groups, count=999, chance=0):
    permutations = within_groups(labels, groups, count, np.random.default_rng(chance))
    return compare({"x": values}, labels, groups, permutations, False)["x"]


def test_difference_and_distance_by_hand():
    values = np.array([1.0, 3.0, 2.0, 4.0, 10.0, 11.0, 14.0])
    labels = np.array([0, 0, 1, 1, 0, 1, 1], dtype=bool)
    groups = np.array([0, 0, 0, 0, 1, 1, 1])
    found = one_test(values, labels, groups)
    # Groups differ by 3 - 2 and 12.5 - 10, with weights 2 * 2 / 4 and 1 * 2 / 3.
    assert found.difference == pytest.approx((1.0 * 1 + 2.5 * 2 / 3) / (1 + 2 / 3))
    # Up to 10 there are 3 of 3 against 2 of 4.
    assert found.ks == pytest.approx(1 - 2 / 4)


def test_distance_counts_ties_as_one_value():
    labels = np.array([0, 1, 0, 1], dtype=bool)
    assert one_test(np.array([5.0, 5.0, 7.0, 7.0]), labels, np.zeros(4, dtype=int)).ks == 0.0


def test_permutations_keep_the_arms_of_each_group():
    groups = np.array([2, 0, 1, 0, 2, 2, 1, 0])
    labels = np.array([1, 0, 1, 1, 0, 0, 0, 0], dtype=bool)
    permuted = np.concatenate(list(within_groups(labels, groups, 700, np.random.default_rng(0))))
    assert permuted.shape == (700, 8)
    for group in range(3):
        assert set(permuted[:, groups == group].sum(axis=1)) == {1}
        # Every trajectory has the label equally often: 700 / size, give or take 4 standard deviations.
        size = (groups == group).sum()
        assert np.abs(permuted[:, groups == group].mean(axis=0) - 1 / size).max() < 4 * 0.5 / 700**0.5


def test_swaps_keep_groups_together():
    groups = np.array([0, 0, 1, 1, 1])
    labels = np.array([0, 1, 0, 1, 1], dtype=bool)
    drawn = np.concatenate(list(swapped_groups(labels, groups, 600, np.random.default_rng(0))))
    expected = {(a, not a, b, not b, not b) for a in (False, True) for b in (False, True)}
    assert {tuple(row) for row in drawn.tolist()} == expected
    assert {tuple(row) for row in np.concatenate(list(every_swap(labels, groups))).tolist()} == expected


def test_enumerated_swaps_are_exact():
    values = np.array([0.0, 1.0, 0.0, 2.0, 0.0, 4.0])
    labels = np.array([0, 1, 0, 1, 0, 1], dtype=bool)
    groups = np.array([0, 0, 1, 1, 2, 2])
    found = compare({"x": values}, labels, groups, every_swap(labels, groups), True)["x"]
    assert found.difference == pytest.approx(7 / 3)
    assert found.p_difference == 2 / 8


@pytest.mark.parametrize("per_arm", [(4, 4), (2, 7)])
def test_false_alarms_are_as_rare_as_promised(per_arm):
    """Groups that differ a lot, of equal and unequal numbers: 200 tests without any difference of the arms."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(6), sum(per_arm))
    labels = np.tile(np.repeat([False, True], per_arm), 6)
    values = [np.round(rng.normal(groups * 3.0, 1.0), 1) for _ in range(200)]
    found = [one_test(column, labels, groups, count=199, chance=number) for number, column in enumerate(values)]
    # Binomial(200, 0.05): more than 20 come with a chance of 0.1%.
    assert sum(test.p_difference <= 0.05 for test in found) <= 20
    assert sum(test.p_ks <= 0.05 for test in found) <= 20


def test_differences_far_below_those_of_groups_are_found():
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(24), 8)
    labels = np.tile(np.repeat([False, True], 4), 24)
    values = rng.normal(groups * 3.0, 1.0) + 0.7 * labels
    found = one_test(values, labels, groups)
    assert found.difference == pytest.approx(0.7, abs=0.3)
    assert found.p_difference == 0.001


def test_distance_sees_a_changed_shape_that_the_mean_does_not():
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(24), 8)
    labels = np.tile(np.repeat([False, True], 4), 24)
    values = rng.normal(0.0, np.where(labels, 3.0, 0.5))
    found = one_test(values, labels, groups)
    assert found.p_ks == 0.001
    assert found.p_difference > 0.05


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize(("count", "share"), [(3, 0.84), (6, 0.89)])
def test_interval_covers_the_truth_about_as_often_as_stated(count, share):
    """Runs scatter by 0.05 and their 8 prompts by 0.1 around a difference of 0.2.

    Three runs cannot tell how much runs scatter: their intervals hold in 88% of the cases, those of six in 94%.
    """
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        runs = [rng.normal(rng.normal(0.2, 0.05), 0.1, 8) for _ in range(count)]
        low, high = paired_interval(runs, 200, 0.95, rng)
        covered += low <= 0.2 <= high
    assert share * 200 <= covered < 200
