"""Whom a replica sends its text to."""

import pytest

from verl_war.core.peers import peers_of


def test_the_next_ones_in_a_ring():
    assert peers_of(["a", "b", "c", "d"], 2) == {"a": ["b", "c"], "b": ["c", "d"], "c": ["d", "a"], "d": ["a", "b"]}


@pytest.mark.parametrize(("replicas", "count"), [([], 3), (["a"], 3), (["a", "b"], 0)])
def test_nobody_to_send_to(replicas, count):
    assert peers_of(replicas, count) == {name: [] for name in replicas}


@pytest.mark.parametrize("count", [1, 3, 100])
def test_all_send_and_receive_alike_and_none_to_itself(count):
    names = [f"r{i}" for i in range(7)]
    peers = peers_of(names, count)
    received = [peer for others in peers.values() for peer in others]
    assert all(
        name not in others and len(set(others)) == len(others) == min(count, 6) for name, others in peers.items()
    )
    assert {name: received.count(name) for name in names} == dict.fromkeys(names, min(count, 6))
