"""Forms as users give them: what is taken, what is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from octavo import RequestError, SamplingParams, StructuredOutputsParams
from octavo.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_LENGTH

DEEP: dict = {}
for _ in range(200):
    DEEP = {"items": DEEP}

BAD = [
    ({}, "none"),
    ({"json": {}, "regex": "a"}, "json and regex"),
    ({"json": "{"}, "JSON"),
    ({"json": "[]"}, "object"),
    ({"json": 7}, "object"),
    ({"json": {"a": float("nan")}}, "JSON"),
    ({"json": DEEP}, "nested"),
    ({"json": "[" * 100_000}, "JSON|nested"),
    ({"json": {"a": "x" * MAX_GRAMMAR_LENGTH}}, str(MAX_GRAMMAR_LENGTH)),
    ({"json": " " * (MAX_GRAMMAR_LENGTH + 1)}, str(MAX_GRAMMAR_LENGTH)),
    ({"regex": ""}, "regex"),
    ({"regex": 7}, "regex"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"choice": []}, "choice"),
    ({"choice": "yes"}, "choice"),
    ({"choice": ["a", ""]}, "choice"),
    ({"choice": ["a", 1]}, "choice"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, str(MAX_CHOICES)),
    ({"grammar": []}, "grammar"),
    ({"json_object": False}, "none"),
    ({"json_object": True, "disable_any_whitespace": "no"}, "disable_any_whitespace"),
    ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "told"), BAD, ids=[f"{i}-{told}" for i, (_, told) in enumerate(BAD)])
def test_bad_forms_are_refused(fields, told):
    with pytest.raises(RequestError, match=told) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_dictionaries_are_taken_and_unknown_fields_are_not():
    params = SamplingParams(structured_outputs={"json": {"type": "object"}, "regex": None})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "object"}')
    with pytest.raises(RequestError, match="regexp"):
        SamplingParams(structured_outputs={"regexp": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_order_of_keys_stays_and_equal_forms_have_equal_keys():
    a = StructuredOutputsParams(json={"b": 1, "a": 2})
    assert a.text == '{"b": 1, "a": 2}'
    assert a.key == StructuredOutputsParams(json='{"b": 1, "a": 2}').key
    assert a.key != StructuredOutputsParams(json=a.text, disable_any_whitespace=True).key
    assert StructuredOutputsParams(regex="x").key != StructuredOutputsParams(grammar="x").key


def test_forms_cross_a_socket():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["ja", "nein"]), max_tokens=3)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert decoded.structured_outputs is not None and decoded.structured_outputs.kind == "choice"
