"""POST /v1/score over a pretend engine: pairs, shapes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.server.scoring import cosines
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine


def vector(text: str) -> list[float]:
    """What the pretend engine embeds a text as (its tokenizer puts token 256 in front)."""
    return [len(text) + 1.0, 256.0, 0.25, -1.5]


def cosine(a: str, b: str) -> float:
    x, y = torch.tensor([vector(a), vector(b)], dtype=torch.float64)
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("a", "bcd", [("a", "bcd")]),
        ("a" * 50, ["b", "c" * 90], [("a" * 50, "b"), ("a" * 50, "c" * 90)]),
        (["a", "b" * 70], ["c" * 30, "d"], [("a", "c" * 30), ("b" * 70, "d")]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs(server: Running, path: str, left: Any, right: Any, pairs: list[tuple[str, str]]) -> None:
    answer = server.post(path, {"text_1": left, "text_2": right, "request_id": "me"}).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))
    assert [item["score"] for item in answer["data"]] == pytest.approx([cosine(*pair) for pair in pairs])
    texts = [left] if isinstance(left, str) else left
    texts = texts + ([right] if isinstance(right, str) else right)
    assert answer["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in texts)
    assert answer["id"] == "score-me" and answer["object"] == "list"


def test_cosines_are_pytorchs_and_zeros_have_none() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    right[3] = 0
    right[4] = left[4] * 3
    want = torch.nn.functional.cosine_similarity(torch.from_numpy(left), torch.from_numpy(right))
    assert cosines(left, right) == pytest.approx(want.numpy())
    assert cosines(left, right)[3] == 0 and cosines(left, right)[4] <= 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "a", "text_2": ["b"] * 1025}, "text_2"),
        ({"text_1": "a", "text_2": [3]}, "text_2[0]"),
        ({"text_1": "a" * 300, "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -5}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_wrong_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/score", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_cross_encoders_are_refused_by_name() -> None:
    engine = FakeEngine()
    engine.model_config.extra = {"architectures": ["BertForSequenceClassification"]}
    with running(engine) as server:
        error = server.post("/v1/score", {"text_1": "a", "text_2": "b"}).json()["error"]
        assert "BertForSequenceClassification" in error["message"]
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_load_counts_what_runs() -> None:
    with running(FakeEngine(delay=0.2)) as server:
        assert server.client.get("/load").json() == {"server_load": 0}
        ask = {"prompt": "a", "stream": True, "max_tokens": 150}  # half a minute
        with server.client.stream("POST", "/v1/completions", json=ask) as answer:
            lines = answer.iter_lines()  # kept: a generator that is dropped hangs up
            next(lines)
            assert server.client.get("/load").json() == {"server_load": 1}
