"""Numbers against values worked out by hand."""

import pytest

from verl_war.compare.report import QUANTITIES, aggregate, compare_quantity, missing_steps, summarise
from verl_war.compare.series import Series
from verl_war.compare.tables import as_markdown, as_text, comparison_rows, markdown_report, war_rows

BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def series(step_seconds, response_lengths, rewards, cold=(1,), **extra):
    """Steps 1.. with 4 trajectories each, prompts of 10 tokens, rollouts of half a step."""
    records = {}
    for step, (seconds, length, reward) in enumerate(zip(step_seconds, response_lengths, rewards, strict=True), 1):
        records[step] = {
            "critic/score/mean": reward,
            "prompt_length/mean": 10.0,
            "response_length/mean": length,
            "perf/total_num_tokens": 4 * (10.0 + length),
            "num_turns/mean": 6.0,
            "timing_s/step": seconds,
            "timing_s/gen": seconds / 2,
            **{key: values[step - 1] for key, values in extra.items()},
        }
    return Series(records=records, cold_steps=frozenset(cold))


STOCK = series([20.0, 4.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0], [0.0, 0.1, 0.2, 0.3])
WAR = series([18.0, 2.0, 2.0, 6.0], [5.0, 6.0, 7.0, 10.0], [0.0, 0.2, 0.2, 0.4], **{"war/turns": [8, 9, 10, 13]})


@pytest.mark.parametrize(
    ("name", "stock", "war", "ratio", "spread"),
    [
        ("reward, mean over steps", 0.15, 0.2, 4 / 3, [1.0, 2.0]),
        ("trajectories", 16.0, 16.0, 1.0, [1.0, 1.0]),
        ("prompt tokens", 160.0, 160.0, 1.0, [1.0, 1.0]),
        ("response tokens (generated and tool results)", 104.0, 112.0, 112 / 104, [1.0, 1.25]),
        ("turns of a trajectory, mean", 6.0, 6.0, 1.0, [1.0, 1.0]),
        # Steps 2, 3, 4: medians of 4, 2, 3 and of 2, 2, 6; single ratios 0.5, 1, 2.
        ("step s, median", 3.0, 2.0, 2 / 3, [0.5, 2.0]),
        ("rollout s, median", 1.5, 1.0, 2 / 3, [0.5, 2.0]),
        # 24/2, 28/1, 32/1.5 tokens a second and 24/1, 28/1, 40/3.
        ("response tokens per rollout s, median", 32 / 1.5, 24.0, 24 / (32 / 1.5), [40 / 3 / (32 / 1.5), 2.0]),
    ],
)
def test_quantities_and_ratios(name, stock, war, ratio, spread):
    quantity = BY_NAME[name]
    assert aggregate(quantity, [STOCK]) == pytest.approx(stock)
    assert aggregate(quantity, [WAR]) == pytest.approx(war)
    found = compare_quantity(quantity, [WAR], [STOCK])
    assert found["ratio"] == pytest.approx(ratio)
    assert found["steps_min_max"] == pytest.approx(spread)
    assert found["repeats_min_max"] is None


def test_every_quantity_is_worked_out_above():
    assert len(QUANTITIES) == 9  # the ninth is below


def test_generated_tokens_add_up_over_the_steps():
    trial = Series(records={step: {"perf/generated_tokens": 7} for step in (1, 2)})
    assert aggregate(BY_NAME["generated tokens"], [trial]) == 14.0


def test_repeats_are_paired_and_their_spread_is_stated():
    slow = series([9.0, 8.0, 8.0, 8.0], [5.0] * 4, [0.0] * 4)
    found = compare_quantity(BY_NAME["step s, median"], [WAR, slow], [STOCK, STOCK])
    # Pooled: median of 2, 2, 6, 8, 8, 8 over median of 4, 2, 3, 4, 2, 3.
    assert found["ratio"] == pytest.approx(7 / 3)
    assert found["steps_min_max"] == pytest.approx([0.5, 4.0])
    assert found["repeats_min_max"] == pytest.approx([2 / 3, 8 / 3])


