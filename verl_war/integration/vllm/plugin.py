"""Entry point ``vllm.general_plugins``: runs in vLLM's API server, engine core and workers.

vLLM skips a plugin whose import fails, so this module imports nothing that can fail; it does not catch what
:func:`register` raises, and an engine that cannot be patched does not start.
"""

from verl_war import support
from verl_war.patches import catalog, registry


def register() -> None:
    """Checks versions and arms the patches in this process. vLLM may call it several times.

    Raises:
        UpstreamMismatchError: An installed package is not what a patch was written against.
    """
    from vllm.platforms import current_platform

    support.set_log_level()
    machine: support.Machine = "cpu" if current_platform.is_cpu() else "gpu"
    support.check_versions(machine)
    registry.install(catalog.PATCHES, machine)
