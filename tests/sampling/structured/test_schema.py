"""What is left out of schemas, and what must stay."""

from __future__ import annotations

from octavo.sampling.structured.schema import prepare_schema


def test_formats_of_ones_own_are_left_out():
    schema = {
        "format": "mine",
        "properties": {"format": {"type": "string", "format": "mine"}, "b": {"format": "date"}},
        "items": [{"format": "mine"}, True],
        "anyOf": [{"not": {"format": "mine", "type": "string"}}],
        "additionalProperties": False,
    }
    assert prepare_schema(schema) == {
        "properties": {"format": {"type": "string"}, "b": {"format": "date"}},
        "items": [{}, True],
        "anyOf": [{"not": {"type": "string"}}],
        "additionalProperties": False,
    }
    assert schema["format"] == "mine"  # the user's stays as it was


def test_values_are_no_schemas():
    schema = {
        "enum": [{"format": "mine"}],
        "const": {"format": "mine"},
        "default": {"properties": {"format": "mine"}},
        "properties": {"enum": {"enum": [{"format": "x"}]}},
        "format": 7,
    }
    assert prepare_schema(schema) == schema


def test_order_stays():
    assert list(prepare_schema({"properties": {"b": {}, "a": {}}})["properties"]) == ["b", "a"]
