"""Stock verl and WAR train the recipes, synchronously and asynchronously, and WAR's metrics move."""

import math
import re

import pytest

from verl_war.core import speculation_report, step_stats

from .conftest import WAR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]

TRAJECTORIES = 4 * 4
"""Prompts times samples of a step, see `train`."""

ZERO_UNLESS_IN_TROUBLE = {
    *("war/trajectories_failed", "war/turns_failed", "war/turns_aborted", "war/preemptions", "war/trajectories_live"),
    *("war/replicas_lost", "war/snapshots_missing", "war/snapshots_rejected", "war/turns_overdue"),
    *("war/spec/faults", "war/spec/replicas_stopped", "war/spec/replicas_missing", "war/spec/refused_tokens"),
    *("war/spec/failed_saves", "war/spec/kv_limited_steps", "war/worker_reports_failed"),
}
"""Counts that stay zero in a healthy synchronous run; unit tests move them."""

ZERO_UNLESS_LOADED = {
    *("war/turns_moved", "war/turns_held", "war/turns_paused", "war/held_s", "war/held_p99_s", "war/move_saving_s"),
    *("war/starts_{reason}", "war/decisive_{term}", "war/degenerate_terms"),
    *("war/turn_s_predicted", "war/turn_s_measured"),
    *("war/regime_high", "war/regime_changes", "war/kv_load_peak"),
    *("war/replica/{i}/thrashed", "war/guard_trial", "war/guard_off", "war/guard_speedup", "war/cache_lost_share"),
}
"""What stays zero where everything fits in the KV caches; unit tests and simulations move it."""

ZERO_IN_A_STEP = {
    *("war/spec/drafted_tokens", "war/spec/drafted_tokens_{source}", "war/spec/drafting_share"),
    *("war/spec/accepted_tokens", "war/spec/accepted_tokens_{source}", "war/spec/acceptance_rate"),
    *("war/spec/regime_switches", "war/spec/switch_requests", "war/spec/budget_tokens", "war/spec/expected_gain"),
    *("war/spec/contexts_rebuilt", "war/spec/shared_bytes"),
}
"""Depends on what drafting costs on the machine at hand; `test_war` checks that the run as a whole drafts."""


def check_training(run, algorithm):
    assert len(run.steps) == 2
    for step in run.steps:
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999, "rollout and trainer disagree on the policy"
        assert step["num_turns/mean"] > 3, "the agent does not use its tools"
        assert math.isfinite(step["actor/pg_loss"])
        assert ("critic/vf_loss" in step) == (algorithm == "ppo")


# A start takes longer than all steps, so pairs of recipe and algorithm are trained where something else is tried too:
# code_agent with GRPO in test_survival, search_agent with GRPO by the asynchronous trainers.
def test_stock_verl(train):
    run = train("code_agent", "ppo")
    check_training(run, "ppo")
    assert not [key for key in run.steps[0] if key.startswith("war/")]


def test_war(train):
    run = train("search_agent", "ppo", WAR)
    check_training(run, "ppo")
    for step in run.steps:
        check_war_metrics(step)
    total = {name: sum(step[name] for step in run.steps) for name in run.steps[0] if name.startswith("war/spec/")}
    assert total["war/spec/drafted_tokens"] > total["war/spec/accepted_tokens"] > 0, "nothing was drafted"
    assert total["war/spec/shared_bytes"] > 0 and total["war/spec/contexts_rebuilt"] == 0
    # What verl measures itself and what the router counted is the same work.
    for step in run.steps:
        assert 0 < step["war/rollout_makespan_s"] < step["timing_s/step"]
        assert step["num_turns/mean"] > step["war/turns"] / TRAJECTORIES


def check_war_metrics(step):
    names = step_stats.metric_names(replicas=2) | speculation_report.metric_names()
    names |= {name: name for name in step_stats.TRAINER_METRICS}
    logged = {key: value for key, value in step.items() if key.startswith("war/")}
    assert set(logged) == set(names)
    still = {names[name] for name, value in logged.items() if value == 0}
    still -= ZERO_UNLESS_IN_TROUBLE | ZERO_UNLESS_LOADED | ZERO_IN_A_STEP
    assert not still, f"metrics that did not move: {sorted(still)}"
    assert logged["war/trajectories"] == TRAJECTORIES
    assert logged["war/prompt_tokens_cached"] + logged["war/prompt_tokens_recomputed"] == logged["war/prompt_tokens"]
    # Nothing is evicted here, so belief and truth differ by the partial blocks of 64 tokens at the ends of prefixes.
    assert logged["war/preemptions"] == 0
    assert abs(logged["war/cache_hit_rate_believed"] - logged["war/cache_hit_rate"]) < 0.25
    assert 1.0 <= logged["war/imbalance"] <= 2.0
    assert logged["war/rollout_t90_s"] <= logged["war/rollout_makespan_s"]


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_asynchronous_trainers(train, mode):
    overrides = {
        "colocate_async": [],
        # One replica beside the trainer, one on its own; weights travel through Ray's object store.
        "separate_async": [
            "trainer.n_gpus_per_node=1",
            "ray_kwargs.ray_init.num_gpus=2",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=object_store",
            "+actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module="
            "verl_war.integration.verl.object_store_engine",
        ],
    }[mode]
    run = train("search_agent", "grpo", WAR, f"trainer.v1.trainer_mode={mode}", *overrides)
    assert len(run.steps) == 2
    assert all(step["war/trajectories"] > 0 and step["war/turns"] > 0 for step in run.steps)


@pytest.mark.timeout(300)
def test_a_mistake_stops_the_run_before_ray_starts(train):
    with pytest.raises(AssertionError) as failure:
        train("code_agent", "grpo", WAR, "+actor_rollout_ref.rollout.custom.war.specultaion.enabled=True")
    message = str(failure.value)
    assert re.search(
        r"unknown key actor_rollout_ref\.rollout\.custom\.war\.specultaion.*did you mean 'speculation'", message
    )
    assert "Started a local Ray instance" not in message
