"""Why a JSON schema is refused: the keyword, where it stands, and what to write in its place."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from octavo.sampling.structured.schema import subschemas

_CASES = "write anyOf of the cases, each with its own properties and required"
_LATER = "leave it out, and check the answer"

# Keywords that the compiler lacks, and what may say the same or nearly so.
REMEDIES = {
    "contains": _LATER,
    "dependencies": _CASES,
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "else": _CASES,
    "if": _CASES,
    "maxContains": _LATER,
    "minContains": _LATER,
    "not": "say what may stand there, with enum, const or anyOf",
    "propertyNames": "write patternProperties, and additionalProperties: false",
    "then": _CASES,
    "unevaluatedItems": "write items",
    "unevaluatedProperties": "write additionalProperties",
    "uniqueItems": _LATER,
}
_ONE_OF = (
    "oneOf{place} has branches that may hold together: write anyOf, or give each branch a required property "
    "whose const tells it apart"
)
_MOST_TRIALS = 64  # compilations to find out which of several is meant
_TRIAL_SECONDS = 1.0  # for all of them
_MAX_PATH = 120


def explained(
    schema: dict[str, Any], message: str, refuses: Callable[[dict[str, Any]], str | None]
) -> str | None:
    """A refusal of the compiler's in words about the schema; None: it is none of those that are known.

    Args:
        schema: what was compiled.
        message: of the compiler's.
        refuses: the compiler's message on another schema; None: it takes it.
    """
    if "oneOf constraints are not supported" in message:
        place = _place(schema, "oneOf", lambda part: "oneOf constraints" in (refuses(part) or ""))
        return _ONE_OF.format(place=place)
    if (found := re.search(r"Unimplemented keys: (\[.*?\])", message)) is not None:
        [name, *_] = _words(found[1])
        place = _place(schema, name, lambda part: "Unimplemented keys" in (refuses(part) or ""))
        return f"{name}{place} is not supported: {REMEDIES.get(name, _LATER)}"
    if (found := re.search(r"Unknown format: (\S+)", message)) is not None:
        name = found[1]
        place = _place(schema, "format", lambda part: part.get("format") == name)
        return f"format {name!r}{place} is not supported: write a pattern, or leave it out"
    if found := re.search(r"circular references with sibling keys are not supported: \S*?(#\S*)", message):
        return (
            f"$ref to {_short(found[1])}, which leads back to itself, has keys beside it: move them into it"
        )
    if schema and ("lookaround" in message or "look-around" in message):
        place = _place(schema, "pattern", lambda part: "(?" in str(part.get("pattern")))
        return f"pattern{place} looks around ((?=, (?!, (?<): write an expression that reads on"
    return None


def _place(schema: dict[str, Any], keyword: str, is_it: Callable[[dict[str, Any]], bool]) -> str:
    """Where the first schema with a keyword stands that is the one; else the first with it, if any."""
    first, until = None, time.monotonic() + _TRIAL_SECONDS
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for trials, (path, part) in enumerate(_having(schema, keyword)):
        first = first or path
        if trials >= _MOST_TRIALS or time.monotonic() > until:
            break
        if is_it({**shared, **part}):
            return f" at {_short(path)}"
    return "" if first is None else f" at {_short(first)}"


def _having(schema: dict[str, Any], keyword: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas within, with their paths, that have a keyword: the innermost of each branch first."""
    stack = [("#", schema)]
    found = []
    while stack:
        path, part = stack.pop()
        if keyword in part:
            found.append((path, part))
        stack += [(f"{path}/{step}", inner) for step, inner in reversed(list(subschemas(part)))]
    # A schema is refused for what stands within it too, so those within are asked first.
    return iter(sorted(found, key=lambda item: -item[0].count("/")))


def _words(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        words = []
    return [str(word) for word in words] or ["a keyword"]


def _short(path: str) -> str:
    return path if len(path) <= _MAX_PATH else path[: _MAX_PATH - 1] + "…"
