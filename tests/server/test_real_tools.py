"""Calls that a grammar enforces, by the official client over real engines: one of them must call, whatever it
would have said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.test_real_engine import CHAT, Octavo, octavo
from tests.test_docs import ROOT, blocks

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city on a day.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
        "strict": True,
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER, TIME],
    "max_tokens": 200,
    "temperature": 0,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def check(name: str, arguments: str) -> None:
    """A call follows its tool's schema."""
    given = json.loads(arguments)
    if name == "get_time":
        assert given == {}
        return
    assert name == "get_weather" and set(given) == {"city", "days", "unit"}
    assert given["unit"] in ("celsius", "fahrenheit") and 0 <= given["days"] <= 9


@pytest.fixture(scope="module")
def server(default_model: Any) -> Iterator[Octavo]:
    args = ["--max-model-len", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with octavo(*args, "--kv-cache-memory-bytes", "64MiB", model=str(default_model)) as server:
        yield server


def client_of(server: Octavo) -> Any:
    http = httpx.Client(trust_env=False, timeout=120)
    return openai.OpenAI(
        base_url=f"{server.client.base_url}/v1", api_key="x", http_client=http, max_retries=0
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_official_client(server: Octavo, choice: Any) -> None:
    client = client_of(server)
    one = {"parallel_tool_calls": False} if choice == "required" else {}
    ask = {"model": "tiny", "tool_choice": choice, **ASK, **one}
    [whole] = client.chat.completions.create(**ask).choices
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    [call] = whole.message.tool_calls
    check(call.function.name, call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "get_weather"
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert [part.delta.role for part in parts[:2]] == ["assistant", None]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    calls = [call for part in parts for call in part.delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert [(c.id is None, c.function.name) for c in calls[1:]] == [(True, None)] * (len(calls) - 1)
    assert calls[0].id and calls[0].function.name == call.function.name
    assert "".join(c.function.arguments or "" for c in calls) == call.function.arguments
    if call.function.name == "get_weather":
        assert len(calls) > 5, "its arguments come as they are made"


def test_official_async_client_and_several_choices(server: Octavo) -> None:
    async def run() -> dict[int, list[tuple[str, str]]]:
        http = httpx.AsyncClient(trust_env=False, timeout=120)
        client = openai.AsyncOpenAI(
            base_url=f"{server.client.base_url}/v1", api_key="x", http_client=http, max_retries=0
        )
        ask = ASK | {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 150}
        found: dict[int, list[list[str]]] = {}
        ends: dict[int, int] = {}
        stream = await client.chat.completions.create(model="tiny", tool_choice=NAMED, stream=True, **ask)
        async for chunk in stream:
            for choice in chunk.choices:
                calls = found.setdefault(choice.index, [])
                ends[choice.index] = ends.get(choice.index, 0) + (choice.finish_reason is not None)
                for call in choice.delta.tool_calls or []:
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments or ""
        await client.close()
        assert ends == {0: 1, 1: 1}
        return {index: [(name, arguments) for name, arguments in calls] for index, calls in found.items()}

    for calls in asyncio.run(run()).values():
        assert len(calls) == 1
        check(*calls[0])


def test_the_conversation_goes_on_with_the_result(server: Octavo) -> None:
    client = client_of(server)
    message = client.chat.completions.create(model="tiny", tool_choice=NAMED, **ASK).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"degrees": 21}'}
    again = ASK | {"messages": [*ASK["messages"], message, result], "max_tokens": 12}
    [choice] = client.chat.completions.create(model="tiny", **again).choices
    assert choice.finish_reason in ("length", "stop") and choice.message.content


def test_the_example_of_the_page_runs(server: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    [example] = [block.body for block in blocks(ROOT / "docs" / "tools.md") if block.language == "python"]
    assert "http://localhost:8000" in example and "test_real_tools.py" in page
    for name in ("ALL_PROXY", "HTTP_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    exec(example.replace("http://localhost:8000", str(server.client.base_url).rstrip("/")), {})


def test_arguments_that_max_tokens_cuts(server: Octavo) -> None:
    ask = ASK | {"tool_choice": NAMED, "max_tokens": 24}
    choice = server.post(CHAT, model="tiny", **ask).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


def test_a_form_beside_tools(server: Octavo) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}},
    }
    for seed in range(3):
        ask = ASK | {"response_format": form, "temperature": 1.5, "seed": seed, "parallel_tool_calls": False}
        message = server.post(CHAT, model="tiny", **ask).json()["choices"][0]["message"]
        if message.get("tool_calls"):
            check(*(message["tool_calls"][0]["function"][name] for name in ("name", "arguments")))
        else:
            assert json.loads(message["content"])["n"] in (1, 2)


def test_a_schema_that_no_grammar_follows_is_a_400(server: Octavo) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict, status in ((True, 400), (False, 200)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        ask = ASK | {"tools": [tool], "tool_choice": "required", "max_tokens": 3}
        response = server.post(CHAT, model="tiny", **ask)
        assert response.status_code == status, response.text
        if strict:
            assert "uniqueItems" in response.json()["error"]["message"]


def test_without_a_parser_calls_are_a_list() -> None:
    settings = ["--kv-cache-memory-bytes", "8MiB", "--reasoning-parser", "qwen3"]
    with octavo(*settings) as server:
        template = {"enable_thinking": False}
        for seed in range(3):
            ask = ASK | {"temperature": 1.0, "seed": seed, "max_tokens": 150, "parallel_tool_calls": False}
            ask |= {"tool_choice": "required", "chat_template_kwargs": template}
            choice = server.post(CHAT, model="tiny", **ask).json()["choices"][0]
            for call in choice["message"].get("tool_calls", []):
                if choice["finish_reason"] == "tool_calls":
                    check(call["function"]["name"], call["function"]["arguments"])
        form = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1.0, "max_tokens": 200}
        for seed in range(4):  # a random model that begins to think seldom ends
            ask = {"messages": ASK["messages"], "seed": seed, **form}
            choice = server.post(CHAT, model="tiny", **ask).json()["choices"][0]
            if choice["finish_reason"] == "stop":
                assert choice["message"]["content"] in ("yes", "no")
            else:
                assert choice["message"]["content"] is None and choice["message"]["reasoning"]
