"""Tools in bodies of requests and answers, OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionDefinition(Struct):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments, an object; None: it has none."""
    strict: bool | None = None
    """Calls follow the schema for sure: a grammar sees to it."""


def parameters_of(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return function.parameters if function.parameters is not None else {"type": "object", "properties": {}}


class Tool(Struct):
    """A tool that a request offers."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """Which function."""

    name: str


class NamedTool(Struct):
    """One of the tools by its name."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    """Some of the tools that the request offers."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoiceObject(Struct, kw_only=True):
    """A choice that names tools: `function` the one to call, `allowed_tools` those that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceObject


class FunctionCall(Struct):
    """What a call says. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call that the model made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class PastFunctionCall(Struct):
    """A call in a conversation's history. `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class PastToolCall(Struct):
    """A call that the model made earlier."""

    function: PastFunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class FunctionCallDelta(Struct, omit_defaults=True):
    """What is new of a call; its name comes once."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What is new of the call at `index`; `id` and `type` come once, with the name."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
