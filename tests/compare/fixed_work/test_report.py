"""The report: tables, CSV, and a page that refers to nothing outside itself."""

import csv
import io
import json
import re

import pytest

from tests.compare.fixed_work.helpers import plan, record
from verl_war.compare.fixed_work import figures, measures, records, report, tables
from verl_war.compare.fixed_work.plan import Case
from verl_war.compare.fixed_work.progress import RunsDisplay, seconds_left

ARMS = ("stock", "margin", "war", "war_no_moves")


@pytest.fixture
def written(tmp_path):
    """A comparison of four arms at two loads, in which one run failed and one was refused."""
    found = plan(tmp_path, arms=ARMS, repeats=3)
    speed = {"stock": 1.0, "margin": 1.25, "war": 2.0, "war_no_moves": 1.6}
    for case in found.cases():
        for arm in ARMS:
            is_broken = arm == "margin" and (case.load, case.repeat) == (8, 1)
            is_other = arm == "margin" and (case.load, case.repeat) == (8, 2)
            made = record(
                arm, case.load, case.repeat, (10 + case.repeat) / speed[arm], "it broke <here>" if is_broken else "",
                output=5 if is_other else 10,
            )  # fmt: skip
            records.save(found.runs_directory, made)
    stream = io.StringIO()
    report.write_report(found, stream)
    return found, stream.getvalue()


def test_the_terminal_shows_every_arm_and_what_does_not_count(written):
    _, text = written
    assert "2 trajectories per replica" in text and "8 trajectories per replica" in text
    line = next(line for line in text.splitlines() if line.startswith("war "))
    assert line.split()[1:4] == ["3", "2.00", "(2.00..2.00),"]
    assert "load8_repeat1_margin does not count, failed: it broke <here>" in text
    assert "load8_repeat2_margin does not count, refused: 45 tokens were generated" in text


def test_csv_holds_every_run(written):
    found, _ = written
    lines = list(csv.DictReader((found.out / "runs.csv").open()))
    assert len(lines) == 24
    assert [line["status"] for line in lines if line["arm"] == "margin" and line["load"] == "8"] == [
        "failed", "refused", "complete",
    ]  # fmt: skip


def test_json_holds_ratios_and_parts(written):
    found, _ = written
    made = json.loads((found.out / "report.json").read_text())
    assert made["parts"] == {"2": {"moves": pytest.approx(1.25)}, "8": {"moves": pytest.approx(1.25)}}
    margin = [row["speed_up"] for row in made["rows"] if row["arm"] == "margin"]
    assert [(it["n"], round(it["mean"], 3)) for it in margin] == [(3, 1.25), (1, 1.25)]
    assert len(made["runs"]) == 24


def test_markdown_names_what_does_not_count_and_what_the_arms_are(written):
    found, _ = written
    text = (found.out / "report.md").read_text()
    assert "* load8_repeat1_margin does not count, failed: it broke <here>" in text
    assert "| war_no_moves | war | WAR without moves by price" in text
    assert "| moves | 1.25 | 1.25 |" in text


def test_the_page_is_one_file_that_refers_to_nothing_outside(written):
    found, _ = written
    html = (found.out / "report.html").read_text()
    assert html.count("<svg") == 1 + 2 * 3  # speed-up; waterfall, ends of trajectories, replicas for each load
    assert "it broke &lt;here&gt;" in html and "<here>" not in html
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", html)
    assert "<script" not in html


def test_a_comparison_that_was_stopped_has_a_report_of_what_there_is(tmp_path):
    found = plan(tmp_path, arms=("stock", "war"))
    records.save(found.runs_directory, record("war", 2, 1, cause="it broke"))
    stream = io.StringIO()
    report.write_report(found, stream)
    assert "no run of stock counts" in stream.getvalue()
    records.save(found.runs_directory, record("stock", 2, 1))
    report.write_report(found, stream)
    assert (found.out / "report.html").read_text().count("<svg") == 2


def test_no_two_curves_of_a_panel_have_the_same_colour():
    from verl_war.compare.fixed_work.arms import ARMS as ALL

    groups = figures.panels(list(ALL))
    assert {arm for _, colours in groups for arm in colours} == set(ALL)
    for _, colours in groups:
        assert len(set(colours.values())) == len(colours)
        assert {"stock", "war"} <= set(colours)
    assert figures.panels(["stock", "war"]) == [("arms", {"stock": figures.GRAY, "war": figures.WAR_COLOUR})]


def test_a_ratio_says_how_sure_it_is():
    assert tables.ratio_text(measures.ratio_of([(2.0, 1.0), (1.0, 1.0)])) == "1.41 (1.00..2.00), n=2"
    assert tables.ratio_text(None) == "-"


def test_progress_counts_what_this_command_need_not_make_any_more(tmp_path):
    found, stream = plan(tmp_path, arms=("stock", "war"), repeats=1), io.StringIO()
    records.save(found.runs_directory, record("stock", 2, 1))
    records.save(found.runs_directory, record("war", 2, 1, cause="it broke"))
    display = RunsDisplay(found, stream)
    display.update()
    assert "1/4 runs, about" in stream.getvalue() and "2/4 runs" not in stream.getvalue()
    found.console_log.write_text("noise\nverl-war> load 2, repeat 1: war\n")
    records.save(found.runs_directory, record("war", 2, 1, attempt=2))
    display.update()
    assert "runs: load 2, repeat 1: war, 1/4 runs" in stream.getvalue()
    assert "2/4 runs, about 1 min left" in stream.getvalue()  # two runs of load 8, 40 s each


def test_time_left_follows_the_runs_made(tmp_path):
    runs = plan(tmp_path, arms=("stock", "war"), repeats=1).runs()
    assert [run.case for run in runs][0] == Case(load=2, repeat=1, seed=1)
    assert seconds_left(runs, {}) == 0.0
    # One of load 2 took 10 s: the other takes as long, those of load 8 four times as long.
    assert seconds_left(runs, {runs[0].name: 10.0}) == pytest.approx(10 + 2 * 40)
    assert seconds_left(runs, {runs[0].name: 10.0, runs[2].name: 30.0}) == pytest.approx(10 + 30)
    assert seconds_left(runs, {run.name: 1.0 for run in runs}) == 0.0
