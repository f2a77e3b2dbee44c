"""Text of simulated trajectories: what look-ups find in it."""

import random

import pytest

from tests.sim.helpers import spec
from verl_war.core.acceptance import AcceptanceTable
from verl_war.core.history_config import SOURCES
from verl_war.sim.draft_world import (
    ACCEPTANCE,
    CLASS_MATCHES,
    DraftTexts,
    DraftWorld,
    Siblings,
    TurnDrafts,
    TurnText,
    find_world,
)

ALL_AHEAD = 7
TOKENS = 240
"""Mean of the default workload's turns."""


def decode(world, siblings_ahead, limit=24, per_match=None, turns=200):
    """Tokens per step, and accepted over drafted tokens, of requests that draft whatever they find."""
    steps = sampled = drafted = right = 0
    for seed in range(turns):
        drafts = TurnDrafts(TurnText(world, random.Random(seed), TOKENS), siblings_ahead)
        position = 1
        while position < TOKENS:
            room = min(limit, TOKENS - position - 1)
            _, length, accepted = drafts.look_up(position, room, per_match) if room else (-1, 0, 0)
            assert 0 <= accepted <= length <= room
            position += accepted + 1
            steps, sampled = steps + 1, sampled + accepted + 1
            drafted, right = drafted + length, right + accepted
    return sampled / steps, right / drafted


@pytest.mark.parametrize(
    "name,ours,rate,suffix",
    [
        ("peaked", 7.0, 0.65, 4.0),  # results/speculation/demo, siblings known, batch 1; vLLM warm
        ("mixed", None, None, 2.8),  # what the authors of WAR report at low load
        ("hot", None, None, 1.13),  # results/speculation/demo_hot, vLLM warm
    ],
)
def test_worlds_give_the_measured_tokens_per_step(name, ours, rate, suffix):
    assert decode(ACCEPTANCE[name], ALL_AHEAD, per_match=1.0)[0] == pytest.approx(suffix, rel=0.1)
    if ours is not None:
        assert decode(ACCEPTANCE[name], ALL_AHEAD) == (pytest.approx(ours, rel=0.1), pytest.approx(rate, rel=0.1))


def test_siblings_that_are_ahead_make_text_predictable():
    per_step = [decode(ACCEPTANCE["peaked"], ahead)[0] for ahead in (0, 1, 3, 7)]
    assert per_step == sorted(per_step)
    assert per_step[0] < 0.3 * per_step[-1]
    alone = DraftWorld(fresh_tokens=2, run_tokens=15, false_share=0, overrun_tokens=9, own_share=0.5, earlier_share=0.5)
    assert decode(alone, 0) == decode(alone, 7)


def test_drafts_of_one_position_by_hand():
    world = DraftWorld(fresh_tokens=1, run_tokens=100, false_share=1.0, overrun_tokens=2, own_share=0, earlier_share=0)
    text = TurnText(world, random.Random(3), 50)
    text.needs[1] = 2
    right, length, match = text.right[1], text.length[1], text.match[1]
    assert (text.right[0], match, text.match[2]) == (0, 2, 3)
    assert length >= right > 5
    assert TurnDrafts(text, 2).look_up(1, 64)[1:] == (length, right)
    assert TurnDrafts(text, 2).look_up(1, 4)[1:] == (4, 4)
    assert TurnDrafts(text, 2).look_up(2, 64, per_match=1.0)[1:] == (3, 3)
    # Nobody has written it yet: what is found is wrong.
    assert TurnDrafts(text, 1).look_up(1, 64)[1:] == (text.false_length[1], 0)
    assert TurnDrafts(text, 1).look_up(1, 64, per_match=1.0)[1:] == (min(2, text.false_length[1]), 0)


def test_new_text_without_chance_finds_has_no_drafts():
    world = DraftWorld(fresh_tokens=1e9, run_tokens=5, false_share=0.0, overrun_tokens=5)
    text = TurnText(world, random.Random(1), 100)
    assert {TurnDrafts(text, 7).look_up(position, 24) for position in range(100)} == {(-1, 0, 0)}
    assert text.least_iterations() == 99


def test_least_iterations_are_those_of_a_drafter_that_finds_all():
    text = TurnText(ACCEPTANCE["peaked"], random.Random(5), TOKENS)
    drafts, position, steps = TurnDrafts(text, 1 << 20), 1, 0
    while position < TOKENS:
        position += 1 + drafts.look_up(position, TOKENS)[2]
        steps += 1
    assert steps == text.least_iterations() < TOKENS / 4


def test_classes_are_those_of_the_acceptance_table():
    table = AcceptanceTable(SOURCES, CLASS_MATCHES)
    text = TurnText(ACCEPTANCE["peaked"], random.Random(5), 2000)
    own = [position for position in range(2000) if text.right[position] and not text.needs[position]]
    sources = set()
    for position in own:
        source = table.source_of(text.kind[position])
        sources.add(SOURCES[source])
        assert text.kind[position] == table.class_of(source, text.match[position], 0.9)
    assert sources == {"own", "earlier_steps"}
    shared = {table.source_of(text.kind[position]) for position in range(2000) if text.needs[position]}
    assert shared == {SOURCES.index("siblings")}


def test_text_depends_on_seed_and_turn_alone():
    specs = [spec(name, turns=[(50, 1, 0)] * 2) for name in "xy"]
    texts, again = (DraftTexts(ACCEPTANCE["peaked"], specs, 1) for _ in range(2))
    assert texts.of(0, 1).right == again.of(0, 1).right
    others = [texts.of(0, 0), texts.of(1, 1), DraftTexts(ACCEPTANCE["peaked"], specs, 2).of(0, 1)]
    assert all(other.right != texts.of(0, 1).right for other in others)


def test_siblings_count_who_has_finished_the_turn_or_everything():
    specs = [spec(name, turns=[(5, 1, 0)] * turns, group=group) for name, turns, group in
             (("a", 3, "g"), ("b", 1, "g"), ("c", 3, "g"), ("d", 3, "h"))]  # fmt: skip
    siblings = Siblings(specs)
    assert siblings.ahead(0, 0) == 0
    siblings.on_turn_end(2, 0)
    siblings.on_turn_end(0, 0)
    siblings.on_turn_end(3, 0)
    assert (siblings.ahead(0, 0), siblings.ahead(0, 1)) == (1, 0)
    siblings.on_turn_end(1, 0)  # its last turn
    assert siblings.ahead(0, 2) == 1


def test_unknown_acceptance_names_what_is_known():
    with pytest.raises(ValueError, match=r"--acceptance 'peakd' is unknown \(did you mean 'peaked'\?\); expected one"):
        find_world("peakd")
