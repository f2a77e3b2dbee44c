import random

import pytest

from verl_war.core.placement import STOCK_SESSION_CAPACITY, StockPlacement
from verl_war.core.types import Reason, Turn


def turn(session_id, **fields):
    return Turn(session_id=session_id, trajectory_id=session_id, prompt_tokens=1, **fields)


def pool(*replica_ids, **options):
    placement = StockPlacement(random.Random(0), **options)
    for replica_id in replica_ids:
        placement.add_replica(replica_id)
    return placement


def test_new_sessions_go_to_the_replica_with_fewest_requests_in_flight():
    placement = pool("a", "b")
    first, second = placement.place(turn("s1")), placement.place(turn("s2"))
    assert {first[0], second[0]} == {"a", "b"}
    assert first[1] is second[1] is Reason.LEAST_INFLIGHT


def test_a_session_stays_although_its_replica_is_the_busiest():
    placement = pool("a", "b")
    home = placement.place(turn("s"))[0]
    again = placement.place(turn("s"))
    assert again == (home, Reason.STICKY)
    assert placement.inflight[home] == 2


def test_a_session_moves_when_its_replica_has_left():
    placement = pool("a", "b")
    home = placement.place(turn("s"))[0]
    placement.remove_replica(home)
    moved = placement.place(turn("s"))
    assert moved[0] != home and moved[1] is Reason.LEAST_INFLIGHT


def test_release_never_goes_below_zero_and_ignores_replicas_that_left():
    placement = pool("a")
    placement.release("a")
    placement.release("gone")
    assert placement.inflight == {"a": 0}


def test_an_empty_pool_says_what_verls_client_waits_for():
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        pool().place(turn("s"))


def test_full_determinism_places_by_hash_over_the_pool():
    placement = pool("a", "b", "c", full_determinism=True)
    for session_id in ("x", "y", "z"):
        chosen = placement.place(turn(session_id))
        assert chosen == ("abc"[hash(session_id) % 3], Reason.DETERMINISTIC)


def test_forgetting_sessions_counts_them_and_lets_them_be_placed_anew():
    placement = pool("a", "b")
    home = placement.place(turn("s"))[0]
    assert placement.forget_sessions() == 1
    assert placement.place(turn("s"))[0] != home


def test_the_least_recently_used_session_is_forgotten_beyond_verls_capacity():
    placement = pool("a")
    for number in range(STOCK_SESSION_CAPACITY + 1):
        placement.place(turn(f"s{number}"))
    assert placement.place(turn("s0"))[1] is Reason.LEAST_INFLIGHT
    assert placement.place(turn(f"s{STOCK_SESSION_CAPACITY}"))[1] is Reason.STICKY
