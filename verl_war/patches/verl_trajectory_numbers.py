"""Where verl writes the text of trajectories, their numbers are written, too."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _write_numbers(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _log_rollout_data(self: Any, batch: Any, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        from verl_war.integration.verl import trajectory_numbers

        original(self, batch, timing_raw, rollout_data_dir)
        has_log_probs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        trajectory_numbers.write(batch, rollout_data_dir, self.global_steps, has_log_probs)

    return _log_rollout_data


PATCH = Patch(
    name="verl_trajectory_numbers",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._log_rollout_data",
    make=_write_numbers,
    sources={"verl==0.9.1": "4620e6e0913e4faf341a9593654d357aeac6ba6869eb8610f59cafb28d888c67"},
    reason="verl's dump (trainer.rollout_data_dir) has text and score of each trajectory; whether two arms sample from "
    "the same distribution is told by lengths, turns and log-probs of single trajectories, and verl logs their means",
    link="verl 0.9.1 verl/trainer/ppo/v1/trainer_base.py:1297",
    remove_when="verl's dump holds the number of generated tokens, turns and log-probs of each trajectory",
)
