"""The tools ``search`` and ``open`` as verl tools, declared in ``tools.yaml``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

from recipes.search_agent.index import CorpusIndex, load_index
from recipes.search_agent.retrieval import RetrievalConfig, open_document, search

_POOL = ThreadPoolExecutor(max_workers=4, thread_name_prefix="search_agent")
"""Not the event loop's own pool: verl tokenizes in that one."""


class RetrievalTool(BaseTool):
    """A tool that looks something up in a corpus, off the event loop and within a deadline.

    The corpus is read when the tool is made, so that a malformed one stops a run at its start.

    Raises:
        ValueError: the configuration or the corpus is malformed.
    """

    answer: ClassVar[Callable[[CorpusIndex, RetrievalConfig, Any], str]]

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        options = {key: value for key, value in config.items() if key not in ("type", "corpus_path")}
        self._limits = RetrievalConfig.from_dict(options)
        self._index = load_index(_corpus_path(config))

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the tool's text, no step reward and no metrics; bad arguments and a missed deadline are texts too."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(_POOL, type(self).answer, self._index, self._limits, parameters)
        try:
            text = await asyncio.wait_for(answer, self._limits.timeout_s)
        except asyncio.TimeoutError:
            text = f"Error: {self.name} took longer than {self._limits.timeout_s:g} s; try again."
        return ToolResponse(text=text), 0.0, {}


def _corpus_path(config: dict[str, Any]) -> Path:
    path = config.get("corpus_path")
    if not isinstance(path, str) or path in ("", "???"):
        raise ValueError(
            f"tool config: corpus_path is {path!r}; expected the path of a corpus. prepare_data writes a tools.yaml "
            "with it next to the data: set actor_rollout_ref.rollout.multi_turn.tool_config_path to that file"
        )
    return Path(path)


class SearchTool(RetrievalTool):
    """``search(query)``: titles, ids and snippets of the most relevant documents."""

    answer = staticmethod(search)


class OpenTool(RetrievalTool):
    """``open(doc_id)``: the text of a document."""

    answer = staticmethod(open_document)
