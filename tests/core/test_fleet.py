import random

import pytest

from verl_war.core.fleet import Fleet
from verl_war.core.types import Turn


def joined(fleet, rng, number):
    turn = Turn(session_id=f"s{number}", trajectory_id=f"s{number}", group_id=f"g{number // 4}", prompt_tokens=100)
    conversation = fleet.conversation_of(turn, 0.0)
    fleet.resize(conversation, 100, rng.randint(1, 500))
    fleet.admit(conversation, rng.choice(fleet.pool()), conversation.need_tokens, 50)
    return conversation


@pytest.mark.parametrize("seed", range(5))
def test_the_least_loaded_are_those_of_a_full_search(seed):
    rng, fleet, live = random.Random(seed), Fleet(), []
    for index in range(12):
        fleet.add_replica(f"r{index}")
    for number in range(600):
        kind = rng.random()
        if kind < 0.4:
            live.append(joined(fleet, rng, number))
        elif kind < 0.6 and live:
            fleet.withdraw(live.pop(rng.randrange(len(live))))
        elif kind < 0.8:
            replica = rng.choice(fleet.pool())
            replica.pace.slowness = rng.uniform(0.5, 4.0)
            fleet.on_pace(replica)
        elif kind < 0.9 and fleet.pool_size > 2:
            fleet.remove_replica(rng.choice(fleet.pool()).replica_id)
            live = [conversation for conversation in live if conversation.admitted]
        else:
            fleet.add_replica(f"r{rng.randrange(12)}")
        count = rng.randint(1, 5)
        found = [replica.load for replica in fleet.least_loaded(count)]
        assert found == sorted(replica.load for replica in fleet.pool())[:count]
        assert fleet.pool_size == len(fleet.pool())


def test_a_working_set_is_its_needs_and_each_groups_prompt_once():
    fleet, rng = Fleet(), random.Random(0)
    replica = fleet.add_replica("r")
    conversations = [joined(fleet, rng, number) for number in range(8)]
    assert replica.working_set_tokens == sum(conversation.need_tokens for conversation in conversations) + 2 * 50
    for conversation in conversations:
        fleet.withdraw(conversation)
    assert replica.working_set_tokens == 0 and fleet.admitted == 0


def test_removing_twice_counts_once():
    fleet = Fleet()
    fleet.add_replica("a")
    fleet.add_replica("a")
    assert fleet.pool_size == 1
    fleet.remove_replica("a")
    fleet.remove_replica("a")
    fleet.remove_replica("never")
    assert fleet.pool_size == 0 and fleet.least_loaded(3) == []


@pytest.mark.parametrize(
    ("trajectories", "group_size", "replicas", "chunk"),
    [(32, 8, 8, 2), (64, 8, 8, 4), (512, 8, 8, 8), (16, 8, 8, 1), (4, 1, 8, 1), (0, 8, 8, 1), (64, 8, 0, 8)],
)
def test_siblings_are_spread_when_few_and_stay_together_when_many(trajectories, group_size, replicas, chunk):
    from verl_war.core.groups import GroupPlacement

    fleet = Fleet()
    for number in range(replicas):
        fleet.add_replica(f"r{number}")
    groups = GroupPlacement(fleet)
    groups.on_step_begin(trajectories, group_size)
    assert groups.chunk_size == chunk
