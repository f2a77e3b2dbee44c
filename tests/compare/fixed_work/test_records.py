"""Records: written whole, read back, an attempt that failed is kept beside the next."""

import json
import math

import pytest

from tests.compare.fixed_work.helpers import KV_TOKENS, SPECS, plan, record
from verl_war.compare.fixed_work import records
from verl_war.compare.fixed_work.plan import Case, Run
from verl_war.compare.fixed_work.results import Replayed

RUN = Run(case=Case(load=2, repeat=1, seed=1), arm="stock")


def test_a_record_survives_its_file(tmp_path):
    records.save(tmp_path, record())
    assert records.load(records.path_of(tmp_path, RUN), RUN) == record()
    assert records.is_done(tmp_path, RUN)
    assert not records.is_done(tmp_path, Run(case=RUN.case, arm="war"))


def test_a_run_that_failed_at_once_is_kept_without_numbers(tmp_path):
    records.save(tmp_path, records.record_of(RUN, SPECS, Replayed(), KV_TOKENS, "RuntimeError: it broke"))
    found = records.load(records.path_of(tmp_path, RUN), RUN)
    assert (found.status, found.cause) == ("failed", "RuntimeError: it broke")
    assert math.isnan(found.totals["t99_s"])
    assert "NaN" not in records.path_of(tmp_path, RUN).read_text()


def test_what_failed_is_made_again_and_stays_on_record(tmp_path):
    found = plan(tmp_path)
    directory = found.runs_directory
    records.save(directory, record(cause="it broke"))
    assert not records.is_done(directory, RUN)
    assert records.attempts(directory, RUN) == 1
    records.save(directory, record(attempt=2))
    assert records.is_done(directory, RUN)
    assert [(it.attempt, it.status) for it in records.load_all(found)] == [(1, "failed"), (2, "complete")]


def test_other_files_and_other_arms_and_loads_are_left_alone(tmp_path):
    found = plan(tmp_path, arms=("stock", "war"), loads=(2, 13 / 3))
    for made in (record(), record(repeat=7), record("war", load=13 / 3), record("margin"), record(load=8)):
        records.save(found.runs_directory, made)
    for name in ("mine.json", "load2_repeat1.json", "load2_repeat0_war.json", "load2_repeat1_war.json.json"):
        (found.runs_directory / name).write_text("{}")
    assert [it.name for it in records.load_all(found)] == [
        "load2_repeat1_stock", "load2_repeat7_stock", "load4.33333_repeat1_war",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other", [record("war"), record(load=8), record(load=2.0000001), record(repeat=2), record(repeat=3)]
)
def test_a_record_of_another_run_is_not_taken_for_this_one(tmp_path, other):
    found = plan(tmp_path)
    records.save(found.runs_directory, other)
    path = records.path_of(found.runs_directory, RUN)
    records.path_of(found.runs_directory, Run(case=other.case, arm=other.arm)).rename(path)
    for read in (lambda: records.is_done(found.runs_directory, RUN), lambda: records.load_all(found)):
        with pytest.raises(ValueError, match=f"record {path} cannot be read.*it is of Case.*delete it to repeat"):
            read()


def test_a_record_of_another_seed_is_not_taken_for_this_one(tmp_path):
    records.save(plan(tmp_path).runs_directory, record())
    other = plan(tmp_path, seed=4)
    with pytest.raises(ValueError, match=r"seed=1\), arm='stock'; expected Case\(load=2, repeat=1, seed=4\)"):
        records.load_all(other)


def test_what_was_refused_is_not_made_again(tmp_path):
    records.save(tmp_path, record(output=5))
    assert records.load(records.path_of(tmp_path, RUN), RUN).status == "refused"
    assert records.is_done(tmp_path, RUN)


def changed(**values):
    """Damages a record by other values; of `a__b` only that of b within a."""

    def damage(text):
        raw = json.loads(text)
        for name, value in values.items():
            *outer, inner = name.split("__")
            holder = raw[outer[0]] if outer else raw
            holder[inner] = value
        return json.dumps(raw)

    return damage


def without_turns(text):
    raw = json.loads(text)
    del raw["totals"]["turns"]
    return json.dumps(raw)


DAMAGES = (
    lambda text: "",
    lambda text: '"abc"',
    lambda text: "5",
    lambda text: "null",
    lambda text: "[" * 100_000,
    changed(totals=[1, 2]),
    changed(totals={}),
    changed(totals=None),
    without_turns,
    changed(totals__makespan_s=0),
    changed(totals__makespan_s=None),
    changed(totals__makespan_s=math.inf),
    changed(totals__makespan_s="10"),
    changed(totals__moves=10**400),
    changed(end_s=None),
    changed(end_s={"g-0": None}),
    changed(turns=None),
    changed(turns=[5]),
    changed(turns=[["g-0", 0, "r0"]]),
    changed(turns=[["g-0", 0, "r0", None, 1, 1, 1, 1, 1]]),
    changed(turns=[["g-0", 0, ["r0"], 1, 1, 1, 1, 1, 1]]),
    changed(case=[2, 1, 1]),
    changed(case__seed="1"),
    changed(case__load=None),
    changed(arm=None),
    changed(status="done"),
    changed(status=["complete"]),
    changed(attempt=None),
    changed(war=None),
    changed(expected_tokens=math.nan),
    lambda text: text[:-30],
    lambda text: "{}",
    lambda text: text.replace('"format": 1', '"format": 9'),
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_says_which_and_what_to_do(tmp_path, damage):
    records.save(tmp_path, record())
    path = records.path_of(tmp_path, RUN)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError) as error:
        records.load(path, RUN)
    assert str(error.value).startswith(f"record {path} cannot be read (")
    assert str(error.value).endswith("; delete it to repeat the run")
