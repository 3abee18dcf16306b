"""Chat answers, whole and streamed, by the official client and by the bytes on the wire."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from octavo.sampling_params import RequestOutputKind
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

ASK = {"model": "some/model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
TEXT = "héllo 🙂 world. "
ANSWER = (TEXT.encode() * 3)[:30].decode()


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, which must end with [DONE]."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_official_client_whole_and_streamed(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 30
    stream = client.chat.completions.create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    assert [m.id for m in client.models.list()] == ["some/model"]
    assert client.models.retrieve("some/model").id == "some/model"


def test_prompt_is_the_rendered_template(server: Running) -> None:
    server.post("/v1/chat/completions", ASK)
    prompt, params, _ = server.engine.seen[-1]
    assert bytes(prompt).decode() == "user:hi\nassistant:"
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "so"}]
    server.post("/v1/chat/completions", ASK | {"messages": conversation, "continue_final_message": True})
    assert bytes(server.engine.seen[-1][0]).decode() == "user:a\nb\nassistant:so"


def test_shape_of_the_stream(server: Running) -> None:
    chunks = events(server, "/v1/chat/completions", ASK | {"n": 3, "stream_options": {"include_usage": True}})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 90
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    by_index: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            by_index.setdefault(choice["index"], []).append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for choices in by_index.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER


def test_line_ends_of_unicode_cut_no_event() -> None:
    """A client that splits the decoded text into lines, as httpx does, sees whole events."""
    text = "a\x85b\u2028c\u2029d\x1ce"
    with running(FakeEngine(text=text)) as server:
        body = ASK | {"stream": True, "max_tokens": len(text.encode())}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_stream_without_usage_does_not_mention_it(server: Running) -> None:
    assert all("usage" not in chunk for chunk in events(server, "/v1/chat/completions", ASK))


def test_usage_is_told_unasked_where_the_settings_say_so() -> None:
    with running(enable_force_include_usage=True) as server:
        for path, body in (("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "a"})):
            chunks = events(server, path, body | {"max_tokens": 3})
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
        each = ASK | {"max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
        usages = [chunk["usage"] for chunk in events(server, "/v1/chat/completions", each)]
        assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3, 3]


def test_tokens_are_named_by_id_where_the_settings_say_so() -> None:
    ask = ASK | {"max_tokens": 1, "logprobs": True}
    with running(return_tokens_as_token_ids=True) as server:
        names = []
        for more in ({}, {"return_tokens_as_token_ids": False}):
            choice = server.post("/v1/chat/completions", ask | more).json()["choices"][0]
            names.append(choice["logprobs"]["content"][0]["token"])
        assert names == ["token_id:104", "h"]


def test_continuous_usage_grows(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, "/v1/chat/completions", ASK | {"max_tokens": 5, "stream_options": options})
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 3, 4, 5, 5]


def test_cached_tokens_present_and_zero_at_first() -> None:
    with running() as server:
        ask = ASK | {"messages": [{"role": "user", "content": "x" * 40}]}
        usages = [server.post("/v1/chat/completions", ask).json()["usage"] for _ in range(2)]
        assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert usages[1]["prompt_tokens_details"] == {"cached_tokens": 48}
        assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"] + usages[0]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprob_bytes_add_up_to_the_text(server: Running, stream: bool) -> None:
    ask = ASK | {"logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = events(server, "/v1/chat/completions", ask)
        entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        entries = server.post("/v1/chat/completions", ask).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 30
    assert bytes(b for e in entries for b in e["bytes"]).decode() == ANSWER
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] == -1.5 for e in entries)
    assert all(e["top_logprobs"][0]["logprob"] == -0.5 for e in entries)


def test_return_token_ids_and_prompt_logprobs(server: Running) -> None:
    ask = ASK | {"return_token_ids": True, "prompt_logprobs": 0, "max_tokens": 3}
    answer = server.post("/v1/chat/completions", ask).json()
    assert answer["prompt_token_ids"] == list(b"user:hi\nassistant:")
    assert answer["choices"][0]["token_ids"] == list(TEXT.encode()[:3])
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(
        answer["prompt_token_ids"]
    )
    chunks = events(server, "/v1/chat/completions", ASK | {"return_token_ids": True, "max_tokens": 3})
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == list(TEXT.encode()[:3])


def test_generation_config_fills_what_the_request_leaves_out() -> None:
    engine = FakeEngine()
    engine.defaults = {"temperature": 0.2, "top_k": 9, "top_p": 0.8}
    with running(engine) as server:
        server.post("/v1/chat/completions", ASK | {"top_p": 0.5, "seed": 7, "logit_bias": {"5": 2}})
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.2, 9, 0.5, 7)
    assert params.logit_bias == {5: 2.0}


def test_no_answer_is_longer_than_the_generation_config_lets_it() -> None:
    engine = FakeEngine()
    engine.defaults = {"max_tokens": 6}
    with running(engine) as server:
        for asked, length in ((30, 6), (4, 4), (None, 6)):
            answer = server.post("/v1/chat/completions", ASK | {"max_tokens": asked}).json()
            assert answer["usage"]["completion_tokens"] == length
            text = server.post("/v1/completions", {"prompt": "a", "max_tokens": asked}).json()
            assert text["usage"]["completion_tokens"] == length
        plain = server.post("/v1/completions", {"prompt": "a"}).json()  # 16 by itself
        assert plain["usage"]["completion_tokens"] == 6


def test_max_completion_tokens_wins(server: Running) -> None:
    server.post("/v1/chat/completions", ASK | {"max_completion_tokens": 4})
    assert server.engine.seen[-1][1].max_tokens == 4


def test_extra_fields_reach_the_engine(server: Running) -> None:
    answer = server.post(
        "/v1/chat/completions", ASK | {"cache_salt": "s", "priority": -3, "request_id": "me"}
    ).json()
    assert answer["id"] == "chatcmpl-me"
    assert server.engine.seen[-1][2] == {"id": "chatcmpl-me", "priority": -3, "cache_salt": "s"}
    assert (
        server.post("/v1/chat/completions", ASK, headers={"x-request-id": "you"}).json()["id"]
        == "chatcmpl-you"
    )


def test_request_template_needs_trust(server: Running) -> None:
    ask = ASK | {"chat_template": "{{ word }}!", "chat_template_kwargs": {"word": "w"}}
    refused = server.post("/v1/chat/completions", ask)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    with running(trust_request_chat_template=True) as trusting:
        assert trusting.post("/v1/chat/completions", ask).status_code == 200
        assert bytes(trusting.engine.seen[-1][0]) == b"w!"
        bad = trusting.post("/v1/chat/completions", ask | {"chat_template": "{{ raise_exception('no') }}"})
        assert bad.status_code == 400 and "no" in bad.json()["error"]["message"]
