"""Metrics of several attempts become one series."""

import json

import pytest

from verl_war.compare.series import read_series


def write(trial, attempt, *records):
    trial.metrics_directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in records]
    trial.metrics_file(attempt).write_text("".join(lines))


def training(step, value):
    return step, {"training/global_step": step, "critic/score/mean": value}


@pytest.fixture
def trial(make_plan):
    return make_plan().trials()[0]


def test_nothing_logged_yet(trial):
    series = read_series(trial)
    assert series.last_step == 0 and series.records == {}


def test_last_attempt_wins_from_where_it_began(trial):
    write(trial, 1, *[training(step, 0.1) for step in (1, 2, 3, 4, 5)])
    write(trial, 2, *[training(step, 0.2) for step in (3, 4)])
    series = read_series(trial)
    # Step 5 of the first attempt belongs to a history that was given up.
    assert series.values("critic/score/mean") == {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2}
    assert series.cold_steps == {1, 3}
    assert series.values("critic/score/mean", warm=True) == {2: 0.1, 4: 0.2}


def test_an_attempt_that_logged_nothing_changes_nothing(trial):
    write(trial, 1, training(1, 0.1), training(2, 0.1))
    write(trial, 2)
    assert read_series(trial).last_step == 2


def test_validation_before_a_resumed_step_does_not_hide_its_training(trial):
    write(trial, 1, (0, {"val-core/x": 0.0}), training(1, 0.1), training(2, 0.1))
    write(trial, 2, (2, {"val-core/x": 0.5}), training(3, 0.2))
    series = read_series(trial)
    assert series.values("critic/score/mean") == {1: 0.1, 2: 0.1, 3: 0.2}
    assert series.validation == {0: {"val-core/x": 0.0}, 2: {"val-core/x": 0.5}}


def test_line_cut_off_by_an_interruption_is_dropped(trial):
    write(trial, 1, training(1, 0.1))
    with trial.metrics_file(1).open("a") as file:
        file.write('{"step": 2, "data": {"training/glo')
    assert read_series(trial).last_step == 1


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", '{"data": {}}', '{"step": 1, "data": 3}', '{"step": 1e400, "data": {}}', "[" * 100_000]
)
def test_broken_line_is_named(trial, line):
    write(trial, 1, training(1, 0.1))
    with trial.metrics_file(1).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"attempt-001.jsonl:2: expected a line of verl's file logger"):
        read_series(trial)


def test_not_a_number_is_left_out(trial):
    write(trial, 1, (1, {"training/global_step": 1, "critic/score/mean": None}))
    assert read_series(trial).values("critic/score/mean") == {}
