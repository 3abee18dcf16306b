"""Request bodies of which most are wrong, drawn by seed from the server's own OpenAPI document."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 128, 129, 2**31, -(2**31) - 1, 2**63, -(2**64), 10**30, 10**400, 0.0,
    -0.0, 0.5, 1.5, -1e-300, 1e308, -1e308, "", " ", "a", "auto", "none", "null", "NaN", "-1", "\x00",
    "\ud800",
    "é🙂\u2028", "{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "../../etc/passwd", "%s%n",
    "a" * 5000, [], [[]], [None], [""], ["a"], [0], [-1], [10**9], [1.5], [[1, 2], [3]], [[], []], ["a", 1],
    [{}], {}, {"": ""},
    {"a": 1}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "nothing"}, {"role": "user"},
    {"50": 100}, {"-1": 1}, {"x": 1e400}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    {"regex": "(" * 50}, {"regex": "(a*)*b"}, {"choice": []}, {"json": {"$ref": "#"}},
    {"grammar": "root ::="},
    {"include_usage": "yes"}, [{"role": "user", "content": None}], [{"role": "x" * 100, "content": []}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "tool", "content": "x"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
]  # fmt: skip

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The quick", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "The quick"}], "max_tokens": 3},
    "/v1/responses": {"input": "The quick", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "The quick"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "The quick"},
    "/detokenize": {"tokens": [5, 6]},
}


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    """The names of a path's fields."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    return sorted(document["components"]["schemas"][name]["properties"])


def bad_bodies(
    document: dict[str, Any], seed: int, count: int, paths: Sequence[str] = tuple(GOOD)
) -> Iterator[tuple[str, bytes]]:
    """(path, body) pairs."""
    draw = random.Random(seed)
    paths = [path for path in paths if path in document["paths"]]
    fields = {path: fields_of(document, path) for path in paths}
    for _ in range(count):
        path = draw.choice(paths)
        body = dict(GOOD[path])
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            body[draw.choice(fields[path])] = _value(draw)
        if draw.random() < 0.1:
            body.pop(draw.choice(sorted(body)))
        if draw.random() < 0.3:
            body["stream"] = True
        yield path, _torn(draw, json.dumps(body).encode())


def _value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.85:
        return draw.choice(STRANGE)
    if kind < 0.9:
        return [draw.choice(STRANGE) for _ in range(draw.randint(1, 300))]
    if kind < 0.95:
        return {str(draw.choice(STRANGE))[:50]: draw.choice(STRANGE) for _ in range(draw.randint(1, 20))}
    value: Any = draw.choice(STRANGE)
    for _ in range(draw.choice([5, 40, 900])):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def _torn(draw: random.Random, data: bytes) -> bytes:
    kind = draw.random()
    place = draw.randrange(len(data))
    if kind < 0.05:
        return data[:place]
    if kind < 0.1:
        return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
    if kind < 0.12:
        return draw.choice([b"", b"null", b"[]", b'"x"', b"1", b"{" * 2000, b"\xef\xbb\xbf{}", b"\x00" * 50])
    return data
