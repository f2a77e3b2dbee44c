"""What is called unchanged, and what is not."""

import json
import math
from collections import Counter

import pytest

from tests.compare.unchanged.generated import write_comparison
from verl_war.compare.unchanged.judge import Criteria, judge
from verl_war.compare.unchanged.trajectories import read_trajectories

QUICK = Criteria(permutations=999, margin=0.15)


def judged(folder, criteria=QUICK):
    return judge([read_trajectories(folder)], criteria)


def smallest_holm(found, scope, quantity):
    (row,) = [row for row in found["studies"][0][scope] if row["quantity"] == quantity]
    return min(row["holm_difference"], row["holm_ks"])


@pytest.mark.parametrize("chance", range(5))
def test_the_same_distribution_is_not_rejected(tmp_path, chance):
    found = judged(write_comparison(tmp_path, samples=8, chance=chance))
    assert found["studies"][0]["verdict"] == {
        "same_distribution_at_step_1": True,
        "same_final_reward": True,
        "same_log_prob_agreement": True,
    }
    assert found["unchanged"] is True


def test_unequal_numbers_of_trajectories_are_no_difference(tmp_path):
    """WAR's arm keeps 3 or 5 of 8 trajectories, by prompt."""
    write_comparison(tmp_path, samples=8)
    for path in tmp_path.glob("war*/trajectories/numbers/*.jsonl"):
        seen = Counter()
        kept = []
        for line in path.read_text().splitlines():
            prompt = json.loads(line)["prompt"]
            seen[prompt] += 1
            kept += [line] if seen[prompt] <= 3 + 2 * (int(prompt[-1]) % 2) else []
        path.write_text("\n".join(kept) + "\n")
    found = judged(tmp_path)
    counts = found["studies"][0]["trajectories"]
    assert counts["war"] < counts["stock"] == 3 * 4 * 8 * 8
    assert found["studies"][0]["verdict"]["same_distribution_at_step_1"] is True


def longer(row, step):
    return row | {"generated_tokens": row["generated_tokens"] * 1.2}


def clipped(row, step):
    """The mean stays about the same, the tails are gone."""
    return row | {"generated_tokens": 150 + round(0.2 * (row["generated_tokens"] - 150))}


def worse(row, step):
    return row | {"reward": row["reward"] * 0.4}


def more_turns(row, step):
    return row | {"turns": row["turns"] + 1}


@pytest.mark.parametrize(
    ("change", "quantity"),
    [(longer, "generated tokens"), (clipped, "generated tokens"), (worse, "reward"), (more_turns, "turns")],
)
def test_a_change_is_seen_in_both_scopes_and_in_its_quantity(tmp_path, change, quantity):
    found = judged(write_comparison(tmp_path, samples=8, change=change))
    assert found["studies"][0]["verdict"]["same_distribution_at_step_1"] is False
    assert found["unchanged"] is False
    for scope in ("first_step", "all_steps"):
        assert smallest_holm(found, scope, quantity) < 0.05
    others = {"reward", "generated tokens", "turns"} - {quantity}
    assert all(smallest_holm(found, "first_step", other) > 0.05 for other in others)


def test_a_training_that_ends_lower_is_not_the_same_although_step_1_is(tmp_path):
    found = judged(
        write_comparison(tmp_path, samples=8, change=lambda row, step: worse(row, step) if step > 1 else row)
    )
    study = found["studies"][0]
    assert study["verdict"]["same_distribution_at_step_1"] is True
    assert study["verdict"]["same_final_reward"] is False
    assert study["final_reward"]["interval"][1] < 0
    assert study["curves"]["war"]["1"][-1] < study["curves"]["stock"]["1"][-1]
    # Three pairs of runs cannot give less than 2 / 8, and that is said.
    assert study["all_steps"][0]["p_difference_runs"] == study["all_steps"][0]["smallest_p_runs"] == 0.25


