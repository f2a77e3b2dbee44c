"""What replicas are trusted with: lost cache in, shares of the KV out, and who is held for it."""

import pytest

from tests.core.test_scheduler import CAPACITY, end, manager_of, names, reading, turn
from verl_war.core.admission import EVIDENCE_TURNS, PLAIN_TURNS


def worked(manager, engine_s, capacity=CAPACITY, **fields):
    """Readings of an engine that has worked so much longer, in steps of 10 ms as the unknown machine's."""
    steps = manager._fleet.replicas["a"].pace._last.engine_steps + round(100 * engine_s)
    return reading(capacity, engine_steps=steps, computed_tokens=0, busy_s=steps / 100, **fields)


def turns_of(manager, rounds, cached_share, begin_s, engine_s=0.5, capacity=10_000):
    """Turns of one resident conversation whose engine finds a share of what it should hold.

    Each takes `engine_s` of decoding; reading the context again takes 0.35 s on the unknown machine.
    """
    for now_s in (begin_s + number for number in range(rounds)):
        (placed,) = manager.on_turn(turn("s1", 7_000), now_s)
        end(manager, placed, now_s + 0.5, cached=int(cached_share * 7_000))
        manager.on_snapshot("a", worked(manager, engine_s, capacity), now_s + 0.6)


def test_lost_cache_lowers_the_trusted_share_and_calm_raises_it_while_somebody_waits():
    manager = manager_of(["a"])
    turns_of(manager, 1 + PLAIN_TURNS, 0.5, 1.0)
    lowered = manager.report()["war/replica/0/trusted_share"]
    assert lowered == pytest.approx(0.7 * 0.75)
    turns_of(manager, 2 * EVIDENCE_TURNS, 1.0, 100.0)
    assert manager.report()["war/replica/0/trusted_share"] == lowered, "nobody waits"
    manager.on_turn(turn("waits", 3_000), 300.0)
    assert manager.held_turns == 1
    turns_of(manager, 2 * EVIDENCE_TURNS, 1.0, 310.0)
    assert manager.report()["war/replica/0/trusted_share"] > lowered


@pytest.mark.parametrize(("engine_s", "holds"), [(0.5, True), (5.0, False)])
def test_nothing_is_held_before_the_loss_of_cache_takes_time(engine_s, holds):
    """Half of it is lost: a third of the time where turns take 0.5 s, 4% where they take 5 s."""
    manager = manager_of(["a"], wait_for_thrash=True)
    for number in range(4):
        assert names(manager.on_turn(turn(f"fits not {number}", 6_000), 0.5)) == [f"fits not {number}"]
    turns_of(manager, EVIDENCE_TURNS - 1, 0.5, 1.0, engine_s)
    assert names(manager.on_turn(turn("one more", 2_000), 300.0)) == ["one more"]
    turns_of(manager, 2, 0.5, 301.0, engine_s)
    assert (manager.on_turn(turn("last", 2_000), 400.0) == []) == holds
    share = manager.report()["war/replica/0/trusted_share"]
    assert share == pytest.approx(3.1 * 0.5 if holds else 1.0, rel=0.02), "half of what is resident was kept"


def test_who_one_replica_turns_away_does_not_overfill_the_others():
    manager = manager_of(["a"], wait_for_thrash=True)
    turns_of(manager, 1 + PLAIN_TURNS, 0.5, 1.0)
    assert manager.report()["war/replica/0/thrashed"]
    manager.on_replica_up("b", 50.0)
    manager.on_snapshot("b", reading(CAPACITY), 50.0)
    placed = [manager.on_turn(turn(f"n{number}", 4_000), 51.0) for number in range(8)]
    assert [start[0].replica_id for start in placed if start] == ["b", "b"], "as many as fit on it"
    (start,) = placed[0]
    end(manager, start, 52.0, cached=0)
    assert names(manager.on_turn(turn("n0", 9_000), 53.0)) == ["n0"], "who is there may grow: it has lost nothing"


def test_a_plain_loss_is_seen_after_few_turns_and_a_small_one_after_many():
    manager = manager_of(["a"], wait_for_thrash=True)
    turns_of(manager, PLAIN_TURNS, 0.5, 1.0)
    assert manager.report()["war/replica/0/trusted_share"] == 1.0, "the first turn had nothing to find"
    turns_of(manager, 1, 0.5, 50.0)
    seen = manager.report()["war/replica/0/trusted_share"]
    assert seen == pytest.approx(0.7 * 0.75)
    turns_of(manager, EVIDENCE_TURNS - 1, 0.95, 60.0)
    assert manager.report()["war/replica/0/trusted_share"] == seen
    turns_of(manager, 2, 0.95, 150.0)
    assert manager.report()["war/replica/0/trusted_share"] < seen


