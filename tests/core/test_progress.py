import pytest

from verl_war.core.progress import FINISHED_KEPT, PRIOR_TURNS, Progress


def test_before_anything_ended_the_prior_counts():
    assert Progress().remaining_turns("g", 0) == PRIOR_TURNS
    assert Progress().remaining_turns("g", 50) == 50.0


def test_the_fleet_tells_what_remains_of_those_that_lived_as_long():
    progress = Progress()
    for turns in (2, 4, 10, 20):
        progress.on_trajectory_end("", turns)
    assert progress.remaining_turns("new", 0) == pytest.approx(9.0)
    assert progress.remaining_turns("new", 4) == pytest.approx(11.0)
    assert progress.remaining_turns("new", 30) == 30.0


def test_finished_siblings_outweigh_the_fleet():
    progress = Progress()
    for _ in range(20):
        progress.on_trajectory_end("", 4)
    for _ in range(6):
        progress.on_trajectory_end("long", 30)
    assert progress.remaining_turns("long", 2) > 20 > progress.remaining_turns("other", 2)


def test_one_that_outlived_its_siblings_is_judged_by_the_fleet():
    progress = Progress()
    for turns in (3, 3, 3, 40):
        progress.on_trajectory_end("g" if turns == 3 else "", turns)
    assert progress.remaining_turns("g", 5) == pytest.approx(35.0)


def test_growth_and_output_follow_the_turns_and_ignore_rewritten_contexts():
    progress = Progress()
    for _ in range(500):
        progress.on_turn_growth(100)
        progress.on_turn_growth(-3000)
        progress.on_turn_output(40)
    assert progress.growth_tokens == pytest.approx(100, rel=0.02)
    assert progress.output_tokens == pytest.approx(40, rel=0.02)


def test_only_the_latest_trajectories_count():
    progress = Progress()
    for _ in range(FINISHED_KEPT):
        progress.on_trajectory_end("", 100)
    for _ in range(FINISHED_KEPT):
        progress.on_trajectory_end("", 3)
    assert progress.remaining_turns("", 0) == pytest.approx(3.0)
