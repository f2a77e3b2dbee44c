"""What a journal is found to tell: a case counted by hand, the manager's own numbers, and journals with defects."""

import json

import numpy as np
import pytest

from tests.replay.conftest import CONFIG, rollout
from tests.report.conftest import Tiny
from tests.report.simulated import simulate
from verl_war.core.config import WarConfig
from verl_war.core.journal import JournalError, RecordingManager, as_record, header
from verl_war.report.analysis import analyse
from verl_war.report.steps import why
from verl_war.report.summary import as_text
from verl_war.report.timeline import MAX_BINS, ratio


def test_a_step_counted_by_hand(tiny_journal):
    analysis = analyse(tiny_journal)
    (step,) = analysis.rollout.steps
    assert (step.number, step.announced, step.begun, step.ended) == (3, 3, 3, 3)
    assert [step.span_s(share) for share in (0.5, 0.9, 1.0)] == [4.0, 8.0, 8.0]
    life = step.last()[0]
    assert life.trajectory_id == "a" and life.turns == 2 and life.completion_tokens == 30
    assert life.seconds == {"generating": 4.0, "tool": 3.0, "held": 0.0}
    assert [(span.state, span.begin_s, span.end_s) for span in life.spans] == [
        ("generating", 11.0, 13.0), ("tool", 13.0, 16.0), ("generating", 16.0, 18.0),
    ]  # fmt: skip
    assert life.computed_prompt_tokens == 100 + 70
    assert why(life, step) == (
        "4.0 s after the median trajectory, with 2 turns against 1: 3.0 s more between turns, in tools (longest "
        "3.0 s); 2.0 s more in generation (30 tokens against 10)"
    )
    assert why(step.last()[1], step).startswith("no later than most")
    assert analysis.series.sums("prompt_tokens").sum() == 460 and analysis.series.sums("cached_tokens").sum() == 90


def test_gauges_of_the_step_counted_by_hand(tiny_journal):
    series = analyse(tiny_journal).series
    assert series.edges()[0] == 0.0 and series.edges()[-1] == pytest.approx(8.0, abs=1.01 * series.width_s)
    inflight, live = series.mean("inflight", "r0"), series.mean("live", "r0")
    at = lambda values, second: values[int((second - 10) / series.width_s)]  # noqa: E731
    seconds = (10.5, 11.5, 12.5, 13.5, 15.0, 17.0)
    assert [at(inflight, second) for second in seconds] == [0, 2, 2, 1, 0, 1]
    assert [at(live, second) for second in seconds] == [0, 2, 2, 2, 1, 1]


def test_numbers_are_those_that_the_manager_reported(tmp_path):
    entries, reports = [], []

    class Reporting(RecordingManager):
        def report(self):
            reports.append(super().report())

    rollout(Reporting(CONFIG, False, entries.append))
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(map(json.dumps, [header(CONFIG, False), *map(as_record, entries)])) + "\n")
    analysis, (told,) = analyse(path), reports
    (step,) = analysis.rollout.steps
    series = analysis.series
    assert not analysis.notes
    assert step.ended == told["war/trajectories"] == 60
    assert analysis.rollout.moves == told["war/turns_moved"] > 0
    assert analysis.rollout.holds == told["war/turns_held"] > 0
    assert analysis.rollout.held_s == pytest.approx(told["war/held_s"])
    assert series.sums("completion_tokens").sum() == told["war/completion_tokens"]
    assert series.sums("cached_tokens").sum() == told["war/prompt_tokens_cached"]
    believed = ratio(series.sums("believed_tokens"), series.sums("believed_of_tokens"))
    assert np.isfinite(believed).any()
    share = series.sums("believed_tokens").sum() / series.sums("believed_of_tokens").sum()
    assert share == pytest.approx(told["war/cache_hit_rate_believed"])
    first_s = min(life.begin_s for life in step.last())
    assert step.makespan_s == pytest.approx(told["war/rollout_makespan_s"], abs=first_s - step.begin_s + 0.5)
    assert analysis.rollout.lost_replicas == told["war/replicas_lost"] == 1
    for name, seen in analysis.rollout.replicas.items():
        assert seen.inflight == seen.live == 0, name


