"""Real training runs with broken replicas go on with the others, and every trajectory is trained on or left out."""

import json
import os
import re
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


def lost(journal):
    """Numbers of the replicas that broke, as the metrics count them, in order."""
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    names = list(dict.fromkeys(record["replica_id"] for record in records if record["event"] == "replica_up"))
    downs = [record for record in records if record["event"] == "replica_down" and record["is_lost"]]
    return [names.index(record["replica_id"]) for record in downs]


def check_trained(steps):
    """Nothing was given up, and the replicas that remained had the weights."""
    for step in steps:
        assert step["war/trajectories"] == 16 and step["war/trajectories_failed"] == 0, (
            "turns are asked again elsewhere"
        )
        assert step["war/trajectories_live"] == 0
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999, "the replicas that remain have the weights"


def test_a_killed_engine_and_a_killed_router(broken):
    def meddle(victim):
        victim.wait_for("step_begin", 2)
        engine = victim.engines()[0]
        os.kill(engine, signal.SIGSTOP)  # from here on whatever comes to it stays in flight
        victim.wait_for("turn_end", 2)
        os.kill(engine, signal.SIGKILL)
        victim.wait_for("turn_end", 4)
        (router,) = victim.actors("WarRouter")
        os.kill(router, signal.SIGKILL)
        return engine

    # Always: with all trajectories on one replica, whether drafts pay depends on the machine.
    run, engine, journal = broken(meddle, "trainer.total_training_steps=5", f"{CONTROLS}.speculation.mode=always")
    assert not psutil.pid_exists(engine)
    before, after = run.steps[:3], run.steps[4:]
    check_trained(before + after)
    assert [step["war/replicas_lost"] for step in before] == [0, 1, 0] and len(lost(journal)) == 1
    assert run.steps[1]["war/turns_failed"] > 0
    assert run.steps[2]["war/spec/drafted_tokens"] > 0, "the other replica goes on drafting"
    # The router that was started again knows nothing of what came before it.
    assert 0 < run.steps[3]["war/trajectories"] <= 16 and run.steps[3]["war/trajectories_failed"] == 0
    assert journal.with_name(f"{journal.name}.2").exists()


def test_an_engine_that_hangs_and_then_is_slow_and_a_killed_server(broken):
    def meddle(victim):
        victim.wait_for("step_begin", 2)
        engine = victim.engines()[0]
        os.kill(engine, signal.SIGSTOP)
        victim.wait_for("replica_down", 2)
        os.kill(engine, signal.SIGCONT)
        victim.wait_for("replica_up", 2)
        victim.wait_for("report", 2)
        # Two steps: an engine with room is read every 2 s, and the median of three windows counts.
        victim.slow_down(engine, until=lambda: victim.has("report", 4))
        victim.wait_for("turn_end", 6)
        server = victim.actors("WarHttpServer")[0]
        os.kill(server, signal.SIGKILL)
        return server

    hang_s = f"{CONTROLS}.failures.replica_hang_s=20"
    run, server, journal = broken(meddle, "trainer.total_training_steps=7", hang_s)
    assert not psutil.pid_exists(server)
    check_trained(run.steps)
    hung, killed = lost(journal)
    assert [step["war/replicas_lost"] for step in run.steps] == [0, 1, 0, 0, 0, 1, 0], "one that hangs may come back"
    slowness = [run.steps[3][f"war/replica/{i}/slowness"] for i in (hung, 1 - hung)]
    assert slowness[0] > slowness[1], "it was slow all the time; by how much it seems so depends on the machine"
    assert [step["war/turns_failed"] for step in run.steps[2:4]] == [0, 0], "slow is not broken"


def test_an_engine_that_stops_while_it_takes_weights(broken):
    def meddle(victim):
        victim.wait_for("step_begin", 2)
        engine = victim.engines()[0]  # beforehand: to find it takes as long as the weights do
        victim.stop_in_weights(engine)
        return engine

    hang_s = f"{CONTROLS}.failures.replica_hang_s=20"
    run, engine, journal = broken(meddle, "trainer.total_training_steps=5", hang_s)
    assert not psutil.pid_exists(engine)
    check_trained(run.steps)
    assert len(lost(journal)) == 1 and sum(step["war/replicas_lost"] for step in run.steps) == 1
    assert re.search(r"replica \d: up -> down for good .*it did not get the weights", run.console)
    update_s = [step["timing_s/update_weights"] for step in run.steps]
    assert sum(took_s > 20 for took_s in update_s) == 1, "the others were updated meanwhile, and the run went on"