@pytest.mark.parametrize(("distance", "same"), [(5e-4, True), (5e-3, False)])
def test_agreement_of_log_probs_has_a_tolerance(tmp_path, distance, same):
    change = lambda row, step: row | {"log_prob_diff_mean": distance, "log_prob_diff_max": 2 * distance}  # noqa: E731
    study = judged(write_comparison(tmp_path, change=change))["studies"][0]
    assert study["verdict"]["same_log_prob_agreement"] is same
    expected = {"mean": distance, "max": 2 * distance, "not_finite": 0}
    assert study["log_probs"]["arms"]["war"] == pytest.approx(expected)


@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_one_log_prob_that_is_not_finite_is_a_change(tmp_path, distance):
    write_comparison(tmp_path)
    path = tmp_path / "war" / "trajectories" / "numbers" / "2.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    broken = json.loads(first) | {"log_prob_diff_mean": distance, "log_prob_diff_max": distance}
    path.write_text("".join([json.dumps(broken) + "\n", *others]))
    found = judged(tmp_path)
    assert found["studies"][0]["log_probs"]["arms"]["war"]["not_finite"] == 1
    assert found["studies"][0]["verdict"]["same_log_prob_agreement"] is False
    assert found["unchanged"] is False


def test_a_test_that_cannot_fail_says_nothing(tmp_path):
    """One sample of three prompts: 8 ways to give the arms out, so that no p can be small."""
    found = judged(write_comparison(tmp_path, seeds=(1,), prompts=3, samples=1))
    assert found["studies"][0]["verdict"]["same_distribution_at_step_1"] is None
    assert found["unchanged"] is False


def test_what_cannot_be_told_is_not_called_unchanged(tmp_path):
    def without_log_probs(row, step):
        return {key: value for key, value in row.items() if not key.startswith("log_prob")}

    found = judged(write_comparison(tmp_path, seeds=(1, 2), change=without_log_probs))
    verdict = found["studies"][0]["verdict"]
    assert found["studies"][0]["final_reward"]["interval"] is None
    assert verdict["same_final_reward"] is None and verdict["same_log_prob_agreement"] is None
    assert found["unchanged"] is False


def test_an_interval_too_wide_for_the_margin_tells_nothing(tmp_path):
    found = judged(write_comparison(tmp_path), Criteria(permutations=999, margin=0.01))
    assert found["studies"][0]["verdict"]["same_final_reward"] is None
    assert found["unchanged"] is False


def test_runs_of_all_comparisons_are_pooled_for_the_reward(tmp_path):
    studies = [
        read_trajectories(write_comparison(tmp_path / str(chance), samples=8, chance=chance)) for chance in (0, 1)
    ]
    found = judge(studies, QUICK)
    pooled = found["final_reward"]
    alone = [study["final_reward"] for study in found["studies"]]
    assert pooled["difference_per_seed"] == alone[0]["difference_per_seed"] + alone[1]["difference_per_seed"]
    widths = [each["interval"][1] - each["interval"][0] for each in (pooled, *alone)]
    assert widths[0] < (widths[1] + widths[2]) / 2
    assert found["unchanged"] is True


def test_tests_of_all_comparisons_are_one_family(tmp_path):
    studies = [read_trajectories(write_comparison(tmp_path / name, change=longer)) for name in ("grpo", "ppo")]
    alone, both = judge(studies[:1], QUICK), judge(studies, QUICK)
    assert alone["studies"][0]["first_step"][1]["holm_difference"] == pytest.approx(6 * 0.001)
    assert both["studies"][0]["first_step"][1]["holm_difference"] == pytest.approx(12 * 0.001)


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    study = read_trajectories(write_comparison(tmp_path))
    assert judge([study], QUICK) == judge([study], QUICK)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"margin": 0.0}, "--margin=0.0 must be above 0"),
        ({"final_steps": 0}, "--final-steps=0 must be at least 1"),
        ({"permutations": 99}, "--permutations=99 must be at least 999"),
    ],
)
def test_bad_criteria_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        Criteria(**values)


def test_more_final_steps_than_steps_is_an_error(tmp_path):
    study = read_trajectories(write_comparison(tmp_path, steps=1))
    with pytest.raises(ValueError, match="--final-steps=2 must be at most the 1 steps of a run"):
        judge([study], QUICK)
