"""Events that are put together are byte for byte those that would be encoded."""

from __future__ import annotations

import json

import httpx
import pytest

from octavo.server.protocol.answers import ChatChunk, ChatChunkChoice, Delta
from octavo.server.streaming import TextEvents, event
from tests.server.conftest import Running

TEXTS = [
    "a",
    'quote " and \\',
    "line\nend\r\t\x00\x1f",
    "é🙂\ufffd",
    "\x85 \u2028 \u2029",
    "</script>",
    "\x7f",
]


def _chunk(text: str) -> ChatChunk:
    choice = ChatChunkChoice(0, Delta(content=text), None, None)
    return ChatChunk('id "x" \u2028', 17, "models/ü", [choice], None)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text(text: str) -> None:
    made = TextEvents(_chunk).event(text)
    assert made == event(_chunk(text))
    data = made.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data)["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("/v1/completions", {"prompt": ["x", "yz"], "n": 2, "echo": True}),
        ("/v1/completions", {"prompt": "x", "echo": True, "max_tokens": 0}),
    ],
)
def test_streams_are_what_they_are_with_more_told(
    server: Running, path: str, body: dict, usage: bool
) -> None:
    """With token ids asked for every chunk is encoded whole; without these fields both streams are equal."""
    body = {"max_tokens": 12, "seed": 1, "stream": True, "request_id": "same"} | body
    if usage:
        body["stream_options"] = {"include_usage": True}

    def chunks(**more: object) -> list[dict]:
        found = []
        response: httpx.Response = server.post(path, body | more)
        assert response.status_code == 200, response.text
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                chunk.pop("created")
                chunk.pop("prompt_token_ids", None)
                for choice in chunk["choices"]:
                    choice.pop("token_ids", None)
                    choice.pop("prompt_token_ids", None)
                found.append(chunk)
        return found

    def by_choice(found: list[dict]) -> dict:
        told: dict = {"ends": [c["usage"] for c in found if not c["choices"]]}
        for chunk in found:
            for choice in chunk["choices"]:
                part = choice.get("text", "") + choice.get("delta", {}).get("content", "")
                if part or choice["finish_reason"]:
                    told.setdefault(choice["index"], []).append(chunk | {"choices": [choice]})
        return told

    plain, whole = by_choice(chunks()), by_choice(chunks(return_token_ids=True))
    assert len(plain) > 1 and all("usage" in c for c in plain[0]) == usage
    # A token that completes no character is told only where ids are: an empty text or content then.
    assert plain == whole
