"""Forms as text in the grammar compiler's dialect of Lark, so that one can stand inside another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.errors import RequestError
from octavo.sampling.structured.schema import prepare_schema
from octavo.structured_outputs import StructuredOutputsParams

_FIELD = "structured_outputs"

ANY_TEXT = r"/(.|\n)*/"
_SPACES = r"[ \t\n]{0,16}"
"""White space between JSON's tokens, where a model may put any: it ends."""


def literal(text: str) -> str:
    """A text (not an empty one) as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, special_id: Callable[[str], int | None]) -> str:
    """A mark as a terminal: one token where it is a special one, which no text matches."""
    token = special_id(text)
    return literal(text) if token is None else f"<[{token}]>"


def json_expression(
    schema: dict[str, Any],
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    lenient: bool = False,
) -> str:
    """JSON by a schema, whose `$ref`s are its own.

    Args:
        lenient: what the compiler does not know of the schema is passed over, else refused.
    """
    options: dict[str, Any] = {"whitespace_flexible": any_whitespace, "lenient": lenient}
    options["coerce_one_of"] = lenient
    if whitespace_pattern is not None or any_whitespace:
        options["whitespace_pattern"] = _SPACES if whitespace_pattern is None else whitespace_pattern
    return "%json " + json.dumps(prepare_schema(schema) | {"x-guidance": options}, ensure_ascii=False)


def nested(grammar: str) -> str:
    """A whole grammar as an expression in another one."""
    return "%lark {\n" + grammar + "\n}"


def as_lark(params: StructuredOutputsParams) -> str:
    """The grammar of a form.

    Raises:
        RequestError: a structural tag, or a grammar in GBNF, that cannot be read.
    """
    kind, text = params.kind, params.text
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(text)
        return "start: " + json_expression(
            schema, not params.disable_any_whitespace, params.whitespace_pattern
        )
    if kind == "regex":
        return "start: /" + _escape_slashes(text).replace("\n", "\\n") + "/"
    if kind == "choice":
        return "start: " + " | ".join(literal(choice) for choice in json.loads(text))
    if kind == "grammar":
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            return any_to_lark(text)
        except GbnfToLarkError as error:
            told = " ".join(str(error).split())[:200]
            raise RequestError(f"{_FIELD}.grammar cannot be followed: {told}", _FIELD) from None
    return structural_tags(json.loads(text))


def structural_tags(given: dict[str, Any]) -> str:
    """The grammar of free text in which what begins with a trigger is a structure.

    Raises:
        RequestError: a structure that is none, or has no trigger.
    """
    from llguidance import StructTag

    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise RequestError(
            f"{_FIELD}.structural_tag has no structures and triggers: give "
            '{"structures": [{"begin", "schema", "end"}], "triggers": [...]}',
            _FIELD,
        )
    tags = []
    for structure in structures:
        begin = structure.get("begin") if isinstance(structure, dict) else None
        end, schema = (structure.get("end", ""), structure.get("schema")) if begin else ("", None)
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise RequestError(
                f"{_FIELD}.structural_tag has a structure without begin (text), schema (object), end (text)",
                _FIELD,
            )
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(
                f"{_FIELD}.structural_tag: no trigger begins {begin[:100]!r}: name one in triggers", _FIELD
            )
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=prepare_schema(schema), end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def after_reasoning(form: str, start: str | None, end: str, special_id: Callable[[str], int | None]) -> str:
    """The grammar of free text up to `end`, then white space, then a form.

    Args:
        start: text that begins with this has free text, other text is the form alone; None: there is free
            text in any case.
    """
    last = marker(end, special_id)
    if last.startswith("<"):
        rules = f"thought: FREE {last}\nFREE: {ANY_TEXT}\n"
    else:
        rules = f"thought[suffix={last}]: {ANY_TEXT}\n"
    head = "thought SPACES?"
    if start is not None:
        head = f"(SPACES? {marker(start, special_id)} {head})?"
    return f"start: {head} form\n{rules}SPACES: /[ \\t\\r\\n]{{1,4}}/\nform: {nested(form)}\n"


def _escape_slashes(expression: str) -> str:
    """A regular expression whose slashes are escaped, those that are so already left alone."""
    parts, escaped = [], False
    for char in expression:
        parts.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(parts)
