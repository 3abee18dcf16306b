"""The OpenAPI document is true: every route is in it, and real answers satisfy its schemas exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.server.endpoints import DEVELOPMENT, OPERATIONS, PAGE, PROFILING
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_chat import events
from tests.server.test_responses import response_events

TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], document: dict[str, Any], where: str = "$") -> list[str]:
    """What in a JSON value is not as the schema says; properties that it does not name count too."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        tries = [problems(value, option, document, where) for option in schema["anyOf"]]
        return [] if [] in tries else min(tries, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} is not one of {schema['enum']}"]
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(
        isinstance(value, TYPES[k]) and (k == "boolean" or not isinstance(value, bool)) for k in kinds
    ):
        return [f"{where}: {value!r} is no {kinds}"]
    found = []
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += problems(item, schema["items"], document, f"{where}[{i}]")
    if isinstance(value, dict):
        named, other = (
            schema.get("properties", {}),
            schema.get("additionalProperties", "properties" not in schema),
        )
        found += [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name in named:
                found += problems(item, named[name], document, f"{where}.{name}")
            elif isinstance(other, dict):
                found += problems(item, other, document, f"{where}.{name}")
            elif not other:
                found.append(f"{where}: {name} is not in the schema")
    return found


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
EVERYTHING = {"n": 2, "return_token_ids": True}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {}, "description": "d", "strict": True}
FUNCTION = {
    "type": "function", "name": "f", "description": "d", "strict": True, "parameters": {"type": "object"},
}  # fmt: skip
CHOICE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
STORED = "/v1/responses/resp_stored"
REPLY = '<think>a</think>b<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = {
    "messages": [{"role": "user", "content": "Tools?"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "max_tokens": len(REPLY),
}
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", CHAT),
    (
        "POST",
        "/v1/chat/completions",
        CHAT | EVERYTHING | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    ),
    (
        "POST",
        "/v1/chat/completions",
        CHAT | EVERYTHING | {"stream": True, "logprobs": True, "top_logprobs": 1},
    ),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", TOOLS),
    ("POST", "/v1/chat/completions", TOOLS | {"stream": True}),
    ("POST", "/v1/completions", {"prompt": "a"}),
    (
        "POST",
        "/v1/completions",
        {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "prompt_logprobs": 1} | EVERYTHING,
    ),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True, "logprobs": 1, "echo": True} | EVERYTHING),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "metadata": {"a": "b"}}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 40}),
    (
        "POST",
        "/v1/responses",
        {"input": "hi", "stream": True, "text": {"format": SCHEMA, "verbosity": "low"}},
    ),
    ("POST", "/v1/responses", {"input": "hi\x18", "stream": True, "max_output_tokens": 5}),
    ("POST", "/v1/responses", {"input": "Tools?", "tools": [FUNCTION], "max_output_tokens": len(REPLY)}),
    (
        "POST",
        "/v1/responses",
        {"input": "Tools?", "tools": [FUNCTION], "max_output_tokens": len(REPLY), "stream": True},
    ),
    (
        "POST",
        "/v1/responses",
        {"input": "hi", "tools": [FUNCTION], "max_output_tokens": 3, "tool_choice": CHOICE},
    ),
    ("GET", STORED, None),
    ("DELETE", STORED, None),
    ("POST", "/v1/embeddings", {"input": ["a", "b"], "dimensions": 2}),
    ("POST", "/v1/embeddings", {"input": [97, 98], "encoding_format": "base64"}),
    ("POST", "/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("POST", "/score", {"text_1": "a", "text_2": "b"}),
    ("GET", "/load", None),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": CHAT["messages"]}),
    ("POST", "/detokenize", {"tokens": [97]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/some/model", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/ping", None),
    ("POST", "/ping", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/", None),
    ("GET", "/server_info.json", None),
    ("GET", "/server_state.json", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/sleep?level=2&mode=abort", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/wake_up", None),
    ("POST", "/start_profile", None),
    ("POST", "/stop_profile", None),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    synthetic = {"method": "ngram", "synthetic_acceptance": [0.5]}  # whose answers have a field more
    engine = FakeEngine(torch_profiler_dir="traces", speculative_config=synthetic)
    engine.replies = {"Tools?": REPLY}
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(engine, enable_auto_tool_choice=True, enable_dev_endpoints=True, **settings) as server:
        server.engine.live.add("under way")  # what /server_state.json lists
        yield server


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    return dict(server.client.get("/openapi.json").json())


def template(path: str) -> str:
    path = path.partition("?")[0]
    if path == STORED:
        return "/v1/responses/{response_id}"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else path


def request(server: Running, method: str, path: str, body: Any) -> Any:
    """An answer, whatever was called before: a stored response is there, what is to be ended is under way."""
    server.engine.level = int(path == "/wake_up")
    server.engine.profiles = int(path == "/stop_profile")
    try:
        return _request(server, method, path, body)
    finally:
        server.engine.level = server.engine.profiles = 0


def _request(server: Running, method: str, path: str, body: Any) -> Any:
    if path == STORED:
        made = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2}).json()
        kept = server.service.responses.get(made["id"])
        assert kept is not None
        server.service.responses.put("resp_stored", kept.body, kept.messages)
    return server.client.request(method, path, json=body)


def told(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    """What a stream tells."""
    return response_events(server, body) if path == "/v1/responses" else events(server, path, body)


def test_every_route_is_described_and_called(document: dict[str, Any]) -> None:
    described = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    offered = OPERATIONS + PAGE + PROFILING + DEVELOPMENT
    assert described == {(o.method, o.path) for o in offered if not o.hidden}
    assert described == {(method, template(path)) for method, path, _ in CALLS}
    assert document["openapi"].startswith("3.1")


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_answers_satisfy_their_schemas(
    server: Running, document: dict[str, Any], method: str, path: str, body: Any
) -> None:
    operation = document["paths"][template(path)][method.lower()]
    content = operation["responses"]["200"]["content"]
    if body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert problems(body, schema, document) == []
    if body is not None and body.get("stream"):
        for chunk in told(server, path, body):
            assert problems(chunk, content["text/event-stream"]["schema"], document) == []
        return
    response = request(server, method, path, body)
    assert response.status_code == 200
    kind = response.headers["content-type"].split(";")[0]
    value = response.json() if kind == "application/json" else response.text
    assert problems(value, content[kind]["schema"], document) == []


def test_every_field_of_answers_is_seen(server: Running, document: dict[str, Any]) -> None:
    """No schema of an answer promises a property that no call above brings."""
    seen: set[tuple[str, str]] = set()

    def walk(value: Any, schema: dict[str, Any]) -> None:
        name = ""
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            schema = document["components"]["schemas"][name]
        for option in schema.get("anyOf", []):
            if not problems(value, option, document):
                walk(value, option)
        if isinstance(value, list):
            for item in value:
                walk(item, schema.get("items", {}))
        if isinstance(value, dict):
            extra = schema.get("additionalProperties")
            for key, item in value.items():
                seen.add((name, key))
                walk(item, schema.get("properties", {}).get(key, extra if isinstance(extra, dict) else {}))

    answers: set[str] = set()
    for method, path, body in CALLS:
        content = document["paths"][template(path)][method.lower()]["responses"]["200"]["content"]
        if body is not None and body.get("stream"):
            for chunk in told(server, path, body):
                walk(chunk, content["text/event-stream"]["schema"])
        elif "application/json" in content:
            walk(request(server, method, path, body).json(), content["application/json"]["schema"])
        answers |= {s["schema"]["$ref"].rsplit("/", 1)[1] for s in content.values() if "$ref" in s["schema"]}
    pending, reached = list(answers), set[str]()
    while pending:
        name = pending.pop()
        reached.add(name)
        text = json.dumps(document["components"]["schemas"][name])
        pending += [n for n in document["components"]["schemas"] if f'/{n}"' in text and n not in reached]
    promised = {(n, p) for n in reached for p in document["components"]["schemas"][n].get("properties", {})}
    assert promised - seen == set()


def test_errors_satisfy_their_schema(document: dict[str, Any]) -> None:
    engine = FakeEngine()
    with running(engine, api_key=["k"]) as server:
        keyed = server.client.get("/openapi.json", headers={"authorization": "Bearer k"}).json()
        assert keyed["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
        assert "security" not in keyed["paths"]["/health"]["get"]
        server.call(engine.kill)
        for response in (server.client.get("/v1/models"), server.client.get("/health")):
            path = response.url.path
            described = keyed["paths"][path]["get"]["responses"][str(response.status_code)]
            assert problems(response.json(), described["content"]["application/json"]["schema"], keyed) == []