def test_first_step_after_a_resume_is_left_out_of_timings():
    resumed = Series(records=STOCK.records, cold_steps=frozenset({1, 2}))
    assert aggregate(BY_NAME["step s, median"], [resumed]) == 2.5
    assert aggregate(BY_NAME["prompt tokens"], [resumed]) == 160.0


def test_nothing_is_claimed_where_nothing_was_logged():
    empty = Series()
    assert aggregate(BY_NAME["step s, median"], [empty]) is None
    assert compare_quantity(BY_NAME["step s, median"], [WAR], [empty]) is None
    summary = summarise({"stock": [empty], "war": [WAR]})
    row = next(row for row in comparison_rows(summary) if row[0] == "step s, median")
    assert row == ["step s, median", "-", "2.00", "-"]


def test_steps_missing_from_the_record_are_reported():
    gap = Series(records={step: data for step, data in STOCK.records.items() if step != 3})
    assert missing_steps(gap) == [3]
    report = report_of({"stock": [gap], "war": [WAR]})
    assert "stock, repeat 1: steps 3 are not on record." in markdown_report(report, [])


def report_of(runs):
    return {
        "plan": {"recipe": "code_agent", "algorithm": "grpo"},
        "command": "verl-war compare --steps 4",
        "trials": [{"name": "stock", "seed": 1, "attempts": 2, "seconds": 61.2, "version": "0.1"}],
        "environment": {"verl": "0.9.1"},
        "summary": summarise(runs),
    }


def test_trials_of_different_versions_are_reported():
    report = report_of({"stock": [STOCK], "war": [WAR]})
    assert "different versions" not in markdown_report(report, [])
    report["trials"].append({**report["trials"][0], "name": "war", "version": "0.2"})
    assert "The trials ran on different versions of verl_war: 0.1, 0.2." in markdown_report(report, [])


def test_table_of_both_arms():
    rows = {row[0]: row[1:] for row in comparison_rows(summarise({"stock": [STOCK], "war": [WAR]}))}
    assert rows["steps"] == ["4", "4", "-"]
    assert rows["reward, first step"] == ["0.0000", "0.0000", "-"]
    assert rows["reward, last step"] == ["0.3000", "0.4000", "-"]
    assert rows["response tokens (generated and tool results)"] == ["104", "112", "1.08 (1.00..1.25)"]
    assert rows["step s, median"] == ["3.00", "2.00", "0.67 (0.50..2.00)"]


def test_wars_own_metrics_are_summarised_with_their_units():
    summary = summarise({"stock": [STOCK], "war": [WAR]})
    assert summary["arms"]["stock"]["war"] == {}
    assert war_rows(summary["arms"]["war"]["war"])[1] == ["war/turns", "count", "9.5", "8", "13"]


def test_validation_shows_first_and_last():
    validated = Series(
        records=STOCK.records, validation={0: {"val-core/a": 0.1}, 4: {"val-core/a": 0.5, "val-aux/b": 1}}
    )
    rows = {row[0]: row[1:] for row in comparison_rows(summarise({"stock": [validated], "war": [WAR]}))}
    assert rows["val-core/a, first -> last"] == ["0.1000 -> 0.5000", "-", "-"]


def test_report_states_command_versions_sources_and_plots():
    text = markdown_report(report_of({"stock": [STOCK], "war": [WAR]}), ["plots/reward.png"])
    for part in (
        "`verl-war compare --steps 4`",
        "| verl | 0.9.1 |",
        "| stock | 1 | 2 | 61 | 0.1 |",
        "timing_s/gen",
        "war/turns",
    ):
        assert part in text
    assert "![plots/reward.png](plots/reward.png)" in text


def test_text_and_markdown_hold_the_same_cells():
    rows = [["", "stock", "war"], ["step s", "3.00", "12.00"]]
    assert as_text(rows).splitlines() == ["        stock    war", "------  -----  -----", "step s   3.00  12.00"]
    assert as_markdown(rows).splitlines()[2] == "| step s | 3.00 | 12.00 |"
