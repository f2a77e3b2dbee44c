"""verl agent loop of the code agent: one workspace per trajectory, scored by the tests at its end."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from recipes.code_agent.reward import Reward, RewardConfig, reward_of
from recipes.code_agent.sandbox import SandboxLimits
from recipes.code_agent.settings import config_from
from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import SandboxedTests
from recipes.code_agent.threads import in_thread
from recipes.code_agent.tools import WORKSPACE_KEY
from recipes.code_agent.workspace import Workspace, WorkspaceLimits

logger = logging.getLogger(__name__)

_SCORE_GRACE_S = 300.0
"""Waiting for a free sandbox on a busy machine counts too; beyond this something hangs."""


@register("code_agent")
class CodeAgentLoop(ToolAgentLoop):
    """verl's tool agent on the files of a code-repair task.

    A dataset row needs ``extra_info["task"]``, see :mod:`recipes.code_agent.tasks`. The output has a
    ``reward_score`` and, in ``extra_fields["reward_extra_info"]``, numbers under the keys ``score``, ``acc`` (1.0 when
    solved), ``tests_passed``, ``num_edits``, ``num_test_runs``, ``num_tool_errors`` and ``num_assistant_turns``.

    Args:
        reward: fields of :class:`RewardConfig`.
        workspace: fields of :class:`WorkspaceLimits`.
        sandbox: fields of :class:`SandboxLimits`.
    """

    def __init__(
        self,
        *args: Any,
        reward: Mapping[str, Any] | None = None,
        workspace: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reward_config = config_from("reward", RewardConfig, reward)
        self._workspace_limits = config_from("workspace", WorkspaceLimits, workspace)
        self._sandbox_limits = config_from("sandbox", SandboxLimits, sandbox)
        if self.tool_parser_name == "hermes":
            self.tool_parser = MalformedCallParser(self.tool_parser, self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory, see :meth:`verl.experimental.agent_loop.AgentLoopBase.run`.

        The workspace is gone when this returns, raises or is cancelled.

        Raises:
            ValueError: the row has no valid task.
            TimeoutError: scoring hangs.
        SandboxError: the tests could not be isolated; the trajectory has no reward then, rather than a wrong one.
        """
        task = _task_of(kwargs)
        opening = asyncio.ensure_future(in_thread(partial(self._open, task)))
        try:
            workspace = await asyncio.shield(opening)
            tools_kwargs = {**(kwargs.get("tools_kwargs") or {}), WORKSPACE_KEY: workspace}
            output = await super().run(sampling_params, **{**kwargs, "tools_kwargs": tools_kwargs})
            return await self._scored(output, workspace)
        finally:
            await _close(opening)

    def _open(self, task: Task) -> Workspace:
        return Workspace(task, SandboxedTests(self._sandbox_limits), self._workspace_limits)

    async def _scored(self, output: AgentLoopOutput, workspace: Workspace) -> AgentLoopOutput:
        start_s = time.monotonic()
        outcome = await in_thread(workspace.score, workspace.max_test_s + _SCORE_GRACE_S)
        reward = reward_of(workspace.task, outcome, self._reward_config)
        output.reward_score = reward.score
        output.metrics.compute_score = time.monotonic() - start_s
        output.extra_fields["reward_extra_info"] = _extra_info(reward, workspace, output.num_turns)
        return output


class MalformedCallParser:
    """Hermes tool parser for which a malformed call is a call that fails, rather than the end of the trajectory.

    The raw text becomes the call's arguments; verl answers that they are no JSON, or that there is no such tool.
    """

    def __init__(self, inner: ToolParser, tokenizer: Any) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self.stop_token_ids = inner.stop_token_ids

    async def extract_tool_calls(self, response_ids: list[int], tools: list[Any]) -> tuple[str, list[FunctionCall]]:
        """See :meth:`verl.experimental.agent_loop.tool_parser.ToolParser.extract_tool_calls`."""
        content, calls = await self._inner.extract_tool_calls(response_ids, tools)
        if calls:
            return content, calls
        before, found, text = self._tokenizer.decode(response_ids, skip_special_tokens=True).partition("<tool_call>")
        if not found:
            return content, []
        text = text.partition("</tool_call>")[0].strip()
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return before, [FunctionCall(name=name[1] if name else "", arguments=text)]


def _extra_info(reward: Reward, workspace: Workspace, num_turns: int) -> dict[str, float]:
    counts = workspace.counts
    return {
        "score": reward.score,
        "acc": reward.solved,
        "tests_passed": reward.tests_passed,
        "num_edits": counts["edits"],
        "num_test_runs": counts["test_runs"],
        "num_tool_errors": counts["errors"],
        # verl counts the prompt, the assistant's turns and the tools' turns, of which the last may be missing.
        "num_assistant_turns": num_turns // 2,
    }


def _task_of(row: Mapping[str, Any]) -> Task:
    extra_info = row.get("extra_info") or {}
    text = extra_info.get("task") if isinstance(extra_info, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(
            f"row {row.get('index')}: extra_info['task'] is {text!r:.80}; expected the JSON form of a task, "
            "as python -m recipes.code_agent.prepare_data writes it"
        )
    return Task.from_json(text)


async def _close(opening: asyncio.Future[Workspace]) -> None:
    """Close the workspace as soon as it is there, even when this is cancelled again and again."""

    async def close() -> None:
        await asyncio.wait([opening])
        if opening.exception() is None:
            await in_thread(opening.result().close)

    await asyncio.shield(asyncio.ensure_future(close()))
