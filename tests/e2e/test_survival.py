"""A real training run with a broken replica goes on with the others, and every trajectory is trained on or left out."""

import json
import os
import signal
import time

import psutil
import pytest

from verl_war.compare import processes

from .conftest import RUN_LIMIT_S, WAR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]


def engines_of(run_id):
    """Engine processes of vLLM that belong to a run."""
    marked = processes.marked_processes(run_id)
    return [process for process in marked if "EngineCore" in "".join(process.cmdline())]


def events(journal):
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [json.loads(line)["event"] for line in lines[1:-1]]


def test_an_engine_killed_in_mid_turn(train, tmp_path):
    journal = tmp_path / "journal.jsonl"
    killed = []

    def kill_in_the_second_step(run_id):
        deadline_s = time.monotonic() + RUN_LIMIT_S
        while time.monotonic() < deadline_s:
            seen = events(journal)
            begun = [at for at, event in enumerate(seen) if event == "step_begin"]
            if len(begun) >= 2 and "turn_end" in seen[begun[1] :]:
                killed.append(engines_of(run_id)[0].pid)
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.2)

    controls = "actor_rollout_ref.rollout.custom.war"
    run = train(
        "code_agent", "grpo", WAR, "trainer.total_training_steps=3", f"{controls}.journal_path={journal}",
        meanwhile=kill_in_the_second_step,
    )  # fmt: skip
    assert killed and not psutil.pid_exists(killed[0])
    assert [step["war/replicas_lost"] for step in run.steps] == [0, 1, 0]
    for step in run.steps:
        assert step["war/trajectories"] == 16 and step["war/trajectories_failed"] == 0, (
            "turns are asked again elsewhere"
        )
        assert step["war/trajectories_live"] == 0
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999, "the replica that remains has the weights"
    assert run.steps[1]["war/turns_failed"] > 0
    assert run.steps[2]["war/spec/drafted_tokens"] > 0, "the other replica goes on drafting"
