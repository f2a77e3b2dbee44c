"""`trainer.v1.sampler.sampler_kwargs.poll_interval_s` sets how often the replay buffer looks for finished rollouts."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _read_poll_interval(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        interval_s = (kwargs.get("sampler_kwargs") or {}).get("poll_interval_s")
        if interval_s is not None:
            if type(interval_s) not in (int, float) or not 0 < interval_s <= 60:
                raise ValueError(
                    f"trainer.v1.sampler.sampler_kwargs.poll_interval_s={interval_s!r} must be a number of seconds "
                    f"over 0 and at most 60 (verl's own is 2.0)"
                )
            kwargs["poll_interval"] = float(interval_s)
        original(self, *args, **kwargs)

    return __init__


PATCH = Patch(
    name="verl_poll_interval",
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__",
    make=_read_poll_interval,
    sources={"verl==0.9.1": "2502efaa4f967572d4ec2ba690a07f04c9b16bc77145c0fc5dc0fdc63c643c54"},
    reason="the interval of 2.0 s is out of reach of the configuration, so every rollout is rounded up to a multiple "
    "of 2 s, which hides any difference between short ones. Without the key nothing changes, with or without WAR",
    link="verl 0.9.1 verl/trainer/ppo/v1/replay_buffer.py:144",
    remove_when="verl makes the interval configurable",
)
