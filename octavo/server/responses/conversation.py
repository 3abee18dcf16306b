"""From the items of a Responses request to the chat request that asks the same."""

from __future__ import annotations

from octavo.server.errors import ApiError, bad_request
from octavo.server.protocol import ChatMessage, ChatRequest, ContentPart, JsonSchemaFormat, ResponseFormat
from octavo.server.responses.protocol import InputItem, InputPart, ResponseRequest, TextFormat

LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")

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
    return [_message(item, f"input[{i}]") for i, item in enumerate(body.input)]


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
        **shared,
    )


def renamed(error: ApiError) -> ApiError:
    """An error of the chat request, in the words of this API."""
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
            f"{where}.type is {item.type[:64]!r}: this version takes messages alone",
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
    texts = [_text(part, f"{where}.content[{i}]") for i, part in enumerate(item.content)]
    if len(texts) == 1:
        return ChatMessage(item.role, texts[0])
    return ChatMessage(item.role, [ContentPart("text", text) for text in texts])


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
