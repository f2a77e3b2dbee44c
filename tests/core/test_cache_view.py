import random

import pytest

from verl_war.core.cache_view import CacheView, common_blocks

BLOCK = 16


@pytest.fixture
def view():
    return CacheView(BLOCK)


def chain(*parts):
    """Chain hashes of a context made of named parts of 4 blocks each."""
    hashes, seen = [], ()
    for part in parts:
        for block in range(4):
            seen = (*seen, part, block)
            hashes.append(hash(seen))
    return tuple(hashes)


def test_common_blocks_equals_a_linear_search():
    rng = random.Random(0)
    for _ in range(200):
        common = [rng.random() for _ in range(rng.randint(0, 9))]
        left = common + [rng.random() for _ in range(rng.randint(0, 9))]
        right = common + [rng.random() for _ in range(rng.randint(0, 9))]
        assert common_blocks(left, right) == len(common)


def test_a_conversation_finds_its_own_context_at_home_only(view):
    view.record("a", "s", "g", chain("system", "task", "turn1"))
    longer = chain("system", "task", "turn1", "turn2")
    assert view.believed_tokens("a", "s", "g", longer) == 12 * BLOCK
    assert view.believed_tokens("b", "s", "g", longer) == 0


def test_siblings_share_the_prompt_and_strangers_the_system_prompt(view):
    view.record("a", "s1", "g", chain("system", "task"))
    view.record("a", "s1", "g", chain("system", "task", "own"))
    assert view.believed_tokens("a", "s2", "g", chain("system", "task")) == 8 * BLOCK
    assert view.believed_tokens("a", "s3", "h", chain("system", "other")) == 4 * BLOCK
    assert view.holders("g") == ["a"] and view.holders("h") == []


def test_a_rewritten_context_is_believed_up_to_where_it_differs(view):
    view.record("a", "s", "g", chain("system", "task", "thoughts", "answer"))
    assert view.believed_tokens("a", "s", "g", chain("system", "task", "answer")) == 8 * BLOCK


def test_moving_gives_up_the_old_home(view):
    context = chain("system", "task", "turn")
    view.record("a", "s", "", context)
    view.record("b", "s", "", context)
    view.record("a", "other", "", chain("else"))
    assert view.believed_tokens("b", "s", "", context) == 12 * BLOCK
    assert view.believed_tokens("a", "s", "", context) == 0


def test_forgetting_dropping_and_new_weights(view):
    context = chain("system", "task", "turn")
    view.record("a", "s", "g", chain("system", "task"))
    view.record("a", "s", "g", context)
    view.forget("s")
    assert view.believed_tokens("a", "s", "g", context) == 8 * BLOCK
    view.drop("a")
    assert view.believed_tokens("a", "s", "g", context) == 0 and view.holders("g") == []
    view.record("a", "s", "g", context)
    view.drop_all()
    assert view.believed_tokens("a", "s", "g", context) == 0 and view.holders("g") == []