def test_a_replica_may_be_overfilled_as_far_as_that_pays():
    """A twentieth of the cache is lost, 4% of the time: too much where all fit, little where thrice as many decode."""
    for others, is_too_much in ((0, True), (4, False)):
        manager = manager_of(["a"], wait_for_thrash=True)
        for number in range(others):
            manager.on_turn(turn(f"other {number}", 6_000), 0.5)
        turns_of(manager, 1 + EVIDENCE_TURNS, 0.95, 1.0)
        assert manager.report()["war/replica/0/thrashed"] == is_too_much


def test_outside_of_admission_a_loss_only_marks_the_replica():
    manager = manager_of(["a"], enabled=False)
    turns_of(manager, 3 * EVIDENCE_TURNS, 0.5, 1.0)
    report = manager.report()
    assert report["war/replica/0/thrashed"] == 1.0 and report["war/replica/0/trusted_share"] == 1.0


def test_a_late_reading_holds_who_comes_and_pauses_nobody():
    manager = manager_of(["a"], wait_for_thrash=True)
    placed = [manager.on_turn(turn(f"s{number}", 6_000), 0.5)[0] for number in range(4)]
    end(manager, placed[0], 1.0, cached=6_000)
    manager.on_snapshot_missing("a", 10.0)
    assert names(manager.on_turn(turn("s0", 6_000), 11.0)) == ["s0"], "it goes on"
    assert manager.on_turn(turn("new", 6_000), 12.0) == [], "nobody would see it thrash"


def test_a_replica_that_joins_is_not_flooded_before_its_engine_has_told_its_capacity():
    manager = manager_of(["a"])
    manager.on_turn(turn("first", 8_000), 0.0)
    for number in range(20):
        assert manager.on_turn(turn(f"s{number}", 4_000), 0.0) == []
    started = manager.on_replica_up("b", 1.0)
    assert [placement.replica_id for placement in started] == ["b", "b"], "as many as would fit on the other"
    assert len(manager.on_snapshot("b", reading(4 * CAPACITY), 2.0)) > 2


def test_an_engine_that_waits_for_tools_does_not_wipe_what_is_known_of_it():
    manager = manager_of(["a"])
    for now_s in range(1, 2 + EVIDENCE_TURNS):
        (placed,) = manager.on_turn(turn("s1", 7_000), float(now_s))
        end(manager, placed, now_s + 0.2, cached=3_500)
        manager.on_snapshot("a", worked(manager, 0.5), now_s + 0.3)
        manager.on_snapshot("a", worked(manager, 0.0), now_s + 0.6)  # no iteration since
    assert manager.report()["war/replica/0/trusted_share"] < 1.0


def test_after_a_restart_a_lost_cache_is_no_thrash():
    manager = manager_of(["a"])
    placed = [manager.on_turn(turn(f"s{number}", 400), 0.0)[0] for number in range(20)]
    for placement in placed:
        end(manager, placement, 1.0, cached=0)
    manager.on_snapshot("a", reading(engine_steps=1_000, computed_tokens=0, busy_s=10.0), 2.0)
    manager.on_snapshot("a", reading(engine_steps=10, computed_tokens=0, busy_s=0.1), 3.0)  # counts anew
    for placement in [manager.on_turn(turn(f"s{number}", 500), 4.0)[0] for number in range(20)]:
        end(manager, placement, 5.0, cached=0)
    manager.on_snapshot("a", worked(manager, 0.1), 6.0)
    assert manager.report()["war/replica/0/trusted_share"] == 1.0


def test_a_share_far_over_what_is_resident_does_not_hide_thrash():
    manager = manager_of(["a"])
    manager._fleet.replicas["a"].trusted_share = 3.9
    manager.on_turn(turn("other", 8_000), 0.0)
    turns_of(manager, 1 + PLAIN_TURNS, 0.1, 1.0)
    assert manager.report()["war/replica/0/trusted_share"] < 1.5


