"""Is this a CPU machine, and what do verl and vLLM read from the environment on one? Needs torch, but not verl."""

import os

import torch

from verl_war.support import Machine

CPU_ENVIRONMENT: dict[str, str] = {
    # verl registers its training engines for "cuda" and "npu" only; they run on CPUs as they are.
    "VERL_ENGINE_DEVICE": "cuda",
    # Trainers and engines of several replicas share the cores: two threads each ran 25 times slower than one.
    "OMP_NUM_THREADS": "1",
    # vLLM would pin every engine to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # GB per engine; vLLM's default is a share of the machine's memory, for every replica.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""What verl and vLLM read from the environment on a CPU machine. A value that the user has set wins."""


def machine() -> Machine:
    """Returns ``cpu`` when this process is to run without accelerator, else ``gpu``.

    The answer depends on how torch was built and not on what this process sees: on a GPU node, Ray hides the devices
    from actors that asked for none, and those must still agree with all others.
    """
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return "cpu" if chosen == "cpu" else "gpu"
    return "cpu" if torch.accelerator.current_accelerator() is None else "gpu"


def set_environment() -> None:
    """Puts :data:`CPU_ENVIRONMENT` into this process, and so into its children, where the user left it open."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