def test_a_simulated_run(simulated):
    analysis = analyse(simulated)
    assert [step.number for step in analysis.rollout.steps] == [1, 2]
    assert all(step.ended == 8 for step in analysis.rollout.steps)
    series = analysis.series
    assert len(series.mean("held")) <= MAX_BINS
    slow = [np.nanmean(series.mean("slowness", f"replica-{number}")) for number in range(2)]
    assert slow[1] > 1.3 * slow[0]
    drafted, accepted = series.sums("spec_drafted_tokens").sum(), series.sums("spec_accepted_tokens").sum()
    assert 0.3 < accepted / drafted < 0.75
    low = series.mean("low", "replica-0")
    assert np.nanmin(low) == 0.0 and np.nanmax(low) == 1.0
    assert np.nanmax(series.mean("working_set", "replica-0")) > 0
    assert analysis.fits.r2() > 0.2


def test_readings_of_an_engine_that_was_started_again_count_from_zero(tiny, tmp_path):
    from tests.replay.conftest import speculation

    for at_s, steps in ((20.0, 1000), (21.0, 1100), (22.0, 10), (23.0, 30)):
        tiny.manager.on_speculation("r0", speculation(steps), at_s)
    series = analyse(tiny.write(tmp_path / "j")).series
    assert series.sums("spec_steps").sum() == 100 + 20


def test_validation_is_a_rollout_of_its_own(tmp_path):
    tiny = Tiny(WarConfig(seed=0))
    for validate, at_s in ((True, 10.0), (False, 20.0), (False, 30.0)):
        tiny.manager.on_step_begin(3, 1, at_s, 1)
        name = f"t{at_s}"
        tiny.ask(name, at_s + 1, 10, validate=validate)
        tiny.answer(name, at_s + 2, 5, last=True)
    steps = analyse(tiny.write(tmp_path / "j")).rollout.steps
    assert [(step.name, step.begin_s, step.makespan_s) for step in steps] == [
        ("step 3 (validation)", 10.0, 2.0), ("step 3", 20.0, 2.0), ("step 3", 30.0, 2.0),
    ]  # fmt: skip


def test_without_announcements_and_without_numbers_there_is_still_a_rollout(tmp_path):
    tiny = Tiny(WarConfig(seed=0))
    for name in ("a", "b"):
        tiny.ask(name, 11.0, 10)
    tiny.answer("a", 12.0, 1, last=True)
    lines = [line.replace('"policy_step": 3', '"policy_step": -1') for line in tiny.lines()]
    (tmp_path / "j").write_text("\n".join(lines) + "\n")
    analysis = analyse(tmp_path / "j")
    (step,) = analysis.rollout.steps
    assert (step.name, step.begun, step.ended, step.makespan_s) == ("rollout", 2, 1, 1.0)
    assert why(step.last()[0], step) == "the only trajectory"
    assert len(analysis.rollout.lives) == 1


def test_a_trajectory_that_fails_leaves_no_turn_behind(tmp_path):
    tiny = Tiny(WarConfig(seed=0))
    tiny.ask("a", 11.0, 10)
    tiny.manager.on_trajectory_end("a", True, 12.0)
    analysis = analyse(tiny.write(tmp_path / "j"))
    assert analysis.rollout.steps[0].failed == 1
    assert (analysis.rollout.replicas["r0"].inflight, analysis.rollout.replicas["r0"].live) == (0, 0)


# ---- defects ---------------------------------------------------------------------------------------------------------


def test_a_cut_off_line_is_told_and_what_precedes_it_is_used(tiny_journal):
    whole = analyse(tiny_journal).rollout.events
    tiny_journal.write_text(tiny_journal.read_text()[:-10])
    analysis = analyse(tiny_journal)
    assert analysis.rollout.events == whole - 1
    assert analysis.notes == ["the last line is cut off, as when the router is killed; what precedes it is shown"]