def test_a_lost_replica_limits_the_others_until_the_next_step():
    manager = manager_of(["a"], wait_for_thrash=True)
    turns_of(manager, 1 + PLAIN_TURNS, 0.5, 1.0)
    manager.on_replica_up("b", 50.0)
    manager.on_snapshot("b", reading(CAPACITY), 50.0)
    manager.on_replica_down("a", 51.0, is_lost=True)
    for number in range(8):
        manager.on_turn(turn(f"n{number}", 4_000), 52.0)
    assert manager.held_turns == 6, "it would be filled with all that the lost one held"
    started = manager.on_step_begin(2, 8, 60.0)
    assert len(started) == 6, "nothing is known against those that are left"


def test_preemptions_lose_all_that_their_requests_had():
    manager = manager_of(["a"])
    turns_of(manager, 1 + EVIDENCE_TURNS // 2, 1.0, 1.0)
    manager.on_snapshot("a", worked(manager, 0.5, preemptions=40), 40.0)
    turns_of(manager, EVIDENCE_TURNS // 2, 1.0, 201.0)
    assert manager.report()["war/replica/0/trusted_share"] < 0.7


def test_evidence_of_steps_with_few_turns_adds_up():
    manager = manager_of(["a"])
    for step, begin_s in enumerate((1.0, 100.0, 200.0)):
        assert manager.report()["war/replica/0/trusted_share"] == 1.0, step
        turns_of(manager, EVIDENCE_TURNS // 2, 0.96, begin_s)
        manager.on_weights_updated(begin_s + 90.0)
    assert manager.report()["war/replica/0/trusted_share"] < 1.0


def test_loss_on_a_replica_that_is_far_from_full_is_not_thrash():
    manager = manager_of(["a"], capacity=100_000)
    turns_of(manager, 2 * EVIDENCE_TURNS, 0.0, 1.0, capacity=100_000)
    assert manager.report()["war/replica/0/trusted_share"] == 1.0


@pytest.mark.parametrize(("cached_share", "warns"), [(0.5, True), (0.9, False)])
def test_thrash_in_spite_of_admission_is_said(caplog, cached_share, warns):
    caplog.set_level("WARNING", "verl_war")
    manager = manager_of(["a"])
    turns_of(manager, 1 + EVIDENCE_TURNS, cached_share, 1.0)
    share = manager.report()["war/cache_lost_share"]
    assert share == pytest.approx(1 - cached_share, abs=0.01)
    assert ("thrashing in spite of admission" in caplog.text) == warns
    assert manager.report()["war/cache_lost_share"] == 0.0, "it is that of the time since the last report"


@pytest.mark.parametrize(("factor", "is_another"), [(1.05, False), (2.0, True), (0.5, True)])
def test_what_was_learnt_of_another_kv_size_is_forgotten(factor, is_another):
    manager = manager_of(["a"], wait_for_thrash=True)
    turns_of(manager, 1 + PLAIN_TURNS, 0.5, 1.0)
    learnt = manager.report()["war/replica/0/trusted_share"]
    assert learnt < 1.0
    manager.on_snapshot("a", reading(int(factor * CAPACITY)), 50.0)
    report = manager.report()
    assert report["war/replica/0/trusted_share"] == (1.0 if is_another else learnt)
    assert report["war/replica/0/thrashed"] == (not is_another)


@pytest.mark.parametrize(
    ("told", "is_another"), [((0, CAPACITY), False), ((0, 2 * CAPACITY), True), ((10_800, 11_600), True)]
)
def test_the_size_that_counts_is_the_one_that_was_learnt_of(told, is_another, caplog):
    """Whether its engine was silent for a while, or changed in small steps."""
    caplog.set_level("INFO", "verl_war")
    manager = manager_of(["a"], wait_for_thrash=True)
    turns_of(manager, 1 + PLAIN_TURNS, 0.5, 1.0)
    turns_of(manager, PLAIN_TURNS - 1, 0.5, 50.0)
    for number, capacity in enumerate(told):
        manager.on_snapshot("a", worked(manager, 0.5, capacity), 100.0 + number)
    assert bool(manager.report()["war/replica/0/thrashed"]) != is_another
    assert (f"KV 10000 -> {told[-1]} tokens (its engine reports it" in caplog.text) == is_another
    turns_of(manager, 1, 0.5, 150.0, capacity=told[-1])
    share = manager.report()["war/replica/0/trusted_share"]
    assert (share == 1.0) == is_another, "evidence begins anew, or goes on"
