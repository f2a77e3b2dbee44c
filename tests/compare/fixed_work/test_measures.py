"""Numbers against values worked out by hand; runs that do other work are refused."""

import math
from dataclasses import replace

import pytest

from tests.compare.fixed_work.helpers import SPECS, record, replayed
from verl_war.compare.fixed_work import measures, records
from verl_war.compare.fixed_work.plan import Case, Run
from verl_war.compare.fixed_work.results import TurnRecord

RUN = Run(case=Case(load=2, repeat=1, seed=1), arm="war")


def test_totals_of_a_run():
    totals = record(held_s=0.5).totals
    assert totals["output_tokens"] == 90
    assert totals["output_tokens_per_s"] == 9.0
    assert totals["prompt_tokens"] == 3 * (100 + 130 + 160)
    assert totals["prompt_tokens_cached"] == 3 * (64 + 128)
    assert totals["prompt_tokens_computed"] == 500 - 90
    assert totals["held_s"] == pytest.approx(9 * 0.5)
    # The trajectories end after a third, two thirds and all of 10 s.
    assert [totals[name] for name in ("t50_s", "t90_s", "t99_s")] == pytest.approx([20 / 3, 10, 10])
    assert totals["kv_demand_peak"] == 0


@pytest.mark.parametrize("percent,expected", [(50, 2), (51, 3), (90, 4), (99, 4), (25, 1)])
def test_percentiles_are_values_that_occur(percent, expected):
    assert records.percentile([3, 1, 2, 4], percent) == expected


def test_moves_are_counted_within_a_trajectory():
    def turn(name, number, replica):
        return TurnRecord(name, number, replica, 0.0, 0.0, 1.0, 10, 0, 1)

    turns = [turn("x", 1, "b"), turn("x", 0, "a"), turn("x", 2, "b"), turn("y", 0, "b"), turn("x", 3, "a")]
    assert records.moves(turns) == 2


@pytest.mark.parametrize("output,status", [(10, "complete"), (9, "refused"), (11, "refused")])
def test_a_run_that_does_other_work_is_refused(output, status):
    found = records.record_of(RUN, SPECS, replayed(output=output), 4096)
    assert found.status == status
    assert (f"{9 * output} tokens were generated, and the trajectories have 90" in found.cause) is (status == "refused")


def test_half_a_per_cent_is_the_limit():
    assert not records.differ(1005, 1000)
    assert records.differ(1006, 1000)
    assert records.differ(994, 1000)


def test_a_run_that_differs_from_the_base_is_refused_although_it_is_near_the_trace():
    stock, war = record("stock"), record("war")
    totals = {"stock": stock.totals | {"output_tokens": 1004.0}, "war": war.totals | {"output_tokens": 996.0}}
    runs = [replace(it, totals=totals[it.arm]) for it in (stock, war)]
    judged = {run.arm: run for run in measures.judged(runs, "stock")}
    assert judged["stock"].status == "complete"
    assert judged["war"].status == "refused"
    assert judged["war"].cause == "996 tokens were generated, and 1004 by stock"
    assert [row.arm for row in measures.rows_of(list(judged.values()), ["stock", "war"])] == ["stock"]


def test_a_run_of_other_code_than_the_bases_is_refused():
    base, same, other = record(), record("war"), replace(record("margin"), version="2")
    found = {run.arm: run for run in measures.judged([base, same, other], "stock")}
    assert found["war"].status == "complete" and found["margin"].status == "refused"
    assert found["margin"].cause == "made with 2, and stock with 1; repeat the case with --fresh"


def test_a_failed_run_counts_nowhere_and_its_pair_is_left_out():
    runs = [record("stock", repeat=it, makespan_s=10.0) for it in (1, 2)]
    runs += [record("war", repeat=1, makespan_s=5.0), record("war", repeat=2, makespan_s=1.0, cause="it broke")]
    row = measures.rows_of(runs, ["stock", "war"])[1]
    assert (row.n, row.ratio.n, row.ratio.mean) == (1, 1, pytest.approx(2.0))
    assert row.values["makespan s"] == 5.0


def test_the_ratio_is_the_geometric_mean_over_pairs():
    ratio = measures.ratio_of([(8.0, 2.0), (3.0, 3.0)])
    assert ratio.mean == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (None, None)
    assert (ratio.least, ratio.most, ratio.n) == (1.0, 4.0, 2)
    assert measures.ratio_of([]) is None


def test_the_interval_holds_the_mean_and_shrinks_with_repeats():
    few = measures.ratio_of([(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)])
    many = measures.ratio_of([(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)] * 10)
    assert few.least <= few.low < few.mean < few.high <= few.most
    assert many.mean == pytest.approx(few.mean)
    assert many.high / many.low < few.high / few.low
    # Of the mean's sampling distribution, not of the values: +- 1.96 sigma / sqrt(n).
    sigma = math.log(2) * math.sqrt(2 / 3)
    assert math.log(many.high / many.low) == pytest.approx(2 * 1.96 * sigma / math.sqrt(30), rel=0.15)
    same = measures.ratio_of([(3.0, 2.0)] * 5)
    assert same.low == pytest.approx(same.high) == pytest.approx(1.5)


def test_repeats_are_paired_not_pooled():
    runs = [record("stock", repeat=1, makespan_s=10.0), record("stock", repeat=2, makespan_s=100.0)]
    runs += [record("war", repeat=1, makespan_s=5.0), record("war", repeat=2, makespan_s=50.0)]
    ratio = measures.rows_of(runs, ["stock", "war"])[1].ratio
    assert (ratio.least, ratio.most) == pytest.approx((2.0, 2.0))


def test_loads_are_apart():
    runs = [
        record(arm, load=load, makespan_s=load / (1 + (arm == "war"))) for arm in ("stock", "war") for load in (2, 8)
    ]
    rows = measures.rows_of(runs, ["stock", "war"])
    assert [(row.load, row.arm) for row in rows] == [(2, "stock"), (2, "war"), (8, "stock"), (8, "war")]
    assert [row.values["makespan s"] for row in rows] == [2.0, 1.0, 8.0, 4.0]


def test_a_part_gives_what_is_lost_without_it():
    runs = [record("stock", makespan_s=12.0), record("war", makespan_s=3.0)]
    runs += [record("war_no_moves", makespan_s=4.0), record("war_no_admission", makespan_s=3.0)]
    arms = ["stock", "war", "war_no_moves", "war_no_admission"]
    parts = measures.parts_of(
        measures.rows_of(runs, arms), 2, {"war_no_moves": "moves", "war_no_admission": "admission", "absent": "x"}
    )
    assert parts == pytest.approx({"moves": 4 / 3, "admission": 1.0})
    assert measures.parts_of(measures.rows_of(runs[:1], arms), 2, {"war_no_moves": "moves"}) == {}
