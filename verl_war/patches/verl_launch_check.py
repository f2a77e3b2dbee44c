"""A run that selected WAR is validated before Ray starts."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from verl_war.patches.registry import Patch


def _check_war_too(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        from verl_war.integration.verl.settings import check_launch

        check_launch(config)
        original(config, *args, **kwargs)

    return validate_config


PATCH = Patch(
    name="verl_launch_check",
    target="verl.utils.config:validate_config",
    make=_check_war_too,
    sources={"verl==0.9.1": "9e2d82e4b51e7099f5c295c96ba1d117c7255965a1ed14e8bc25f289f56f2028"},
    reason="verl calls no plugin between composing the configuration and starting Ray; a mistake in custom.war would "
    "otherwise be found only when the first replica starts, a minute later on another machine",
    link="verl 0.9.1 verl/trainer/main_ppo.py:main",
    remove_when="verl offers plugins a hook to validate the configuration",
)
