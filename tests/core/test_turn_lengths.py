"""What a turn still has to generate, and what its tokens are therefore worth."""

import random

import pytest

from verl_war.core.turn_lengths import MEMORY_TURNS, WEIGHTS, TurnLengths


def observed(lengths):
    turns = TurnLengths()
    for tokens in lengths:
        turns.observe(tokens)
    return turns


def test_before_any_turn_has_ended_all_are_worth_the_same():
    assert TurnLengths().weights([0, 10, 1000]) == [1.0, 1.0, 1.0]
    assert observed([5]).weights([]) == []


def test_who_lasts_longer_than_most_lasts_on():
    """Nine short turns to one of 400: after 40 tokens it is known to be one of the long ones."""
    turns = observed([10] * 90 + [400] * 10)
    assert turns.remaining_tokens(0) == pytest.approx(49, rel=0.05)
    assert turns.remaining_tokens(40) == pytest.approx(332, rel=0.05)
    assert turns.remaining_tokens(300) == pytest.approx(120, rel=0.05)
    weights = turns.weights([2] * 9 + [40])
    assert weights[9] == 4.0 and set(weights[:9]) == {1.0}


def test_a_turn_longer_than_any_before_is_taken_to_last_as_long_again():
    turns = observed([10] * 50)
    assert turns.remaining_tokens(1000) == pytest.approx(1000)
    assert turns.weights([1] * 20 + [1000])[20] == 4.0


def test_a_turn_that_is_nearly_over_is_worth_no_more_than_one_that_begins():
    turns = observed([100] * 50)
    assert turns.remaining_tokens(96) < 10
    assert turns.weights([1, 96]) == [1.0, 1.0]


def test_turns_that_ended_long_ago_are_forgotten():
    turns = observed([1000] * 500 + [10] * 10_000)
    assert turns.remaining_tokens(0) == pytest.approx(10, rel=0.1)
    assert sum(turns._turns) <= MEMORY_TURNS


def test_any_number_is_taken():
    turns = observed([0, 1, 2**40])
    rng = random.Random(1)
    ages = [rng.randrange(2 ** rng.randrange(40)) for _ in range(500)]
    assert set(turns.weights(ages)) <= set(WEIGHTS)
    assert all(turns.remaining_tokens(age) >= 1.0 for age in ages)
