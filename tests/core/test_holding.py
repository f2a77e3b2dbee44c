"""Conversations are held where that saves more seconds of prefill than it costs in small batches."""

import math

import pytest

from tests.core.test_scheduler import manager_of, names, reading, turn
from verl_war.core.admission import HOLD_GAIN, HoldingPrice
from verl_war.core.step_time import StepTime
from verl_war.sim.hardware import load_profile

MODEL = StepTime(base_s=0.010, token_s=0.0001)


def test_the_price_is_that_of_its_formula():
    price = HoldingPrice()
    assert price.pays and price.gain == math.inf, "nothing was measured"
    assert not price.update(MODEL, capacity_tokens=10_000, duty=0.5, iterations=20)
    assert price.gain == pytest.approx(0.0001 * 0.5 * 10_000 / (20 * 0.010))


def test_both_kinds_of_seconds_agree_with_a_fleet_written_out():
    """Seconds of a turn by batch: what the formula's ratio says is what the sums say."""
    context, capacity, duty, iterations = 500.0, 8_000.0, 0.5, 32.0

    def turn_s(model, fill):
        batch = duty * fill * capacity / context
        return iterations * model.base_s / batch + model.token_s * context * (1 - 1 / fill)

    for token_s in (0.00002, 0.00005, 0.00008, 0.0002):
        model, price = StepTime(base_s=0.010, token_s=token_s), HoldingPrice()
        price.update(model, capacity, duty, iterations)
        assert (turn_s(model, 2.0) > turn_s(model, 1.0)) == (price.gain > 1.0)


def test_it_does_not_flap_around_break_even():
    price, even = HoldingPrice(), 2_000
    assert not price.update(MODEL, even, 1.0, 20), "goes on at break-even"
    assert price.update(MODEL, 0.9 * even, 1.0, 20) and not price.pays
    assert not price.update(MODEL, 1.1 * even, 1.0, 20) and not price.pays
    assert price.update(MODEL, 1.01 * HOLD_GAIN * even, 1.0, 20) and price.pays


def test_unknown_capacity_and_no_iterations_change_nothing():
    price = HoldingPrice()
    assert not price.update(MODEL, 0, 1.0, 20) and not price.update(MODEL, 1_000, 1.0, 0.0)
    assert price.pays and price.gain == math.inf


def measured(manager, token_s, capacity=10_000, begin=0):
    """Readings of an engine whose iterations take 10 ms and so much for each token that is prefilled."""
    fields = {"kv_capacity_tokens": capacity, "engine_steps": 0, "computed_tokens": 0, "row_steps": 0, "busy_s": 0.0}
    placements = []
    for number in range(1, 40):
        prefilled = 100 if number % 2 else 0
        fields["engine_steps"] += 10
        fields["row_steps"] += 40
        fields["computed_tokens"] += 40 + prefilled
        fields["busy_s"] += 10 * 0.010 + prefilled * token_s
        snapshot = reading(
            **{"capacity": fields["kv_capacity_tokens"]}
            | {k: v for k, v in fields.items() if k != "kv_capacity_tokens"}
        )
        placements += manager.on_snapshot("a", snapshot, begin + 0.5 * number)
    return placements


@pytest.mark.parametrize(("token_s", "holds"), [(0.002, True), (0.00001, False)])
def test_held_turns_run_once_holding_does_not_pay(token_s, holds, caplog):
    caplog.set_level("INFO", "verl_war")
    manager = manager_of(["a"])
    manager.on_turn(turn("first", 9_000), 0.0)
    assert manager.on_turn(turn("second", 5_000), 0.0) == []
    started = names(measured(manager, token_s))
    assert started == ([] if holds else ["second"])
    assert ("holding does not pay" in caplog.text) == (not holds)
    gain = manager.report()["war/holding_gain"]
    assert (gain > HOLD_GAIN) == holds and gain > 0


def test_gpus_hold():
    """Of the profiles' fleets, with the default workload's turns of 240 tokens and drafts that halve the iterations."""
    for name in ("h100_8b", "h100x4_32b", "h200_8b"):
        hardware, price = load_profile(name), HoldingPrice()
        model = StepTime(base_s=hardware.base_s + hardware.weights_s, token_s=hardware.per_token_s)
        price.update(model, hardware.kv_capacity_tokens, 0.5, 240)
        assert price.gain > 2 * HOLD_GAIN, name
