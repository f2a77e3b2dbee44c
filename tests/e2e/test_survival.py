"""Real training runs with broken replicas go on with the others, and every trajectory is trained on or left out."""

import json
import os
import signal

import psutil
import pytest

from .conftest import WAR
from .faults import Victim

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]

CONTROLS = "actor_rollout_ref.rollout.custom.war"


@pytest.fixture
def broken(train, tmp_path):
    """`broken(meddle, *overrides)` trains with `meddle(victim)` in a thread; returns the run and what it returned."""

    def run(meddle, *overrides):
        journal, result = tmp_path / "journal.jsonl", []
        finished = train(
            "code_agent", "grpo", WAR, f"{CONTROLS}.journal_path={journal}", *overrides,
            meanwhile=lambda run_id: result.append(meddle(Victim(run_id, journal))),
        )  # fmt: skip
        assert result, "the run ended before everything was done to it"
        return finished, result[0], journal

    return run


def index_of_lost(journal):
    """Numbers of the replicas that broke, as the metrics count them, in order."""
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    names = list(dict.fromkeys(record["replica_id"] for record in records if record["event"] == "replica_up"))
    downs = [record for record in records if record["event"] == "replica_down" and record["is_lost"]]
    return [names.index(record["replica_id"]) for record in downs]


def check_trained(run, trajectories):
    """Nothing was given up, and the replicas that remained had the weights."""
    for step in run.steps:
        assert step["war/trajectories"] == trajectories and step["war/trajectories_failed"] == 0, (
            "turns are asked again elsewhere"
        )
        assert step["war/trajectories_live"] == 0
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999, "the replicas that remain have the weights"


def test_an_engine_that_is_slow_and_then_killed_in_mid_turn(broken):
    def meddle(victim):
        victim.wait_for("step_begin", 2)
        engine = victim.engines()[0]
        victim.slow_down(engine, until=lambda: victim.has("report", 2))
        victim.wait_for("step_begin", 3)
        os.kill(engine, signal.SIGSTOP)  # from here on whatever comes to it stays in flight
        victim.wait_for("turn_end", 3)
        os.kill(engine, signal.SIGKILL)
        return engine

    # Always: with all trajectories on one replica, whether drafts pay depends on the machine.
    run, engine, journal = broken(meddle, "trainer.total_training_steps=4", f"{CONTROLS}.speculation.mode=always")
    assert not psutil.pid_exists(engine)
    check_trained(run, trajectories=16)
    assert [step["war/replicas_lost"] for step in run.steps] == [0, 0, 1, 0]
    (slow,) = index_of_lost(journal)
    slowness = [[step[f"war/replica/{i}/slowness"] for i in range(2)] for step in run.steps[:2]]
    assert slowness[1][slow] > 1.5 * slowness[1][1 - slow], "seen over the whole step, of which it was slow for most"
    assert run.steps[1]["war/turns_failed"] == 0, "slow is not broken"
    assert run.steps[2]["war/turns_failed"] > 0
    assert run.steps[3]["war/spec/drafted_tokens"] > 0, "the other replica goes on drafting"
