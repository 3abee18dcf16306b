"""Tools and reasoning over the chat API: whole answers and streams, by the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_chat import events

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
ASK: dict[str, Any] = {
    "model": "some/model",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [WEATHER, TIME],
}
NAMES = ["get_weather", "get_time"]
CITY = '{"city": "Malmö 🙂"}'
TEXT = (
    "I look.\n<tool_call>\n"
    f'{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
AUTO: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def server_of(text: str, **settings: Any) -> Any:
    engine = FakeEngine(text)
    engine.ends = True
    engine.max_model_len = 4000
    return running(engine, **settings)


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The messages that a stream adds up to, by index, as a whole answer has them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            into = found.setdefault(choice["index"], {"content": "", "tool_calls": [], "finish_reason": None})
            assert into["finish_reason"] is None, "something after the end"
            into["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            into["content"] += delta.get("content", "")
            for name in ("reasoning", "reasoning_content"):
                if name in delta:
                    into[name] = into.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(into["tool_calls"]) and call["type"] == "function"
                    into["tool_calls"].append(call["function"] | {"id": call["id"]})
                else:
                    assert "name" not in call["function"] and "type" not in call
                    into["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return found


def test_calls_whole_and_streamed() -> None:
    with server_of(TEXT, **AUTO) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        [choice] = client.chat.completions.create(**ASK).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls or []
        assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
            ("function", "get_weather", CITY),
            ("function", "get_time", "{}"),
        ]
        assert len({c.id for c in calls}) == 2
        chunks = events(server, CHAT, ASK | {"n": 2, "stream_options": {"include_usage": True}})
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2 * len(
            TEXT.encode()
        )
        assert all("finish_reason" in choice for chunk in chunks for choice in chunk["choices"])
        told = joined(chunks)
        assert sorted(told) == [0, 1]
        for message in told.values():
            assert (message["finish_reason"], message["content"]) == ("tool_calls", "I look.")
            assert [(c["name"], c["arguments"]) for c in message["tool_calls"]] == [
                ("get_weather", CITY),
                ("get_time", "{}"),
            ]
        [only] = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices
        assert [c.function.name for c in only.message.tool_calls or []] == ["get_weather"]


def test_an_answer_without_calls_is_plain() -> None:
    for text in ("Sunny.", '<tool_call>{"name": "get_weather", "arguments": {"city"}</tool_call>'):
        with server_of(text, **AUTO) as server:
            [choice] = server.post(CHAT, ASK).json()["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"] == {"content": text, "role": "assistant", "refusal": None}
            told = joined(events(server, CHAT, ASK))[0]
            assert told == {"content": text, "tool_calls": [], "finish_reason": "stop"}


def test_a_call_cut_by_max_tokens_is_content() -> None:
    with server_of(TEXT, **AUTO) as server:
        for cut in (TEXT.index("Malm"), TEXT.index("get_time")):
            ask = ASK | {"max_tokens": len(TEXT[:cut].encode())}
            [choice] = server.post(CHAT, ask).json()["choices"]
            told = joined(events(server, CHAT, ask))[0]
            calls = choice["message"].get("tool_calls", [])
            assert choice["finish_reason"] == told["finish_reason"] == "length"
            assert choice["message"]["content"] == told["content"]
            assert choice["message"]["content"].endswith(TEXT[:cut][-10:])
            assert [c["function"]["name"] for c in calls] == [c["name"] for c in told["tool_calls"]]


def test_the_template_gets_tools_and_their_results() -> None:
    template = (
        "{{ tools | tojson if tools else '-' }}|{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments.city }})"
        "{% endfor %}{{ m.tool_call_id or '' }}{{ m.reasoning_content or '' }}\n{% endfor %}"
    )
    past = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": CITY}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    with running(trust_request_chat_template=True, **AUTO) as server:
        server.engine.max_model_len = 4000
        server.service.text.max_model_len, server.service.text.max_chars = 4000, 400_000
        ask = ASK | {"messages": past, "chat_template": template, "max_tokens": 1}
        assert server.post(CHAT, ask).status_code == 200
        shown, _, rest = bytes(server.engine.seen[-1][0]).decode().partition("|")
        empty = {"type": "object", "properties": {}}
        assert json.loads(shown) == [
            WEATHER, {"type": "function", "function": {"name": "get_time", "parameters": empty}}
        ]  # fmt: skip
        assert rest == "user:Weather?;\nassistant:None;c1=get_weather(Malmö 🙂)hm\ntool:sun;c1\n"
        body = {key: ask[key] for key in ("messages", "chat_template", "tools")}
        assert server.post("/tokenize", body).json()["tokens"] == server.engine.seen[-1][0]
        assert server.post(CHAT, ask | {"tool_choice": "none"}).status_code == 200
        assert bytes(server.engine.seen[-1][0]).decode().startswith("[")
    with running(
        trust_request_chat_template=True, exclude_tools_when_tool_choice_none=True, **AUTO
    ) as server:
        assert server.post(CHAT, ask | {"tool_choice": "none"}).status_code == 200
        assert bytes(server.engine.seen[-1][0]).decode().startswith("-")


def test_none_shows_the_text_as_it_is() -> None:
    with server_of(TEXT, **AUTO) as server:
        [choice] = server.post(CHAT, ASK | {"tool_choice": "none"}).json()["choices"]
        assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_apart(stream: bool) -> None:
    with server_of("<think>\nHm.\n</think>\n\n" + TEXT, reasoning_parser="qwen3", **AUTO) as server:
        if stream:
            told = joined(events(server, CHAT, ASK))[0]
            names = [call["name"] for call in told["tool_calls"]]
        else:
            told = server.post(CHAT, ASK).json()["choices"][0]["message"]
            names = [call["function"]["name"] for call in told["tool_calls"]]
        assert told["reasoning_content"] == told["reasoning"] == "Hm."
        assert told["content"] == "I look." and names == ["get_weather", "get_time"]
        silent = ASK | {"include_reasoning": False}
        if stream:
            told = joined(events(server, CHAT, silent))[0]
        else:
            told = server.post(CHAT, silent).json()["choices"][0]["message"]
        assert not told.get("reasoning_content") and not told.get("reasoning")
        assert told["content"] == "I look." and len(told["tool_calls"]) == 2


def test_a_prompt_that_opens_or_ends_the_reasoning() -> None:
    with server_of("so</think>Four", reasoning_parser="qwen3", trust_request_chat_template=True) as server:
        for end, want in (
            ("<think>\n", ("so", "Four")),
            ("<think>\n\n</think>\n\n", (None, "so</think>Four")),
        ):
            ask = {"messages": ASK["messages"], "chat_template": "assistant: " + end}
            message = server.post(CHAT, ask).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == want
        ask = {"messages": [{"role": "assistant", "content": "<think>and "}], "continue_final_message": True}
        assert server.post(CHAT, ask).json()["choices"][0]["message"]["reasoning_content"] == "so"


def form_of(server: Running, **fields: Any) -> Any:
    response = server.post(CHAT, ASK | fields)
    assert response.status_code == 200, response.text
    return server.engine.seen[-1][1].structured_outputs


def test_when_a_form_is_asked_of_the_engine() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    form = {"response_format": {"type": "json_object"}}
    with server_of(TEXT, **AUTO) as server:
        assert form_of(server) is None
        assert form_of(server, tool_choice="none", **form).json_object
        assert all(f'name\\": \\"{n}' in form_of(server, tool_choice="required").grammar for n in NAMES)
        for choice in (named, some):
            grammar = form_of(server, tool_choice=choice, **form).grammar
            assert "get_time" in grammar and "get_weather" not in grammar
            assert ("*" in grammar.partition("\n")[0]) == (choice is some)
        assert "FREE" in form_of(server, tools=[strict, TIME]).grammar
        assert "content" in form_of(server, **form).grammar
        bad = server.post(CHAT, ASK | {"structured_outputs": {"grammar": "x"}}).json()["error"]
        assert bad["param"] == "structured_outputs"
        assert bytes(server.engine.seen[-1][0]).decode()
    with server_of("[" + TEXT, enable_auto_tool_choice=False) as server:  # without a parser
        assert form_of(server, tool_choice="required").grammar.startswith('start: "["')


def test_the_form_waits_for_the_end_of_the_reasoning() -> None:
    form = {"tool_choice": "none", "response_format": {"type": "json_object"}}
    for parser, start in (("qwen3", "<think>"), ("deepseek_r1", None)):
        with running(reasoning_parser=parser, trust_request_chat_template=True) as server:
            for template, want in (
                ("user", (start, "</think>")),
                ("a <think>\n", (None, "</think>")),
                ("a <think></think>", (None, None)),
            ):
                asked = form_of(server, **form, chat_template=template, max_tokens=1)
                assert (asked.reasoning_start, asked.reasoning_end) == want and asked.json_object


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "earlier"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type", "custom"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "length"),
    ({"tools": [TIME] * 1025}, "tools", "1024"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "any"}, "tool_choice", "any"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "other"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
        "messages",
        "not JSON",
    ),
]


@pytest.fixture(scope="module")
def auto() -> Any:
    with server_of(TEXT, **AUTO) as server:
        yield server


@pytest.mark.parametrize(("fields", "param", "word"), BAD)
def test_what_is_refused(auto: Running, fields: dict[str, Any], param: str, word: str) -> None:
    response = auto.post(CHAT, ASK | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and "\n" not in error["message"]
    assert error["param"] == param and word in error["message"], error


def test_auto_needs_a_server_that_is_set_so(server: Running) -> None:
    for extra in ({}, {"tool_choice": "auto"}):
        error = server.post(CHAT, ASK | extra).json()["error"]
        assert error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]
    assert server.post(CHAT, ASK | {"tool_choice": "none", "max_tokens": 3}).status_code == 200
