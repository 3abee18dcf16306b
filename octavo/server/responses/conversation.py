"""From the items of a Responses request to the chat request that asks the same."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.server.errors import ApiError, bad_request
from octavo.server.protocol.requests import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
)
from octavo.server.responses.protocol import (
    FunctionTool,
    InputItem,
    InputPart,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    ResponseRequest,
    ResponseToolChoice,
    TextFormat,
    ToolChoiceItem,
)
from octavo.server.tools.protocol import (
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    PastFunctionCall,
    PastToolCall,
    Tool,
    ToolChoice,
    ToolChoiceObject,
)

LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "reasoning_text", "text")

_SHARED = (
    "model stream temperature top_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "logit_bias top_k min_p min_tokens ignore_eos stop_token_ids include_stop_str_in_output "
    "skip_special_tokens truncate_prompt_tokens allowed_token_ids bad_words cache_salt priority "
    "structured_outputs chat_template_kwargs"
).split()

# What a chat calls the fields that have other names here.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def new_messages(body: ResponseRequest) -> list[ChatMessage]:
    """The messages of the input.

    Raises:
        ApiError: 400 naming the item.
    """
    if isinstance(body.input, str):
        return [ChatMessage("user", body.input)]
    if not body.input:
        raise bad_request("input is empty: give a text, or at least one item", "input")
    messages: list[ChatMessage] = []
    thought: str | None = None  # belongs to the assistant's next message
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if item.type == "reasoning":
            thought = _joined(item.content, f"{where}.content") or thought
            continue
        if item.type == "function_call":
            call = _call(item, where)
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant" and thought is None:
                last.tool_calls = [*(last.tool_calls or ()), call]
                continue
            message = ChatMessage("assistant", tool_calls=[call])
        elif item.type == "function_call_output":
            message = _call_output(item, where)
        else:
            message = _message(item, where)
        if message.role == "assistant":
            message.reasoning_content, thought = thought, None
        messages.append(message)
    return messages


def answer_message(output: Iterable[OutputItem]) -> ChatMessage:
    """What a response says, as the assistant's message in a later conversation."""
    message = ChatMessage("assistant")
    for item in output:
        if isinstance(item, OutputMessage):
            message.content = f"{message.content or ''}{item.content[0].text}"
        elif isinstance(item, ReasoningItem):
            message.reasoning_content = f"{message.reasoning_content or ''}{item.content[0].text}"
        else:
            call = PastToolCall(PastFunctionCall(item.name, item.arguments), item.call_id)
            message.tool_calls = [*(message.tool_calls or ()), call]
    return message


def as_chat(body: ResponseRequest, messages: list[ChatMessage]) -> ChatRequest:
    """The chat request that asks for the same answer.

    Args:
        messages: of the conversation, without the instructions.
    """
    if body.instructions is not None:
        messages = [ChatMessage("system", body.instructions), *messages]
    shared = {name: getattr(body, name) for name in _SHARED}
    logprobs = LOGPROBS in (body.include or ())
    return ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_format(None if body.text is None else body.text.format),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        **shared,
    )


def renamed(error: ApiError) -> ApiError:
    """An error of the chat request, in the words of this API."""
    if (error.param or "").startswith("tools["):  # a tool is its function here
        param = str(error.param).replace("].function", "]")
        return ApiError(error.status, str(error).replace("].function", "]"), code=error.code, param=param)
    name, mark, rest = (error.param or "").partition("[")
    first, dot, more = name.partition(".")
    if first not in _NAMES:
        return error
    param, text = _NAMES[first] + dot + more + mark + rest, str(error)
    if first != "prompt" and text.startswith(first):
        text = _NAMES[first] + text[len(first) :]
    return ApiError(error.status, text, code=error.code, param=param, headers=error.headers)


def _format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    schema = None
    if given.type == "json_schema":
        if given.schema is None:
            raise bad_request("text.format.schema is missing", "text.format.schema")
        schema = JsonSchemaFormat(given.name or "", given.schema, given.description, given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.type != "message":
        raise ApiError(
            400,
            f"{where}.type is {item.type[:64]!r}: this version takes messages, function calls, their outputs "
            "and reasoning",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    if item.role not in _ROLES:
        shown = "missing" if item.role is None else f"{item.role[:64]!r}"
        raise bad_request(f"{where}.role is {shown}: give {', '.join(_ROLES)}", f"{where}.role")
    if item.content is None:
        raise bad_request(f"{where}.content is missing", f"{where}.content")
    if isinstance(item.content, str):
        return ChatMessage(item.role, item.content)
    texts = _texts(item.content, f"{where}.content")
    if len(texts) == 1:
        return ChatMessage(item.role, texts[0])
    return ChatMessage(item.role, [ContentPart("text", text) for text in texts])


def _tool(tool: FunctionTool) -> Tool:
    return Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: ResponseToolChoice | None) -> ToolChoice | None:
    if not isinstance(choice, ToolChoiceItem):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise bad_request("tool_choice.name is missing", "tool_choice.name")
        return ToolChoiceObject(function=FunctionName(choice.name))
    named = [NamedTool(FunctionName(tool.name)) for tool in choice.tools or ()]
    return ToolChoiceObject(type="allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", named))


def _call(item: InputItem, where: str) -> PastToolCall:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise bad_request(f"{where}.{name} is missing", f"{where}.{name}")
    return PastToolCall(PastFunctionCall(str(item.name), item.arguments), item.call_id)


def _call_output(item: InputItem, where: str) -> ChatMessage:
    for name in ("call_id", "output"):
        if getattr(item, name) is None:
            raise bad_request(f"{where}.{name} is missing", f"{where}.{name}")
    return ChatMessage("tool", _joined(item.output, f"{where}.output"), tool_call_id=item.call_id)


def _joined(given: str | list[InputPart] | None, where: str) -> str:
    return given if isinstance(given, str) else "".join(_texts(given or [], where))


def _texts(parts: list[InputPart], where: str) -> list[str]:
    return [_text(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _text(part: InputPart, where: str) -> str:
    if part.type not in (*_TEXTS, "refusal"):
        raise ApiError(
            400,
            f"{where}.type is {part.type[:64]!r}: this version takes text alone",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise bad_request(f"{where}.{name} is missing", f"{where}.{name}")
    return text
