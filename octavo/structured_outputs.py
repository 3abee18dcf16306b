"""What a text must look like: the fields, their bounds. Compiling them is `octavo.sampling.structured`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from octavo.errors import ConfigError, RequestError
from octavo.vllm_names import FORMS, translated

MAX_GRAMMAR_LENGTH = 512 * 1024
"""Characters of a schema, an expression, a grammar, or of all choices together."""
MAX_CHOICES = 16384

_FIELD = "structured_outputs"
FormKey = tuple[str, str, bool, str | None, str | None, str | None]

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_DEPTH = 100  # levels of a schema; a nested one costs stack in every program that reads it


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an output must have, with vLLM's names: exactly one of the first six fields.

    Raises:
        RequestError: none or several of them, or a value out of its bounds; the message names it.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as a dictionary or as text. Kept as text."""
    regex: str | None = None
    """A regular expression (Rust's syntax) that matches the whole text."""
    choice: list[str] | None = None
    """The texts of which one is produced."""
    grammar: str | None = None
    """A context-free grammar: Lark's syntax (rule `start`) or GBNF (rule `root`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free text in which whatever begins
    with a trigger is a structure. Kept as text."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space between JSON's tokens."""
    reasoning_end: str | None = None
    """The form begins after this text, which ends a model's reasoning. What comes before is free. (A server
    with a reasoning parser sets it.)"""
    reasoning_start: str | None = None
    """With reasoning_end: where the output doesn't begin with this text, the form begins at once."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            told = " and ".join(given) if given else "none"
            raise RequestError(f"{_FIELD} has {told}: give exactly one of {', '.join(_KINDS)}", _FIELD)
        self.json_object = True if given == ["json_object"] else None
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                setattr(self, name, _json_text(name, getattr(self, name)))
        if self.reasoning_start is not None and self.reasoning_end is None:
            raise RequestError(f"{_FIELD}.reasoning_start needs reasoning_end: give both", _FIELD)
        for name in ("regex", "grammar", "whitespace_pattern", "reasoning_end", "reasoning_start"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{_FIELD}.{name}={_show(value)} is not valid: give a text", _FIELD)
        if self.choice is not None:
            _check_choice(self.choice)
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(f"{_FIELD}.disable_any_whitespace is not valid: give true or false", _FIELD)
        for text in (self.text, self.whitespace_pattern, self.reasoning_end, self.reasoning_start):
            _check_text(text or "")

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The value of that field as text (choices: a JSON list)."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)

    @property
    def key(self) -> FormKey:
        """Equal for equal forms (for caches)."""
        reasoning = (self.reasoning_end, self.reasoning_start)
        return (self.kind, self.text, self.disable_any_whitespace, self.whitespace_pattern, *reasoning)


def structured_outputs_from(value: Any) -> StructuredOutputsParams | None:
    """Take settings in any form that users give: None, the class, or a dictionary of its fields.

    Raises:
        RequestError: something else, or an unknown field.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise RequestError(
            f"{_FIELD}={_show(value)} is not valid: give StructuredOutputsParams or its fields", _FIELD
        )
    known = StructuredOutputsParams.__struct_fields__
    try:
        value = translated(FORMS, value)
    except ConfigError as error:
        raise RequestError(f"{_FIELD}.{error}", _FIELD) from None
    for name, item in value.items():
        if name not in known and item not in (None, False):
            raise RequestError(f"{_FIELD} has no field {_show(name)}: give one of {', '.join(known)}", _FIELD)
    return StructuredOutputsParams(**{name: value[name] for name in known if value.get(name) is not None})


class GuidedDecodingParams:
    """vLLM's earlier name: makes `StructuredOutputsParams` of its fields."""

    def __new__(cls, **fields: Any) -> StructuredOutputsParams:  # type: ignore[misc]
        made = structured_outputs_from(fields)
        assert made is not None
        return made


def _json_text(name: str, value: Any) -> str:
    """A JSON object as text, checked."""
    try:
        if isinstance(value, str):
            if len(value) > MAX_GRAMMAR_LENGTH:
                raise _too_long(len(value))
            text, value = value, json.loads(value)
        else:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{_FIELD}.{name} is nested too deeply: flatten it", _FIELD) from None
    except (ValueError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{_FIELD}.{name} is not valid JSON: {str(error)[:200]}", _FIELD) from None
    if not isinstance(value, dict):
        raise RequestError(f"{_FIELD}.{name}={_show(value)} is not valid: give a JSON object", _FIELD)
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [c for item in level if isinstance(item, (dict, list)) for c in _children(item)]
    if level:
        raise RequestError(
            f"{_FIELD}.{name} is nested deeper than {_MAX_DEPTH} levels: flatten it, with $ref for example",
            _FIELD,
        )
    return text


def _children(item: dict[str, Any] | list[Any]) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item


def _check_choice(choice: Any) -> None:
    if not isinstance(choice, (list, tuple)) or not choice:
        raise RequestError(f"{_FIELD}.choice={_show(choice)} is not valid: give a list of texts", _FIELD)
    if len(choice) > MAX_CHOICES:
        raise RequestError(f"{_FIELD}.choice has {len(choice)} entries: at most {MAX_CHOICES}", _FIELD)
    for item in choice:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{_FIELD}.choice holds {_show(item)}: give non-empty texts", _FIELD)


def _check_text(text: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise _too_long(len(text))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{_FIELD} holds a lone surrogate: give valid Unicode", _FIELD) from None


def _too_long(length: int) -> RequestError:
    return RequestError(
        f"{_FIELD} is {length} characters long: at most {MAX_GRAMMAR_LENGTH} are allowed", _FIELD
    )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
