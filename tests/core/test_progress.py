import math
import random

import pytest

from verl_war.core.progress import PRIOR_TURNS, Progress, _lognormal_mean_above


def of_lengths(lengths, group=""):
    progress = Progress()
    for turns in lengths:
        progress.on_trajectory_end(group, turns)
    return progress


def test_before_anything_ended_the_prior_counts():
    expected = PRIOR_TURNS * math.exp(0.25)  # mean of a lognormal whose median is the prior
    assert Progress().remaining_turns("g", 0) == pytest.approx(expected)


def test_the_mean_above_a_bound_equals_a_simulation():
    rng = random.Random(0)
    sample = [rng.lognormvariate(2.0, 0.7) for _ in range(200_000)]
    for bound in (0, 3, 10, 30):
        longer = [value for value in sample if value > bound]
        assert _lognormal_mean_above(2.0, 0.7, bound) == pytest.approx(sum(longer) / len(longer), rel=0.02)


def test_the_mean_above_a_bound_is_continuous_far_out():
    values = [_lognormal_mean_above(2.0, 0.5, math.exp(2.0 + 0.5 * z)) / math.exp(2.0 + 0.5 * z) for z in (4.99, 5.01)]
    assert values[0] == pytest.approx(values[1], rel=0.02)
    assert _lognormal_mean_above(2.0, 0.05, 10_000) > 10_000


def test_the_fleet_is_learned():
    rng = random.Random(1)
    lengths = [max(1, round(rng.lognormvariate(math.log(16), 0.6))) for _ in range(2000)]
    progress = of_lengths(lengths)
    assert progress.remaining_turns("new", 0) == pytest.approx(sum(lengths) / len(lengths), rel=0.1)
    longer = [turns - 30 for turns in lengths if turns > 30]
    assert progress.remaining_turns("new", 30) == pytest.approx(sum(longer) / len(longer), rel=0.35)


def test_finished_siblings_move_their_own_group_only():
    progress = of_lengths([8] * 40)
    for number in range(40):  # prompts differ, siblings agree
        for _ in range(4):
            progress.on_trajectory_end(f"g{number}", 4 if number % 2 else 16)
    for _ in range(4):
        progress.on_trajectory_end("long", 30)
    assert progress.remaining_turns("long", 2) > 2 * progress.remaining_turns("other", 2)


def test_without_estimates_all_trajectories_are_taken_for_equal():
    progress = Progress(is_estimating=False)
    for turns in (3, 30, 40):
        progress.on_trajectory_end("long", turns)
    assert {progress.remaining_turns(group, done) for group in ("long", "new") for done in (0, 50)} == {PRIOR_TURNS}


def test_a_sibling_that_runs_long_tells_before_it_ends():
    progress = of_lengths([8] * 20)
    before = progress.remaining_turns("g", 1)
    progress.on_turn("g", 3)
    assert progress.remaining_turns("g", 1) == before, "shorter than expected so far: tells nothing yet"
    progress.on_turn("g", 40)
    assert progress.remaining_turns("g", 1) > before


def test_equal_lengths_stay_finite():
    progress = of_lengths([5] * 5000, group="g")
    assert 1.0 <= progress.remaining_turns("g", 0) < 10 and progress.remaining_turns("g", 100) >= 1.0


def test_growth_and_output_follow_the_turns_and_ignore_rewritten_contexts():
    progress = Progress()
    for _ in range(500):
        progress.on_turn_growth(100)
        progress.on_turn_growth(-3000)
        progress.on_turn_output(40)
    assert progress.growth_tokens == pytest.approx(100, rel=0.02)
    assert progress.output_tokens == pytest.approx(40, rel=0.02)
