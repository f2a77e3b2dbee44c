"""A verl platform for machines without accelerator, so that the whole of verl runs on CPUs.

verl reaches its hardware through ``get_platform()``. This platform answers for the CPU in the vocabulary of CUDA:
there is one device, it is always selected, and work on it is finished when a call returns. Ray still schedules by its
``GPU`` resource, because verl asks Ray for the ids of that resource; the run's configuration declares as many of them
as there are training processes (``/war_machine: cpu``).
"""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_war.integration.verl.cpu_environment import CPU_ENVIRONMENT, machine


class _CpuDevice(ModuleType):
    """``torch.cpu`` with those functions of ``torch.cuda`` that verl calls."""

    Stream = torch.cpu.Stream
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)
    is_available = staticmethod(torch.cpu.is_available)
    device_count = staticmethod(torch.cpu.device_count)
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def set_device(_index: Any) -> None:
        """There is one device."""

    @staticmethod
    def synchronize(_index: Any = None) -> None:
        """Work on the CPU is done when the call that started it returns."""

    @staticmethod
    def empty_cache() -> None:
        """torch keeps no cache of host memory."""

    ipc_collect = empty_cache
    reset_peak_memory_stats = set_device
    set_per_process_memory_fraction = set_device

    @staticmethod
    def get_device_name(_index: Any = None) -> str:
        return "cpu"

    @staticmethod
    def memory_allocated(_index: Any = None) -> int:
        """Returns the resident bytes of this process."""
        return psutil.Process().memory_info().rss

    memory_reserved = memory_allocated
    max_memory_allocated = memory_allocated
    max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(_index: Any = None) -> tuple[int, int]:
        """Returns free and total bytes of the machine."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_rng_state(_index: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _index: Any = None) -> None:
        torch.set_rng_state(state)


_DEVICE = _CpuDevice("verl_war.cpu_device", _CpuDevice.__doc__)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU as a verl platform, detected where torch was built without any accelerator.

    verl asks its platforms in the order of registration, and its own come first.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return machine() == "cpu"

    def current_device(self) -> str:  # type: ignore[override]  # torch takes "cpu" where verl passes a device index
        return "cpu"

    def device_count(self) -> int:
        return _DEVICE.device_count()

    def set_device(self, device_index: int) -> None:
        _DEVICE.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        _DEVICE.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has none."""

    def empty_cache(self) -> None:
        _DEVICE.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Weights go to the engines through shared memory."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

    def cudart(self) -> None:
        return None
