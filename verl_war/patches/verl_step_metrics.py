"""WAR's metrics join verl's own in every training step."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _add_war_metrics(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @wraps(original)
    def _consume_sync_metrics(self: Any) -> dict[str, Any]:
        from verl_war.integration.verl import step_metrics

        return {**original(self), **step_metrics.consume()}

    return _consume_sync_metrics


PATCH = Patch(
    name="verl_step_metrics",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._consume_sync_metrics",
    make=_add_war_metrics,
    sources={"verl==0.9.1": "68cb4f061b5286b5c5ad0fe99014c0551f343178e405853dd0136a0bfa2ef4fd"},
    reason="a custom sampler could add metrics, but verl withholds its dynamic filtering from custom samplers, and "
    "the trainers of the three modes cannot be registered anew; this method is called by all of them, once a step, "
    "after the weights are updated",
    link="verl 0.9.1 verl/trainer/ppo/v1/trainer_base.py:146-185 (samplers), :674 (this method)",
    remove_when="verl lets an agent loop manager or a router contribute step metrics",
)
