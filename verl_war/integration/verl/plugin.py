"""Entry point ``verl.plugins``: runs in every process that imports verl, before verl's own modules are used.

verl logs the failure of a plugin at DEBUG and goes on. A worker that goes on unpatched trains on wrong numbers, so a
failure here ends the process instead: verl catches ``Exception``, and ``SystemExit`` is none.
"""

import importlib
import os
import traceback
from collections.abc import Callable

# Only what cannot fail is imported here: an ImportError of this module would be swallowed too.
from verl_war.support import UpstreamMismatchError

PLUGIN_NAME = "verl_war"
"""Name of our entry points, in setup.py."""


def _set_log_level() -> None:
    from verl_war import support

    support.set_log_level()


def _check_versions() -> None:
    from verl_war import support
    from verl_war.integration.verl import cpu_environment

    support.check_versions(cpu_environment.machine())


def _check_engines_load_us() -> None:
    """vLLM loads only the plugins that ``VLLM_PLUGINS`` names, where it is set: engines would run unpatched."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise UpstreamMismatchError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading verl_war; expected it to name {PLUGIN_NAME!r}. "
            f"Remedy: unset VLLM_PLUGINS or add {PLUGIN_NAME} to it"
        )


def _prepare_cpu_machine() -> None:
    from verl_war.integration.verl import cpu_environment

    importlib.import_module("verl_war.integration.verl.platform_cpu")  # registers itself
    if cpu_environment.machine() == "cpu":
        cpu_environment.set_environment()


def _install_patches() -> None:
    from verl_war.integration.verl import cpu_environment
    from verl_war.patches import catalog, registry

    registry.install(catalog.PATCHES, cpu_environment.machine())


def _register_war() -> None:
    from verl_war.integration.verl.register import register_war

    register_war()


STEPS: tuple[Callable[[], None], ...] = (
    _set_log_level,
    _check_versions,
    _check_engines_load_us,
    _prepare_cpu_machine,
    _install_patches,
    _register_war,
)
"""What happens when verl is imported, in this order."""


def start(steps: tuple[Callable[[], None], ...] = STEPS) -> None:
    """Runs ``steps``; a failure ends the process with its message as the last thing that the user sees.

    Raises:
        SystemExit: A step failed.
    """
    try:
        for step in steps:
            step()
    except UpstreamMismatchError as error:
        raise SystemExit(f"verl_war refuses to start: {error}") from error
    except Exception as error:  # verl would swallow whatever it is
        raise SystemExit(f"verl_war failed to start:\n{traceback.format_exc()}") from error


start()
