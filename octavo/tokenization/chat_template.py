"""Chat templates: Jinja programs that a model brings along, run in a sandbox as Hugging Face runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from octavo.errors import ConfigError, RequestError
from octavo.tokenization.template_sandbox import (
    MAX_TEMPLATE_CHARS,
    BoundedEnvironment,
    TemplateLimitError,
    check_json,
)

# It ends in a space, as Transformers' does: a template that trims the message takes the space too, which
# tells that the spaces before the mark would have gone as well.
_CONTINUE_TAG = "\x02octavo continues here\x03 "
_MAX_WORDS = 500


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; serving renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_json(value, indent, separators)
    # Jinja's own filter escapes HTML, which no model has seen in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> tuple[jinja2.Template, bool]:
    """The compiled template, and whether it wants message contents as lists of parts.

    Raises:
        TemplateSyntaxError: it does not parse, is too long or too deeply nested.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise jinja2.TemplateSyntaxError(
            f"it has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are read", 1
        )
    environment = _environment()
    try:
        return environment.from_string(template), _wants_parts(environment.parse(template))
    except (RecursionError, MemoryError, SyntaxError):  # of Jinja's parser, and of Python's
        raise jinja2.TemplateSyntaxError("it is too deeply nested", 1) from None


def _wants_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's content and never asks if it is a string."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.EnvironmentAttribute):
            node = node.args[0]  # as the sandbox counts it
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    loops = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return loops and not any(test.name == "string" for test in tree.find_all(nodes.Test))


def load_chat_template(value: str) -> str:
    """The text of a template given as a file's path or as itself.

    Raises:
        ConfigError: neither a file nor Jinja text, or a template that does not parse.
    """
    text = value
    if not any(mark in value for mark in ("{{", "{%", "\n")):
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat template {value!r} cannot be read ({error}): give a UTF-8 file or the template's text"
            ) from None
    try:
        _compile(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not parse (line {error.lineno}: {error.message}): correct it"
        ) from None
    return text


def flatten_messages(
    messages: Sequence[Mapping[str, Any]], as_parts: bool = False, keep_none: bool = True
) -> list[dict[str, Any]]:
    """Messages as templates expect them: each content one string, tool arguments parsed.

    Args:
        messages: OpenAI-style; `content` is a string, None, or a list of `{"type": "text", "text": …}`,
            whose texts are joined by newlines. Beside tool calls a content of None, or none at all,
            stays so, since templates ask for it; elsewhere it becomes an empty text.
        as_parts: give contents as lists of text parts instead of strings.
        keep_none: False: it becomes an empty text there, too.

    Raises:
        RequestError: no message, a message without a role, a part that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(
            "messages is empty: give at least one message with a role and a content", "messages"
        )
    out = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} is not an object: give one with a role and a content", "messages")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has no role: give system, user, assistant or tool", "messages")
        copy = dict(message)
        calls = message.get("tool_calls")
        if message.get("content") is not None or not (calls and keep_none):
            texts = _texts(message.get("content"), where)
            copy["content"] = [{"type": "text", "text": t} for t in texts] if as_parts else "\n".join(texts)
        if calls:
            copy["tool_calls"] = [_parsed_call(call, where) for call in calls]
        out.append(copy)
    return out


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where}.content is {content!r}: give a string or a list of text parts", "messages"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind is None or kind == "text":
            raise RequestError(
                f"{where}.content holds {part!r}: give parts with a type and a text", "messages"
            )
        else:
            raise RequestError(
                f"{where}.content holds a part of type {kind!r}: this model reads text only, leave it out",
                "messages",
            )
    return texts


def _parsed_call(call: Any, where: str) -> Any:
    """A tool call whose arguments are an object, as templates print them, not the API's JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where}.tool_calls holds {call!r}: each needs a function", "messages")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise RequestError(
                f"{where}.tool_calls has arguments that are not JSON: {arguments[:80]!r}", "messages"
            ) from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt text of a conversation. It holds every special token that the model wants, so that
    it must be encoded with `add_special_tokens=False`.

    Args:
        template: Jinja text.
        messages: as `flatten_messages` takes them.
        special_tokens: `bos_token`, `eos_token`, … as the template may name them.
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message open, for the model to go on with it.
        tools: OpenAI tool definitions.
        **kwargs: further variables for the template; they win over `special_tokens`.

    Raises:
        RequestError: the template does not parse, or refuses the messages; with its own words.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one to false",
            "continue_final_message",
        )
    try:
        compiled, wants_parts = _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template does not parse (line {error.lineno}: {error.message}): correct it",
            "chat_template",
        ) from None
    # A template that knows no calls expects a text in every message.
    chat = flatten_messages(messages, as_parts=wants_parts, keep_none="tool_calls" in template)
    if "developer" not in template:
        # OpenAI's later name of the system's role, whose messages such a template would leave out, or mark so
        # that the model has never seen it.
        chat = [m | {"role": "system"} if m["role"] == "developer" else m for m in chat]
    final = ""
    if continue_final_message:
        final = _tag_final(chat[-1])
    variables = {**special_tokens, "documents": None, **kwargs}
    variables = {
        **variables,
        "messages": chat,
        "tools": [dict(tool) for tool in tools] if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = _environment().render(compiled, variables)
    except TemplateLimitError as error:
        raise RequestError(f"the chat template was stopped: {error.message}", "messages") from None
    # A template is a program: whatever it raises is about these messages.
    except Exception as error:
        words = " ".join(str(error)[: 4 * _MAX_WORDS].split())[:_MAX_WORDS] or type(error).__name__
        raise RequestError(f"the chat template refused the messages: {words}", "messages") from None
    return _cut_at_tag(text, final) if continue_final_message else text


def _tag_final(message: dict[str, Any]) -> str:
    """Mark the end of the last message's text; the text without the mark."""
    content = message.get("content")
    final = content[-1]["text"] if content and isinstance(content, list) else content
    if not final:
        raise RequestError(
            "continue_final_message needs a final message with text to go on with", "continue_final_message"
        )
    if isinstance(content, list):
        content[-1]["text"] = final + _CONTINUE_TAG
    else:
        message["content"] = final + _CONTINUE_TAG
    return final


def _cut_at_tag(text: str, final: str) -> str:
    cut = text.rfind(_CONTINUE_TAG.rstrip())
    if cut < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template drops or changes the final message, "
            "so that it cannot be continued: set it to false",
            "continue_final_message",
        )
    return text[:cut] if text.startswith(_CONTINUE_TAG, cut) else text[:cut].rstrip()
