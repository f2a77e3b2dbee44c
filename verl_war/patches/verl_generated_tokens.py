"""Both arms of a comparison log how many tokens the policy generated."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch

METRIC = "perf/generated_tokens"


def _count_generated_tokens(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(original)
    def compute_data_metrics(batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = original(batch, *args, **kwargs)
        metrics[METRIC] = int(batch.batch["response_mask"].sum())
        return metrics

    return compute_data_metrics


PATCH = Patch(
    name="verl_generated_tokens",
    target="verl.trainer.ppo.metric_utils:compute_data_metrics",
    make=_count_generated_tokens,
    sources={"verl==0.9.1": "7962e777d5e61eb051a3f345c02cbb501fa9fb31c9159248600066d0cf38cc04"},
    reason="verl's response_length counts the tools' output too; whether two arms did the same work is told by what "
    "the policy generated, of which verl logs nothing",
    link="verl 0.9.1 verl/trainer/ppo/metric_utils.py:429",
    remove_when="verl logs the sum of response_mask",
)