def test_a_header_alone_is_a_journal(tiny_journal):
    tiny_journal.write_text(tiny_journal.read_text().splitlines()[0] + "\n")
    assert analyse(tiny_journal).rollout.events == 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [], "is empty"),
        (lambda lines: [lines[0][:20]], ":1: no JSON"),
        (lambda lines: ['{"a": 1}'], ":1: no header of a WAR journal"),
        (lambda lines: [lines[0].replace('"war_journal": 1', '"war_journal": 9')], ":1: war_journal=9; this version"),
        (lambda lines: [*lines[:3], "{nonsense", *lines[4:]], ":4: no JSON"),
        (lambda lines: [*lines[:3], "[1]", *lines[4:]], r":4: \[1\] is no event"),
        (lambda lines: [*lines[:3], '{"event": "party"}', *lines[4:]], ":4: event 'party' is unknown"),
        (lambda lines: [*lines, lines[-1].replace('"failed": false', '"failed": 7')], r":\d+: failed=7"),
    ],
)  # fmt: skip
def test_damage_names_the_line(tiny_journal, damage, words):
    lines = damage(tiny_journal.read_text().splitlines())
    tiny_journal.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(JournalError, match=words):
        analyse(tiny_journal)


def test_a_header_that_is_cut_off_is_an_error(tiny_journal):
    tiny_journal.write_text(tiny_journal.read_text()[:50])
    with pytest.raises(JournalError, match=":1: the line is cut off"):
        analyse(tiny_journal)


def test_other_decisions_end_beliefs_and_nothing_else(simulated, tmp_path):
    lines = simulated.read_text().splitlines()
    head = json.loads(lines[0])
    head["config"]["scheduling"]["enabled"] = False
    (tmp_path / "j").write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    analysis, whole = analyse(tmp_path / "j"), analyse(simulated)
    assert [note[:50] for note in analysis.notes] == ["working sets and the believed hit rate end at at_s"]
    assert not analysis.series.sums("believed_of_tokens")[-100:].any()
    assert [step.makespan_s for step in analysis.rollout.steps] == [step.makespan_s for step in whole.rollout.steps]


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["config"].update(party=True),
        lambda head: head.update(full_determinism=True, hash_check=1),
    ],
)
def test_a_manager_that_cannot_be_made_again_is_told(tiny_journal, change):
    lines = tiny_journal.read_text().splitlines()
    head = json.loads(lines[0])
    change(head)
    tiny_journal.write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    analysis = analyse(tiny_journal)
    assert analysis.notes[0].startswith("working sets and the believed hit rate are left out: ")
    assert analysis.rollout.steps[0].makespan_s == 8.0


def test_damage_is_found_also_without_the_manager(tiny_journal):
    lines = tiny_journal.read_text().splitlines()
    head = json.loads(lines[0])
    head["config"]["party"] = True
    broken = {**json.loads(lines[-2]), "result": {}}
    tiny_journal.write_text("\n".join([json.dumps(head), *lines[1:-2], json.dumps(broken)]) + "\n")
    with pytest.raises(JournalError, match=r":\d+: damaged event \(KeyError: 'completion_tokens'\)"):
        analyse(tiny_journal)


def test_which_rule_decided_each_step_and_what_trials_came_to(tmp_path):
    controls = {
        "scheduling": {"enabled": True},
        "admission": {"enabled": True, "wait_for_thrash": False},
        "guard": {"first_trial_steps": 2},
    }
    path = simulate(tmp_path / "journal.jsonl", replicas=2, load=40, steps=4, workload="small", hardware="cpu_2core",
                    settings={"seed": 1, **controls})  # fmt: skip
    analysis = analyse(path)
    assert [step.rule for step in analysis.rollout.steps] == ["WAR", "WAR", "stock (trial)", "WAR"]
    assert analysis.guard_trials == 0, "the trial's pair was complete only when the journal ended"
    path = simulate(path, replicas=2, load=40, steps=5, workload="small", hardware="cpu_2core",
                    settings={"seed": 1, **controls})  # fmt: skip
    analysis = analyse(path)
    text = as_text(analysis)
    assert analysis.guard_trials == 1 and f"{analysis.guard_speedup:.2f} times stock verl's speed in 1 trial" in text
    assert "stock (trial)" in text
