"""Completions: kinds of prompt, echo, log-probabilities, several choices."""

from __future__ import annotations

import openai
import pytest

from octavo.outputs import CompletionOutput
from octavo.server.completions import best
from tests.server.conftest import Running
from tests.server.test_chat import TEXT, events

PATH = "/v1/completions"


def text_of(tokens: int) -> str:
    return (TEXT.encode() * 9)[:tokens].decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[256, 97, 98]]),
        (["ab", "c"], [[256, 97, 98], [256, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_kinds_of_prompt(server: Running, prompt: object, ids: list[list[int]]) -> None:
    server.engine.seen.clear()
    answer = server.post(PATH, {"prompt": prompt, "max_tokens": 5, "n": 2}).json()
    assert sorted(seen[0] for seen in server.engine.seen) == sorted(ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert {choice["text"] for choice in answer["choices"]} == {text_of(5)}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 10 * len(ids)


@pytest.mark.parametrize("prompt", ["", [], [[]], [[1], []], ["a", 1], [1, "a"], [[1], 2], ["a", [1]]])
def test_bad_prompts(server: Running, prompt: object) -> None:
    response = server.post(PATH, {"prompt": prompt, "add_special_tokens": False})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_official_client(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    ask = {"model": "some/model", "prompt": ["a", "b"], "max_tokens": 12}
    whole = client.completions.create(**ask)
    assert [choice.text for choice in whole.choices] == [text_of(12)] * 2
    parts = ["", ""]
    for chunk in client.completions.create(**ask, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [text_of(12)] * 2


def test_default_is_sixteen_tokens(server: Running) -> None:
    server.post(PATH, {"prompt": "a"})
    assert server.engine.seen[-1][1].max_tokens == 16


def test_stream_shape(server: Running) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 4, "stream_options": {"include_usage": True}}
    chunks = events(server, PATH, body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for index in (0, 1):
        reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: Running, stream: bool) -> None:
    body = {"prompt": "añb", "max_tokens": 8, "echo": True, "logprobs": 1, "add_special_tokens": False}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(server, PATH, body)]
    else:
        choices = [server.post(PATH, body).json()["choices"][0]]
    text = "".join(choice["text"] for choice in choices)
    assert text == "añb" + text_of(8)
    told = {
        name: [x for choice in choices if choice["logprobs"] for x in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert {len(values) for values in told.values()} == {4 + 8}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["tokens"][:4] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b"]
    assert told["text_offset"][:5] == [0, 1, 2, 2, 3]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset] == token


def test_echo_alone(server: Running) -> None:
    answer = server.post(PATH, {"prompt": [104, 105], "max_tokens": 0, "echo": True, "logprobs": 0}).json()
    choice = answer["choices"][0]
    assert choice["text"] == "hi" and choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 0
    refused = server.post(PATH, {"prompt": "a", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_the_chosen_token_is_told_beside_the_likeliest(server: Running) -> None:
    """OpenAI: up to logprobs + 1 elements. The fake's chosen token is never among the likeliest."""
    body = {"prompt": "a", "max_tokens": 3, "return_tokens_as_token_ids": True}
    for top in (0, 1):
        told = server.post(PATH, body | {"logprobs": top}).json()["choices"][0]["logprobs"]
        for name, value, entries in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert len(entries) == top + 1 and entries[name] == value == -1.5


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_special_tokens_that_an_echo_shows(server: Running, stream: bool) -> None:
    body = {"prompt": [256, 97, 98], "max_tokens": 1, "echo": True, "logprobs": 0}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(server, PATH, body)]
    else:
        choices = [server.post(PATH, body).json()["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == "<256>abh"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for part in told for token in part["tokens"]] == ["<256>", "a", "b", "h"]
    assert [offset for part in told for offset in part["text_offset"]] == [0, 5, 6, 7]
    texts = {
        "prompt": "ab",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
    }  # whose echo doesn't show the begin
    told = [server.post(PATH, texts).json()["choices"][0]["logprobs"]]
    assert told[0]["tokens"] == ["<256>", "a", "b", "h"] and told[0]["text_offset"] == [0, 0, 1, 2]


def test_the_best_of_several_choices(server: Running) -> None:
    answer = server.post(PATH, {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "best_of": 5}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 4  # of those that were not chosen, too
    assert server.engine.seen[-1][1].n == 5 and server.engine.seen[-1][1].logprobs == 0
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    same = {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 2}
    assert len(server.post(PATH, same).json()["choices"]) == 2
    assert {chunk["choices"][0]["index"] for chunk in events(server, PATH, same)} == {0, 1}


def test_choices_of_a_request_are_bounded(server: Running) -> None:
    refused = server.post(PATH, {"prompt": ["a"] * 100, "n": 100, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    assert "100 prompts, each with 100 choices: at most 8192" in refused.json()["error"]["message"]


def test_choices_are_ranked_by_their_tokens_mean_log_probability() -> None:
    outputs = [
        CompletionOutput(0, "long", [1] * 4, -4.0),
        CompletionOutput(1, "short", [1], -1.5),
        CompletionOutput(2, "best", [1] * 10, -5.0),
    ]
    assert [(output.index, output.text) for output in best(outputs, 2)] == [(0, "best"), (1, "long")]
    assert best(outputs, 3) == outputs


def test_tokens_named_by_id(server: Running) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    choice = server.post(PATH, body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in TEXT.encode()[:2]]
    assert choice["token_ids"] == list(TEXT.encode()[:2]) and choice["prompt_token_ids"] == [256, 97]


def test_clamped_to_the_context(server: Running) -> None:
    choice = server.post(PATH, {"prompt": [1] * 190, "max_tokens": 5000}).json()
    assert choice["usage"]["completion_tokens"] == 10
    refused = server.post(PATH, {"prompt": [1] * 200})
    assert refused.status_code == 400
    assert "200" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_number_is_too_large_to_ask_for_tokens(server: Running, stream: bool) -> None:
    body = {"prompt": [1] * 190, "max_tokens": 10**400}
    if stream:
        assert events(server, PATH, body)[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert server.post(PATH, body).json()["usage"]["completion_tokens"] == 10


def test_tokenize_and_back(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 200,
        "tokens": [256, 104, 195, 169],
        "token_strs": ["<256>", "h", "\ufffd", "\ufffd"],
    }
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<256>hé"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"user:x\nassistant:"
    for body in ({}, {"prompt": "a", "messages": []}):
        assert server.post("/tokenize", body).status_code == 400
    for token in (-1, 260, 2**40):
        assert server.post("/detokenize", {"tokens": [token]}).status_code == 400
