"""vLLM's extra fields over a pretend engine: each reaches the engine under its name, on both APIs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_chat import events

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
PLAIN: dict[str, Any] = {
    "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5, 6], "include_stop_str_in_output": True,
    "prompt_logprobs": 2, "allowed_token_ids": [97, 98], "bad_words": ["no", "never"],
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "seed": 11, "stop": ["x", "y"],
    "temperature": 0.3, "top_p": 0.6, "n": 2,
}  # fmt: skip


@pytest.mark.parametrize(("path", "base"), [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("name", PLAIN)
def test_sampling_fields_reach_the_engine(server: Running, name: str, path: str, base: dict) -> None:
    body = base | {"max_tokens": 8, name: PLAIN[name]}
    assert server.post(path, body).status_code == 200
    params = server.engine.seen[-1][1]
    assert getattr(params, name) == PLAIN[name]
    assert server.post(path, base | {"max_tokens": 8}).status_code == 200
    assert getattr(server.engine.seen[-1][1], name) != PLAIN[name]


@pytest.mark.parametrize(("path", "base"), [CHAT, TEXT], ids=["chat", "text"])
def test_logit_bias_salt_priority_and_id(server: Running, path: str, base: dict) -> None:
    more = {"logit_bias": {"97": -3}, "cache_salt": "s", "priority": 4, "request_id": "me", "max_tokens": 2}
    assert server.post(path, base | more).json()["id"].endswith("-me")
    _, params, rest = server.engine.seen[-1]
    assert params.logit_bias == {97: -3.0}
    assert (rest["cache_salt"], rest["priority"], rest["id"].rpartition("-")[2]) == ("s", 4, "me")


@pytest.mark.parametrize("field", [False, True], ids=["header", "field"])
def test_ids_that_come_several_times_at_once(field: bool) -> None:
    """A gateway sends one X-Request-Id with all that belongs together; `request_id` names one request."""
    with running(FakeEngine(delay=0.5)) as server, ThreadPoolExecutor(6) as pool:

        def ask(path: str, body: dict[str, Any]) -> Any:
            own = {"request_id": "me"} if field else {}
            return server.post(path, body | own, headers={} if field else {"x-request-id": "me"})

        asked = [
            *([("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})] * 2),
            *([("/v1/chat/completions", CHAT[1] | {"max_tokens": 2})] * 2),
            *([("/v1/embeddings", {"input": "a"})] * 2),
        ]
        answers = list(pool.map(lambda pair: ask(*pair), asked))
        good = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        refused = [answer.json()["error"]["param"] for answer in answers if answer.status_code == 400]
        assert sorted(set(good)) == ["chatcmpl-me", "cmpl-me", "embd-me"]
        assert refused == (["request_id"] * 3 if field else []) and len(good) + len(refused) == 6
        assert not server.service.live
        again = [ask(*pair).status_code for pair in asked[::2]]
        assert again == [200] * 3


def test_the_official_client_sends_them_in_extra_body(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    names = ("top_k", "min_p", "repetition_penalty", "min_tokens", "allowed_token_ids", "bad_words")
    client.completions.create(
        model="some/model", prompt="hi", max_tokens=8, extra_body={name: PLAIN[name] for name in names}
    )
    assert {name: getattr(server.engine.seen[-1][1], name) for name in names} == {n: PLAIN[n] for n in names}


@pytest.mark.parametrize("most", [1, 4, 500])
def test_truncated_prompts_keep_their_end(server: Running, most: int) -> None:
    ask = {"max_tokens": 2, "truncate_prompt_tokens": most, "return_token_ids": True}
    answer = server.post("/v1/completions", {"prompt": ["abcdefgh", "ij"], "echo": True} | ask).json()
    whole = [[256, *b"abcdefgh"], [256, *b"ij"]]
    for choice, tokens in zip(answer["choices"], whole, strict=True):
        assert choice["prompt_token_ids"] == tokens[-most:]
        assert choice["text"].startswith(bytes(t for t in tokens[-most:] if t < 256).decode())
    assert answer["usage"]["prompt_tokens"] == sum(len(t[-most:]) for t in whole)
    body = {"messages": [{"role": "user", "content": "abc"}]}
    assert server.post("/v1/chat/completions", body | ask).status_code == 200
    assert server.engine.seen[-1][0] == list(b"user:abc\nassistant:")[-most:]


def test_minus_one_leaves_room_for_the_answer(server: Running) -> None:
    context = server.engine.max_model_len
    body = {"prompt": [97] * (context + 50), "truncate_prompt_tokens": -1}
    for max_tokens, kept in ((30, context - 30), (None, context - 1)):
        answer = server.post("/v1/completions", body | {"max_tokens": max_tokens})
        assert answer.json()["usage"]["prompt_tokens"] == kept
    assert server.post("/v1/completions", body | {"truncate_prompt_tokens": None}).status_code == 400


def test_documents_reach_the_template() -> None:
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}"
    with running(trust_request_chat_template=True) as server:
        body = CHAT[1] | {"documents": [{"text": "a"}, {"text": "b"}], "chat_template": template}
        assert server.post(CHAT[0], body).status_code == 200
        assert bytes(server.engine.seen[-1][0]) == b"[a][b]"


def test_echo_of_a_chat_begins_with_the_assistants_last_message(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]
    ask = {"messages": messages, "continue_final_message": True, "max_tokens": 6, "n": 2}
    plain = server.post(CHAT[0], ask).json()["choices"]
    echoed = server.post(CHAT[0], ask | {"echo": True}).json()["choices"]
    assert [c["message"]["content"] for c in echoed] == ["so " + c["message"]["content"] for c in plain]
    told = ["", ""]
    for chunk in events(server, CHAT[0], ask | {"echo": True}):
        for choice in chunk["choices"]:
            told[choice["index"]] += choice["delta"].get("content") or ""
    assert told == [c["message"]["content"] for c in echoed]
    user = server.post(CHAT[0], CHAT[1] | {"echo": True, "max_tokens": 6}).json()["choices"][0]
    assert user["message"]["content"] == plain[0]["message"]["content"]


def test_generation_prompt_can_be_left_out(server: Running) -> None:
    assert server.post(CHAT[0], CHAT[1] | {"add_generation_prompt": False}).status_code == 200
    assert bytes(server.engine.seen[-1][0]) == b"user:hi"
