"""verl builds the backend string ``cpu:gloo,cpu:gloo`` on a CPU platform, and torch refuses a device named twice."""

from collections.abc import Callable
from typing import Any

from verl_war.patches.registry import Patch

CPU_BACKEND = "cpu:gloo"


def _name_the_backend_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or CPU_BACKEND)

    return initialize_global_process_group_ray


PATCH = Patch(
    name="verl_process_group",
    target="verl.utils.distributed:initialize_global_process_group_ray",
    make=_name_the_backend_once,
    sources={"verl==0.9.1": "e9ec517a0089c3c5e6917f28bdd2f55bf493b452aa70fd85c7c17bd12a3e485f"},
    applies_to="cpu",
    reason="torch.distributed refuses the backend string 'cpu:gloo,cpu:gloo' that verl builds for device 'cpu'",
    link="verl 0.9.1 verl/utils/distributed.py:89",
    remove_when="verl names the CPU backend once when the device is 'cpu'",
)
