"""The agent's tools as plain functions of a workspace: checked arguments in, short text out.

verl's tool classes (:mod:`recipes.code_agent.tools`) and the demonstrations call the same :func:`perform`, so a model
sees the same texts in both.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from recipes.code_agent.workspace import ToolInputError, Workspace

_PARAMETERS: dict[str, dict[str, tuple[type, bool]]] = {
    "list_files": {"path": (str, False)},
    "read_file": {"path": (str, True), "start": (int, False)},
    "edit_file": {"path": (str, True), "search": (str, True), "replace": (str, True)},
    "run_tests": {},
}
"""Arguments of each tool: type, and whether it is required."""
_TYPE_NAMES = {str: "a string", int: "an integer"}


def perform(workspace: Workspace, tool: str, arguments: Any) -> str:
    """Run one tool on the workspace; what is wrong with the arguments is told in the returned text.

    Blocks on files and processes. Exceptions other than a refusal by the workspace pass through.
    """
    try:
        return getattr(workspace, tool)(**_checked(tool, arguments))
    except ToolInputError as error:
        workspace.counts["errors"] += 1
        return f"Error: {error}"


def _checked(tool: str, arguments: Any) -> dict[str, Any]:
    parameters = _PARAMETERS[tool]
    if not isinstance(arguments, dict):
        raise ToolInputError(f"arguments of {tool} must be an object")
    for name, value in arguments.items():
        if name not in parameters:
            raise ToolInputError(f"{tool} has no argument {str(name)[:40]!r}")
        kind = parameters[name][0]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ToolInputError(f"{name} must be {_TYPE_NAMES[kind]}")
    for name, (_, required) in parameters.items():
        if required and name not in arguments:
            raise ToolInputError(f"{tool} needs {name}")
    return arguments


TOOLS_PATH = Path(__file__).with_name("tools.yaml")
"""Declaration of the tools for verl's ``multi_turn.tool_config_path``."""


@cache
def tool_schemas() -> list[dict[str, Any]]:
    """Return the OpenAI schemas of the tools, equal to what verl hands to the chat template."""
    declared = yaml.safe_load(TOOLS_PATH.read_text(encoding="utf-8"))
    return [tool["tool_schema"] for tool in declared["tools"]]
