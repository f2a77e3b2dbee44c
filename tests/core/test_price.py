"""The price of a replica, term by term, on two replicas that differ in one thing."""

import random

import pytest

from verl_war.core.cache_view import CacheView
from verl_war.core.config import SchedulingConfig
from verl_war.core.fleet import Fleet
from verl_war.core.placement import PricedPlacement
from verl_war.core.progress import Progress
from verl_war.core.step_time import StepTime
from verl_war.core.types import PRICE_TERMS, Turn

BLOCK = 10
CONTEXT = tuple(range(1, 101))
MODEL = StepTime(base_s=0.01, token_s=1e-4, kv_token_s=1e-7)


class Case:
    """Two replicas, `near` and `far`, and a conversation of 1,000 tokens whose next turn is to be placed."""

    def __init__(self, **config):
        self.fleet, self.cache_view, self.progress = Fleet(), CacheView(BLOCK), Progress()
        self.near, self.far = (self.fleet.add_replica(name) for name in ("near", "far"))
        for replica in (self.near, self.far):
            replica.capacity_tokens = 10_000
        self.placement = PricedPlacement(
            SchedulingConfig(enabled=True, **config), self.fleet, self.cache_view, self.progress, random.Random(0)
        )
        self.placement.model = MODEL
        self.turn = Turn(session_id="s", trajectory_id="s", prompt_tokens=1_000, block_hashes=CONTEXT)
        self.conversation = self.fleet.conversation_of(self.turn, 0.0)
        self.fleet.resize(self.conversation, 1_000, 1_000.0)

    def price(self, replica, now_s=0.0):
        return self.placement.price(self.turn, self.conversation, replica, now_s)

    def load(self, replica, tokens):
        other = Turn(session_id=f"other{tokens}", trajectory_id="other", prompt_tokens=tokens)
        conversation = self.fleet.conversation_of(other, 0.0)
        self.fleet.resize(conversation, tokens, float(tokens))
        self.fleet.admit(conversation, replica, float(tokens), 0)
        return conversation

    def pause_at(self, replica):
        """The conversation was there, with all of its context in the cache, and was paused."""
        self.cache_view.record(replica.replica_id, "s", "", CONTEXT)
        self.fleet.admit(self.conversation, replica, 1_000.0, 0)
        self.fleet.withdraw(self.conversation)


def cached(case):
    case.pause_at(case.near)


def queued(case):
    case.far.prefill_until_s = 3.0


def decoding(case):
    case.fleet.begin_turn(case.load(case.far, 100))


def overflowing(case):
    case.load(case.far, 9_500)


@pytest.mark.parametrize(
    ("differ", "term"),
    [(cached, "prefill_s"), (queued, "queue_s"), (decoding, "decode_s"), (overflowing, "overflow_s")],
)
def test_each_term_makes_the_far_replica_dearer_and_the_near_one_chosen(differ, term):
    case = Case()
    differ(case)
    near, far = case.price(case.near), case.price(case.far)
    assert far[term] > near[term]
    assert far["total"] == pytest.approx(sum(far[name] for name in PRICE_TERMS))
    replica, _ = case.placement.cheapest(case.turn, case.conversation, [case.far, case.near], 0.0)
    assert replica is case.near


def test_prefill_is_what_the_cache_lacks():
    case = Case()
    assert case.price(case.far)["prefill_s"] == pytest.approx(1_000 * MODEL.token_s)
    case.pause_at(case.near)
    assert case.price(case.near)["prefill_s"] == 0.0


def test_the_queue_before_it_passes_with_time():
    case = Case()
    case.far.prefill_until_s = 3.0
    assert [case.price(case.far, now_s)["queue_s"] for now_s in (0.0, 2.0, 5.0)] == [3.0, 1.0, 0.0]


def test_a_slow_replica_multiplies_what_it_computes():
    case = Case()
    case.load(case.near, 9_500), case.load(case.far, 9_501)
    case.far.pace.slowness = 3.0
    near, far = case.price(case.near), case.price(case.far)
    for term in ("prefill_s", "decode_s", "overflow_s"):
        assert far[term] == pytest.approx(3 * near[term], rel=0.01), term


def test_drafts_make_decoding_cheaper():
    case = Case()
    case.near.draft_yield.tokens_per_iteration = 2.5
    near, far = case.price(case.near), case.price(case.far)
    assert far["decode_s"] == pytest.approx(2.5 * near["decode_s"])
    assert far["turn_s"] > near["turn_s"] and far["prefill_s"] == near["prefill_s"]


def test_a_paused_context_is_lost_when_more_was_taken_than_was_free():
    case = Case()
    case.pause_at(case.near)
    case.near.allocated_tokens = 9_000
    assert case.price(case.near)["prefill_s"] == 0.0, "10,000 were free"
    case.near.allocated_tokens = 10_600
    assert case.price(case.near)["prefill_s"] == pytest.approx(600 * MODEL.token_s)
    case.near.allocated_tokens = 50_000
    assert case.price(case.near)["prefill_s"] == pytest.approx(1_000 * MODEL.token_s)


def test_what_went_to_host_memory_is_priced_between_a_hit_and_a_miss():
    case = Case(offload_capacity_tokens=100_000, offload_price_share=0.2)
    case.pause_at(case.near)
    case.near.allocated_tokens = 50_000
    price = case.price(case.near)
    assert price["prefill_s"] == 0.0
    assert price["offload_s"] == pytest.approx(0.2 * 1_000 * MODEL.token_s)
