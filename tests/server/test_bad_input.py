"""Bad input: 4xx in OpenAI's error shape, and the streams of others go on unchanged."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.server.parsing import MOST_TOLD
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_chat import TEXT, events

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "NaN"}, "temperature"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 10**9}, "n"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "stop": "x" * 2**20}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 1000}, "stop"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "stop_token_ids": [2**40], "min_tokens": 3}, "stop_token_ids"),
    ({"prompt": "a", "seed": 2**70}, "seed"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "a", "best_of": 0}, "best_of"),
    ({"prompt": "a", "best_of": 1000}, "best_of"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "a", "length_penalty": 0.5}, "length_penalty"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"prompt": "a", "response_format": {"type": "structural_tag"}, "guided_regex": "a"}, "guided_regex"),
    ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"prompt": "a", "guided_choice": []}, "guided_choice"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a@b"}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a\\b"}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a\0b"}, "cache_salt"),
    ({"prompt": "a", "request_id": "a b"}, "request_id"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": ["a"] * 64, "n": 128, "max_tokens": 150, "logprobs": 5}, "logprobs"),
    ({"prompt": [[97] * 198] * 1024, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"prompt": ["a"] * 500, "max_tokens": 150, "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "n": 128, "allowed_token_ids": [97] * 200_000}, "n"),
    ({"prompt": ["a"] * 64, "n": 128, "stop_token_ids": [97] * 3000}, "n"),
    ({"prompt": ["a"] * 64, "n": 128, "logit_bias": {str(i): 1 for i in range(1100)}}, "n"),
    ({"prompt": ["a"] * 64, "n": 128, "structured_outputs": {"regex": "a" * 20_000}}, "n"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": MESSAGES, "n": 128, "logprobs": True, "top_logprobs": 250}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (
        {"messages": MESSAGES, "chat_template_kwargs": {"a": json.loads("[" * 90 + "]" * 90)}},
        "chat_template_kwargs",
    ),
    (
        {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
]


BAD_CHATS_TOLD = [
    (
        {"response_format": {"type": "json"}},
        "response_format.type: 'json' is not known: choose text, json_object, json_schema, structural_tag",
    ),
    ({"messages": [{"role": "user", "text": "hi"}]}, "messages[0].content is missing"),
    ({"messages": [*MESSAGES, {"role": "user", "content": None}]}, "messages[1].content is missing"),
]


def check_error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(FakeEngine(delay=0.005), max_request_bytes=2 * 2**20) as server:
        yield server


@pytest.fixture(scope="module")
def victim(slow: Running) -> Iterator[None]:
    """A stream that runs while the bad requests come: it must be whole at the end."""
    stop, seen = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            chunks = events(slow, TEXTS, {"prompt": "v", "max_tokens": 60})
            seen.append("".join(chunk["choices"][0]["text"] for chunk in chunks))

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stop.set()
    thread.join(10)
    assert seen and set(seen) == {(TEXT.encode() * 9)[:60].decode()}


@pytest.mark.parametrize(("fields", "told"), BAD_CHATS_TOLD)
def test_what_a_chat_asks_wrong_is_told_with_the_remedy(
    slow: Running, fields: dict[str, Any], told: str
) -> None:
    assert check_error(slow.post(CHAT, {"messages": MESSAGES} | fields))["message"] == told


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(("body", "param"), BAD_TEXTS)
def test_completions(slow: Running, body: dict[str, Any], param: str) -> None:
    assert check_error(slow.post(TEXTS, body))["param"] == param


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_chats(slow: Running, body: dict[str, Any], param: str) -> None:
    assert check_error(slow.post(CHAT, body))["param"] == param
    assert check_error(slow.post(CHAT, body | {"stream": True}))["param"] == param


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "\udc00 and more"}',
        rb'{"prompt": "a", "stop": "\ud800x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    ],
    ids=range(13),
)
def test_malformed_json(slow: Running, raw: bytes) -> None:
    check_error(slow.client.post(TEXTS, content=raw, headers=JSON))


def test_body_limit(slow: Running) -> None:
    big = b'{"prompt": "' + b"x" * (3 * 2**20) + b'"}'
    assert check_error(slow.client.post(TEXTS, content=big, headers=JSON), 413)["code"] == "request_too_large"
    chunked = (big[i : i + 65536] for i in range(0, len(big), 65536))
    check_error(slow.client.post(TEXTS, content=chunked, headers=JSON), 413)


def test_request_id_in_use(slow: Running) -> None:
    body = {"prompt": "a", "max_tokens": 40, "request_id": "twice"}
    with slow.client.stream("POST", TEXTS, json=body | {"stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        assert check_error(slow.post(TEXTS, body))["param"] == "request_id"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert slow.post(TEXTS, body | {"max_tokens": 1}).status_code == 200


def test_unknown_model_and_paths(server: Running) -> None:
    assert (
        check_error(server.post(TEXTS, {"prompt": "a", "model": "gpt-9"}), 404)["code"] == "model_not_found"
    )
    check_error(server.client.get("/v1/models/gpt-9"), 404)
    check_error(server.client.get("/v1/nothing"), 404)
    check_error(server.client.get(TEXTS), 405)


def test_fields_that_ask_for_nothing_pass(server: Running) -> None:
    harmless = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": 1, "user": "u",
        "modalities": ["text"], "store": False, "parallel_tool_calls": True, "n": 1, "temperature": None,
    }  # fmt: skip
    assert server.post(CHAT, {"messages": MESSAGES} | harmless).status_code == 200


def test_log_probabilities_that_nobody_asks_for_are_no_mistake(server: Running) -> None:
    for given in ({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}, {"model": ""}):
        answer = server.post(CHAT, {"messages": MESSAGES} | given)
        assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None
        assert answer.json()["model"] == "some/model"


def test_unknown_field_warns_with_the_nearest(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert server.post(CHAT, {"messages": MESSAGES, "temprature": 1}).status_code == 200
    assert "'temprature' (did the client mean temperature?)" in caplog.text


def test_a_body_of_nothing_but_unknown_fields_costs_little(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"made_up_{i}": 0 for i in range(200_000)}
    with caplog.at_level(logging.WARNING):
        begin = time.process_time()  # the server's is a thread of this process
        for inner in ({}, {"stream": True, "stream_options": names}):
            answer = server.post(TEXTS, {"prompt": "a", "max_tokens": 1} | ({} if inner else names) | inner)
            assert answer.status_code == 200
        assert time.process_time() - begin < 5  # comparing each name with ours took a minute
    assert len([line for line in caplog.messages if "unknown request field" in line]) <= 2 * MOST_TOLD
    refused = server.post(TEXTS, {"prompt": "a", **names, "use_beam_search": True})
    assert check_error(refused)["param"] == "use_beam_search"


def test_unknown_fields_of_objects_are_told_too(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    typo = {"stream": True, "stream_options": {"include_usege": True}}
    with caplog.at_level(logging.WARNING):
        assert server.post(TEXTS, {"prompt": "a", "max_tokens": 1} | typo).status_code == 200
    assert "'stream_options.include_usege' (did the client mean include_usage?)" in caplog.text
    with running(strict_fields=True) as strict:
        error = check_error(strict.post(CHAT, {"messages": MESSAGES} | typo))
        assert (error["param"], error["code"]) == ("stream_options.include_usege", "unknown_parameter")
        error = check_error(strict.post("/v1/responses", {"input": "a", "reasoning": {"efort": "low"}}))
        assert error["param"] == "reasoning.efort" and "did the client mean effort?" in error["message"]
        known = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
        known |= {"response_format": {"type": "text"}, "tool_choice": "none"}
        assert strict.post(CHAT, {"messages": MESSAGES} | known).status_code == 200
        wrong = check_error(strict.post(CHAT, {"messages": MESSAGES, "response_format": []}))
        assert wrong["param"] == "response_format"


def test_strict_fields_refuses_unknown_ones_and_no_others() -> None:
    with running(strict_fields=True) as server:
        for path, body in ((CHAT, {"messages": MESSAGES}), (TEXTS, {"prompt": "a"})):
            error = check_error(server.post(path, body | {"temprature": 1}))
            assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
            assert "did the client mean temperature?" in error["message"]
            assert server.post(path, body | {"temperature": 1, "best_of": 1, "user": "u"}).status_code == 200
        openai_fields = {
            "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low",
            "reasoning_effort": "low", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False,
        }  # fmt: skip
        assert server.post(CHAT, {"messages": MESSAGES} | openai_fields).status_code == 200


def test_surprises_are_not_shown() -> None:
    engine = FakeEngine()
    engine._check = lambda *args: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with running(engine) as server:
        error = check_error(server.post(TEXTS, {"prompt": "a"}), 500)
        assert "division" not in error["message"] and error["type"] == "server_error"
