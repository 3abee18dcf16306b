"""POST /v1/embeddings over a pretend engine, and by the official client."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine


def vectors(server: Running, **body) -> list[list[float]]:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def test_texts_and_token_ids_in_every_form(server: Running) -> None:
    # The pretend tokenizer puts its token 256 before a text.
    assert vectors(server, input="ab") == [[3.0, 256.0, 0.25, -1.5]]
    assert vectors(server, input=["ab", "c"]) == [[3.0, 256.0, 0.25, -1.5], [2.0, 256.0, 0.25, -1.5]]
    assert vectors(server, input=[97, 98]) == vectors(server, input=[[97, 98]]) == [[2.0, 97.0, 0.25, -1.5]]
    assert vectors(server, input=[97, 98], dimensions=2) == [[2.0, 97.0]]


def test_base64_is_little_endian_float32(server: Running) -> None:
    (text,) = vectors(server, input=[97, 98], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [2.0, 97.0, 0.25, -1.5]


def test_the_official_client(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="some/model", input=["ab", "c"])  # asks for base64 itself
    assert [item.embedding for item in answer.data] == [[3.0, 256.0, 0.25, -1.5], [2.0, 256.0, 0.25, -1.5]]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5
    assert answer.object == "list" and answer.data[0].object == "embedding"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": [[97], []]}, "input"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "cache_salt": "a/b"}, "cache_salt"),
    ],
)
def test_what_is_wrong_is_named(server: Running, body: dict, param: str) -> None:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_salts_reach_the_engine(server: Running) -> None:
    vectors(server, input=["a", "b"], cache_salt="s")
    assert server.engine.salts[-2:] == ["s", "s"]
    answer = server.post("/v1/score", {"text_1": "a", "text_2": "b", "cache_salt": "t"})
    assert answer.status_code == 200 and server.engine.salts[-2:] == ["t", "t"]
    vectors(server, input=[97, 98])
    assert server.engine.salts[-1] is None


def test_unknown_model_and_key() -> None:
    with running(FakeEngine(), api_key=["secret"]) as server:
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        answer = server.post("/v1/embeddings", {"input": "a", "model": "other"}, headers=headers)
        assert answer.status_code == 404
