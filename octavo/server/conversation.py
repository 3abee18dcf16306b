"""The messages of a request, checked, as chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.errors import ApiError, bad_request
from octavo.server.parsing import check_depth
from octavo.server.protocol.requests import ChatMessage, TemplateFields
from octavo.server.service import Service
from octavo.server.text import ChatPrompt

MAX_MESSAGES = 16384
_RESERVED = frozenset(
    "messages tools template special_tokens chat_template add_generation_prompt "
    "continue_final_message".split()
)


def chat_prompt(
    service: Service,
    messages: list[ChatMessage],
    options: TemplateFields,
    extra: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> ChatPrompt:
    """A conversation as the chat template takes it.

    Raises:
        ApiError: 400 for what the template may not get, naming the field.
    """
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"messages has {len(messages)} entries: at most {MAX_MESSAGES} are allowed", "messages"
        )
    if options.chat_template is not None and not service.config.trust_request_chat_template:
        raise bad_request(
            "chat_template is not taken from requests: start the server with --trust-request-chat-template",
            "chat_template",
        )
    continued = bool(options.continue_final_message)
    generation = not continued if options.add_generation_prompt is None else options.add_generation_prompt
    kwargs = dict(options.chat_template_kwargs or {})
    check_depth(kwargs, "chat_template_kwargs")
    for name in kwargs:
        if name in _RESERVED:
            raise bad_request(
                f"chat_template_kwargs holds {name}: give it as a field of the request",
                "chat_template_kwargs",
            )
    return ChatPrompt(
        messages=[_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        add_generation_prompt=generation,
        continue_final_message=continued,
        add_special_tokens=bool(options.add_special_tokens),  # templates write their own
        chat_template=options.chat_template,
        template_kwargs=(service.config.default_chat_template_kwargs or {}) | (extra or {}) | kwargs,
        tools=tools,
    )


def _plain_message(message: ChatMessage, where: str) -> dict[str, Any]:
    content: Any = message.content
    if content is None and message.role == "user":
        raise ApiError(
            400,
            f"{where}.content is missing",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    if isinstance(content, list):
        for i, part in enumerate(content):
            place = f"{where}.content[{i}]"
            if part.type != "text":
                raise ApiError(
                    400,
                    f"{place}.type is {part.type[:64]!r}: this version takes text alone",
                    param=f"{place}.type",
                    code="unsupported_parameter",
                )
            if part.text is None:
                raise bad_request(f"{place}.text is missing", f"{place}.text")
        content = msgspec.to_builtins(content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        for i, call in enumerate(message.tool_calls):
            check_depth(call.function.arguments, f"{where}.tool_calls[{i}].function.arguments")
        plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:  # templates ask for either name
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    return plain
