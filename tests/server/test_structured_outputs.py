"""The form of an answer by every field that may ask for it, and over a real engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from octavo.structured_outputs import StructuredOutputsParams
from tests.server.conftest import Running
from tests.server.test_real_engine import octavo

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
STRICT = SCHEMA | {"additionalProperties": False}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
SAID: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": {}, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"json": SCHEMA},
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        {"json": SCHEMA},
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"json_object": True}),
    ({"response_format": {"type": "structural_tag"} | TAG}, {"structural_tag": TAG}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    (
        {"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
        {"choice": ["a", "b"]},
    ),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"json_object": True, "disable_any_whitespace": True},
    ),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    (
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
        {"json": SCHEMA, "whitespace_pattern": " ?"},
    ),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
]


@pytest.mark.parametrize(("fields", "form"), SAID, ids=range(len(SAID)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_engine_is_asked_for(server: Running, path, fields, form):
    own = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = server.post(path, own | {"max_tokens": 3} | fields)
    assert response.status_code == 200, response.text
    params = server.engine.seen[-1][1]
    assert params.structured_outputs == (None if form is None else StructuredOutputsParams(**form))


@pytest.fixture(scope="module")
def real():
    with octavo("--kv-cache-memory-bytes", "8MiB") as server:
        yield server


def test_official_client(real):
    client = openai.OpenAI(
        base_url=f"{real.client.base_url}/v1", api_key="x", http_client=httpx.Client(trust_env=False)
    )
    common: dict[str, Any] = dict(
        model="tiny",
        messages=[{"role": "user", "content": "A number?"}],
        max_tokens=120,
        temperature=1,
        seed=3,
    )
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": STRICT, "strict": True}}
    whole = client.chat.completions.create(**common, response_format=asked, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content or "")) == {"n"}
    stream = client.chat.completions.create(**common, response_format=asked, stream=True)
    parts = [chunk.choices[0] for chunk in stream]
    assert parts[-1].finish_reason == "stop"
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    picked = client.completions.create(
        model="tiny",
        prompt="Yes or no?",
        max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert picked.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_followed_is_a_400(real, stream):
    """By the engine's own word, and whether or not the answer would have been a stream."""
    for form, told in (
        ({"regex": "(a"}, "unclosed"),
        ({"json": {"not": {}}}, "not"),
        ({"grammar": "x"}, "grammar"),
    ):
        response = real.post(
            "/v1/completions", prompt="a", max_tokens=3, stream=stream, structured_outputs=form
        )
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert told in error["message"] and error["param"] == "structured_outputs"
    assert real.text(max_tokens=2)["finish_reason"] == "length"
