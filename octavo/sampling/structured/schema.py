"""JSON schemas as the compiler takes them: formats that nobody defines are left out.

By JSON Schema (2020-12, validation, 7.2.2) a format that an implementation doesn't know only annotates: text
of any kind is valid. Those that the standard defines and the compiler lacks stay, so that it refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_STANDARD_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri "
    "iri-reference uuid uri-template json-pointer relative-json-pointer regex".split()
)
# Keywords by what stands under them: a schema, a list of schemas, schemas by name. Elsewhere is plain data.
_ONE = frozenset(
    "items additionalItems additionalProperties contains not if then else propertyNames unevaluatedItems "
    "unevaluatedProperties contentSchema".split()
)
_LISTS = frozenset("allOf anyOf oneOf prefixItems items".split())
_NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas dependencies".split())


def prepare_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that says the same, without formats of its author's own."""
    prepared: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in _STANDARD_FORMATS:
            continue
        if name in _ONE and isinstance(value, dict):
            value = prepare_schema(value)
        elif name in _LISTS and isinstance(value, list):
            value = [_prepare_any(item) for item in value]
        elif name in _NAMED and isinstance(value, dict):
            value = {key: _prepare_any(item) for key, item in value.items()}
        prepared[name] = value
    return prepared


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right within a schema, with the steps of a JSON pointer that lead to them."""
    for name, value in schema.items():
        if name in _ONE and isinstance(value, dict):
            yield name, value
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"{name}/{i}", item) for i, item in enumerate(value) if isinstance(item, dict))
        elif name in _NAMED and isinstance(value, dict):
            yield from (
                (f"{name}/{key.replace('~', '~0').replace('/', '~1')}", item)
                for key, item in value.items()
                if isinstance(item, dict)
            )


def _prepare_any(value: Any) -> Any:
    return prepare_schema(value) if isinstance(value, dict) else value
