"""verl tool classes of the code agent, declared in ``tools.yaml``.

They find the trajectory's workspace in ``agent_data.tools_kwargs[WORKSPACE_KEY]``, where
:class:`recipes.code_agent.agent_loop.CodeAgentLoop` puts it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipes.code_agent.actions import perform
from recipes.code_agent.threads import in_thread
from recipes.code_agent.workspace import Workspace

logger = logging.getLogger(__name__)

WORKSPACE_KEY = "code_agent_workspace"
DEFAULT_DEADLINE_S = 120.0
"""Long enough to wait for a sandbox on a busy machine, so that it only ends work that hangs."""


class CodeTool(BaseTool):
    """A tool that acts on the trajectory's workspace; its schema names the action.

    Config keys: ``deadline_s``, the time after which the agent is told that the tool timed out; what a test run may
    take by the sandbox's limits comes on top. Whatever goes wrong, the agent gets a short text and the trajectory goes
    on.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.deadline_s = config.get("deadline_s", DEFAULT_DEADLINE_S)
        if not isinstance(self.deadline_s, (int, float)) or self.deadline_s <= 0:
            raise ValueError(f"{self.name}: deadline_s is {self.deadline_s!r}; expected a number of seconds above 0")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run the action in a thread; see :class:`verl.tools.base_tool.BaseTool` for the result."""
        workspace = agent_data.tools_kwargs.get(WORKSPACE_KEY)
        if workspace is None:
            raise RuntimeError(f"{self.name}: the trajectory has no workspace; set agent_name to code_agent")
        return ToolResponse(text=await self._perform(workspace, parameters)), 0.0, {}

    async def _perform(self, workspace: Workspace, parameters: dict[str, Any]) -> str:
        deadline_s = self.deadline_s + (workspace.max_test_s if self.name == "run_tests" else 0)
        try:
            return await in_thread(partial(perform, workspace, self.name, parameters), deadline_s)
        except TimeoutError as error:
            logger.warning("%s of %r hangs: %s", self.name, workspace, error)
            workspace.counts["errors"] += 1
            return f"Error: {self.name} {error}"
        # The boundary to untrusted input: a trajectory must not end because of its tool.
        except Exception as error:
            logger.exception("%s of %r failed", self.name, workspace)
            workspace.counts["errors"] += 1
            return f"Error: {self.name} failed: {type(error).__name__}: {str(error)[:200]}"


class ListFilesTool(CodeTool):
    """``list_files()``: paths of all files."""


class ReadFileTool(CodeTool):
    """``read_file(path)``: text of a file."""


class EditFileTool(CodeTool):
    """``edit_file(path, search, replace)``: replace the only occurrence of a text."""


class RunTestsTool(CodeTool):
    """``run_tests()``: run the task's tests."""
