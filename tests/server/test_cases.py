"""Faults that users of other servers met, over real engines.

Counts that don't add up are in `test_metrics_traffic.py`, hang-ups in `test_aborts.py`, a killed engine in
`test_engine_restart.py`, bad input in `test_real_engine.py` and `test_bad_bodies.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import tiny
from tests.server.test_engine_restart import engine_of
from tests.server.test_real_engine import CHAT, MESSAGES, TEXTS, Octavo, octavo, settled

LIMIT = 20.0  # seconds for a refusal, on a machine with other work


@pytest.fixture(scope="module")
def server() -> Iterator[Octavo]:
    args = ["--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "16", "--restart-engine"]
    with octavo(*args, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


def function(name: str, parameters: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


CITY = {
    "type": "object",
    "properties": {"é🙂": {"enum": ["👨\u200d👩\u200d👧 漢字 🇫🇷"]}},
    "required": ["é🙂"],
    "additionalProperties": False,
}
ASKS: dict[str, dict[str, Any]] = {
    "text": {},
    "form": {"structured_outputs": {"choice": ["👨\u200d👩\u200d👧 漢字", "é"]}},
    "tools": {
        "tools": [function("f", CITY), function("g", {"type": "object", "properties": {}})],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("continuous", [False, True])
def test_shape_of_the_stream(server: Octavo, kind: str, continuous: bool) -> None:
    """Roles first, one finish for each of three choices, calls that keep index and id, usage last; and the
    sum of it is the whole answer."""
    ask = ASKS[kind] | {"messages": MESSAGES, "n": 3, "max_tokens": 100, "temperature": 0.8, "seed": 4}
    ask |= {"logprobs": True}
    whole = server.post(CHAT, **ask).json()
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = server.stream(CHAT, **ask, stream_options=options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all((chunk["usage"] is not None) == continuous for chunk in chunks)
    told: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
            told[choice["index"]].append(choice)
    assert sorted(told) == [0, 1, 2]
    for choice in whole["choices"]:
        parts = told[choice["index"]]
        assert [("role" in part["delta"]) for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        text = "".join(part["delta"].get("content") or "" for part in parts)
        assert text == (choice["message"]["content"] or "")
        entries = [e["token"] for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
        assert entries == [entry["token"] for entry in choice["logprobs"]["content"]]
        calls: list[dict[str, str]] = []
        for delta in (call for part in parts for call in part["delta"].get("tool_calls", ())):
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
            else:
                assert delta["index"] == len(calls) - 1 and "id" not in delta
            piece = delta["function"].get("arguments", "")
            assert "\ufffd" not in piece
            calls[-1]["arguments"] += piece
        made = [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert [{k: call[k] for k in ("name", "arguments")} for call in calls] == made
        assert len({call["id"] for call in calls}) == len(calls)
        assert bool(made) == (kind == "tools")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMAS: dict[str, Any] = {
    "wrong type name": {"type": "strnig"},
    "reference to itself": {"$ref": "#"},
    "references in a ring": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "reference to nothing": {"$ref": "#/$defs/none"},
    "reference elsewhere": {"$ref": "http://127.0.0.1:9/x.json"},
    "broken pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}},
    "depth": nested(100),
    "explosion": {"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(10)]}
        for i in range(10)
    ]},
    "no value": {"type": "object", "properties": {"a": False}, "required": ["a"]},
}  # fmt: skip
BAD_FORMS: list[dict[str, Any]] = [
    {"regex": "(a"}, {"regex": "(?=a)b"}, {"regex": r"(a)\1"}, {"grammar": "start: ("},
    {"grammar": "start: start"}, {"grammar": "start: foo"}, {"grammar": "root ::= root"}, {"choice": []},
    {"choice": ["x"] * 20_000}, {"json": "true"}, {"json": "{"},
    {"structural_tag": {"structures": [], "triggers": []}},
]  # fmt: skip
HARD_FORMS: list[dict[str, Any]] = [
    {"regex": "((a{1,1000}){1,1000}){1,1000}"}, {"regex": "(.*a){30}.{500}"}, {"regex": "[ab]*a[ab]{60}"},
    {"json": {"type": "string", "pattern": "^(a+)+$"}}, {"json": {"enum": [f"v{i}" for i in range(20_000)]}},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
]  # fmt: skip


def hostile() -> Iterator[tuple[str, dict[str, Any], set[int], str]]:
    """Path, body, statuses that are right, and how the field at fault is called."""
    for form in BAD_FORMS:
        yield TEXTS, {"prompt": "a", "structured_outputs": form}, {400}, "structured_outputs"
    for form in HARD_FORMS:
        yield TEXTS, {"prompt": "a", "structured_outputs": form}, {200, 400}, "structured_outputs"
    for schema in SCHEMAS.values():
        yield TEXTS, {"prompt": "a", "guided_json": schema}, {400}, "guided_json"
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield CHAT, {"messages": MESSAGES, "response_format": asked}, {400}, "response_format"
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        yield "/v1/responses", {"input": "a", "text": text}, {400}, "text.format"
        for choice in ("required", "auto"):
            tools = {"tools": [function("f", schema)], "tool_choice": choice}
            yield CHAT, {"messages": MESSAGES, **tools}, {400}, "tools"


def test_hostile_schemas_are_refused_soon_and_by_name(server: Octavo) -> None:
    want = server.text(max_tokens=150, ignore_eos=True)["text"]
    over = threading.Event()

    def victim() -> list[str]:
        seen = []
        while not over.is_set() or not seen:
            chunks = server.stream(max_tokens=150, ignore_eos=True)
            seen.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        return seen

    with ThreadPoolExecutor(1) as pool:
        victims = pool.submit(victim)
        try:
            for path, body, right, name in hostile():
                begun = time.monotonic()
                limit = {"max_output_tokens": 3} if path == "/v1/responses" else {"max_tokens": 3}
                answer = server.post(path, **body, **limit)
                assert time.monotonic() - begun < LIMIT
                assert answer.status_code in right, (body, answer.text)
                if answer.status_code == 400:
                    error = answer.json()["error"]
                    assert error["param"].startswith(name), error
                    assert name in error["message"] and "\n" not in error["message"], error
        finally:
            over.set()
        assert set(victims.result()) == {want}
    settled(server)


def test_a_limit_of_logprobs_is_told_by_the_field_s_name(server: Octavo) -> None:
    for top in (21, 10**20):
        error = server.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=top).json()["error"]
        assert error["param"] == "top_logprobs" and error["message"].startswith(f"top_logprobs={top} ")
        error = server.post(TEXTS, prompt="a", logprobs=top).json()["error"]
        assert error["param"] == "logprobs" and error["message"].startswith(f"logprobs={top} ")


def test_the_page_and_the_metrics_of_an_engine_that_was_started_again(server: Octavo) -> None:
    before = engine_of(server)
    os.kill(before, signal.SIGKILL)
    until = time.monotonic() + 100
    while time.monotonic() < until:
        with contextlib.suppress(ValueError):  # none, or two, while it starts
            if server.client.get("/ready").status_code == 200 and engine_of(server) != before:
                break
        time.sleep(0.1)
    assert server.text(return_token_ids=True, ignore_eos=True)["token_ids"] == tiny.greedy("llama", 0)[:48]
    for _ in range(2):
        state = server.client.get("/server_state.json")
        assert state.status_code == 200, state.text
        assert state.json()["metrics"]["engine_up"] == 1
    assert settled(server)["octavo:engine_up"] == 1
