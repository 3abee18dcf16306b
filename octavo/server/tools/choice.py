"""What a request says of tools, checked: which may be called, whether one must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from octavo.server.errors import ApiError, bad_request
from octavo.server.parsing import check_depth
from octavo.server.tools.protocol import FunctionDefinition, Tool, ToolChoice, ToolChoiceObject, parameters_of

MAX_TOOLS = 1024


class ToolMode(Enum):
    """Whether the model calls a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True)
class ToolRequest:
    """The tools of one request.

    Attributes:
        offered: all of them; the prompt shows them, so that a choice among them changes no prefix.
        callable: those that may be called.
        parallel: whether one answer may hold several calls.
    """

    offered: Sequence[FunctionDefinition]
    callable: Sequence[FunctionDefinition]
    mode: ToolMode
    parallel: bool = True

    def for_template(self) -> list[dict[str, Any]]:
        """The offered tools as chat templates print them."""
        shown = []
        for function in self.offered:
            plain: dict[str, Any] = {"name": function.name}
            if function.description is not None:
                plain["description"] = function.description
            plain["parameters"] = parameters_of(function)
            shown.append({"type": "function", "function": plain})
        return shown


NO_TOOLS = ToolRequest((), (), ToolMode.NONE)


def tool_request(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolRequest:
    """What a request says of tools.

    Raises:
        ApiError: 400 for tools that cannot be offered, or a choice that does not fit them.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools: give some, or leave it out", "tool_choice")
        return NO_TOOLS
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries: at most {MAX_TOOLS} are allowed", "tools")
    functions: dict[str, FunctionDefinition] = {}
    for i, tool in enumerate(tools):
        function = tool.function
        if function.name in functions:
            raise bad_request(
                f"tools[{i}] has the name {function.name[:64]!r} of an earlier one: give each its own",
                f"tools[{i}].function.name",
            )
        check_depth(function.parameters, f"tools[{i}].function.parameters")
        functions[function.name] = function
    offered = list(functions.values())
    may = parallel is not False
    if isinstance(choice, ToolChoiceObject):
        called, mode = _chosen(choice, functions)
        return ToolRequest(offered, called, mode, may and choice.function is None)
    return ToolRequest(offered, offered, ToolMode(choice or "auto"), may)


def _chosen(
    choice: ToolChoiceObject, functions: dict[str, FunctionDefinition]
) -> tuple[list[FunctionDefinition], ToolMode]:
    if choice.type == "function":
        if choice.function is None:
            raise bad_request("tool_choice.function is missing", "tool_choice.function")
        return [_find(choice.function.name, functions)], ToolMode.REQUIRED
    allowed = choice.allowed_tools
    if allowed is None or not allowed.tools:
        raise bad_request("tool_choice.allowed_tools names no tool: name some", "tool_choice.allowed_tools")
    names = dict.fromkeys(tool.function.name for tool in allowed.tools)
    return [_find(name, functions) for name in names], ToolMode(allowed.mode)


def _find(name: str, functions: dict[str, FunctionDefinition]) -> FunctionDefinition:
    if name not in functions:
        raise ApiError(
            400,
            f"tool_choice names {name[:64]!r}, which is not in tools: name one that is",
            param="tool_choice",
            code="invalid_value",
        )
    return functions[name]
