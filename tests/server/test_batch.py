"""The batch runner over the fake engine: the same answers as HTTP, errors a line, resuming after a kill."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.batch import BatchCounts, requests_left, run_batch
from octavo.server.batch_output import BatchOutput
from octavo.server.config import ServerConfig
from octavo.server.service import Service
from tests.server.conftest import running
from tests.server.fakes import FakeEngine

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = TEXTS, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body.setdefault("messages", [{"role": "user", "content": f"hello {custom_id}"}])
    else:
        body.setdefault("prompt", f"hello {custom_id}")
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 8} | body}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, *lines: Any) -> None:
    data = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines]
    path.write_bytes(b"\n".join(data) + b"\n")


def run(files: tuple[Path, Path], engine: FakeEngine | None = None, **settings: Any) -> BatchCounts:
    async def main() -> BatchCounts:
        settings.setdefault("served_model_name", ["m"])
        service = Service(engine or FakeEngine(), ServerConfig(**settings))  # type: ignore[arg-type]
        counts = BatchCounts()
        with BatchOutput(files[1]) as output:
            requests = requests_left(files[0], output, service.config.max_request_bytes, counts)
            try:
                await run_batch(service, requests, output, 3, counts)
            finally:
                service.close()
        return counts

    return asyncio.run(main())


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    found = results(path)
    assert len({r["custom_id"] for r in found}) == len(found)
    return {r["custom_id"]: r for r in found}


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in ("id", "created")}


def test_embeddings_and_scores_in_a_batch(files):
    ask = {"method": "POST", "url": "/v1/embeddings"}
    write(
        files[0],
        ask | {"custom_id": "e", "body": {"input": "ab"}},
        ask | {"custom_id": "s", "url": "/v1/score", "body": {"text_1": "a", "text_2": ["b", "a"]}},
    )
    assert run(files).answered == 2
    found = {name: r["response"]["body"]["data"] for name, r in by_id(files[1]).items()}
    assert found["e"][0]["embedding"] == [3.0, 256.0, 0.25, -1.5]
    assert [round(item["score"], 6) for item in found["s"]] == [1, 1]


def test_a_line_means_what_an_http_request_means(files):
    bodies = {
        "chat": (CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
        "text": (TEXTS, {"n": 2, "temperature": 1, "echo": True, "logprobs": 1}),
        "ids": (TEXTS, {"prompt": [[1, 2, 3], [4, 5]], "return_token_ids": True}),
        "nan": (TEXTS, {"temperature": -1}),
        "tools": (CHAT, {"tools": [{"type": "function"}]}),
        "model": (CHAT, {"model": "gpt-4o-mini"}),
        "long": (TEXTS, {"prompt": [7] * 500}),
        "type": (TEXTS, {"prompt": {"a": 1}}),
    }
    lines = [line(name, url, **body) for name, (url, body) in bodies.items()]
    write(files[0], *lines)
    counts = run(files)
    assert (counts.answered, counts.refused, counts.failed) == (3, 5, 0)
    found = by_id(files[1])
    with running(served_model_name=["m"]) as server:
        for item in lines:
            response = server.post(item["url"], item["body"])
            ours = found[item["custom_id"]]["response"]
            assert found[item["custom_id"]]["error"] is None
            assert ours["status_code"] == response.status_code
            assert without_names(ours["body"]) == without_names(response.json())
            if response.status_code == 200:
                assert ours["body"]["id"].endswith(ours["request_id"])


def test_a_line_that_is_no_request_gets_an_error_and_stops_nothing(files):
    write(
        files[0],
        b"\xef\xbb\xbf" + json.dumps(line("first")).encode(),
        b"not json",
        b"",
        b"\xff\xfe",
        {"custom_id": "no-url", "body": {}},
        {"url": TEXTS, "body": {}},
        line("wrong-url", "/v1/images"),
        {**line("get"), "method": "GET"},
        line("stream", stream=True),
        line("big", prompt="x" * 3000),
        line("first", max_tokens=3),
        line("last"),
    )
    counts = run(files, max_request_bytes=2000)
    assert (counts.answered, counts.refused) == (2, 9)
    found = results(files[1])
    assert len(found) == 11
    assert len({r["id"] for r in found}) == 11
    errors = [r for r in found if r["error"]]
    assert all(r["response"] is None for r in errors)
    told = " | ".join(f"{r['custom_id']}: {r['error']['message']}" for r in errors)
    assert "None: line 2: the line is not valid JSON" in told
    assert "None: line 4" in told
    assert "no-url: line 5: url is missing" in told
    assert "None: line 6: custom_id is missing" in told
    assert "wrong-url: line 7: url '/v1/images' is none of /v1/chat/completions, /v1/completions" in told
    assert "get: line 8: method 'GET' is not POST" in told
    assert "big: line 10 is larger than 2000 bytes" in told
    duplicate = next(r for r in errors if r["custom_id"] == "first")
    assert duplicate["error"]["code"] == "duplicate_custom_id"
    assert "line 11: custom_id 'first' stands in line 1 too" in duplicate["error"]["message"]
    stream = next(r for r in found if r["custom_id"] == "stream")
    assert stream["response"]["status_code"] == 400
    assert "stream" in stream["response"]["body"]["error"]["message"]

    before = files[1].read_bytes()
    counts = run(files, max_request_bytes=2000)
    assert (counts.resumed, counts.changed, counts.answered, counts.refused) == (11, 0, 0, 0)
    assert files[1].read_bytes() == before


def test_equal_bad_lines_each_have_one_result(files):
    write(files[0], b"{", b"{", line("a"))
    run(files)
    run(files)
    assert len(results(files[1])) == 3


def test_mended_and_added_lines_are_run_and_changed_ones_told(files):
    write(files[0], line("a"), {"custom_id": "b", "url": TEXTS}, line("c"))
    run(files)
    write(files[0], line("new"), line("b"), line("c", max_tokens=3), line("a"))
    counts = run(files)
    assert (counts.answered, counts.resumed, counts.changed) == (2, 2, 1)
    assert sorted(r["custom_id"] for r in results(files[1])) == ["a", "b", "b", "c", "new"]


@pytest.mark.parametrize("cut", [1, 2, 30, 10_000])
def test_a_torn_last_line_is_mended(files, cut):
    write(files[0], *(line(f"r{i}") for i in range(5)))
    run(files)
    whole = files[1].read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2] + b"\n"
    cut = min(cut, len(last) - 1)
    files[1].write_bytes(whole[:-cut])
    counts = run(files)
    # Without its line end alone, the line is whole.
    assert (counts.resumed, counts.answered) == ((5, 0) if cut == 1 else (4, 1))
    assert sorted(by_id(files[1])) == [f"r{i}" for i in range(5)]
    assert files[1].read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"id":"other"}\n{"id', b'{"id": 3}'])
def test_a_file_of_something_else_is_not_touched(files, content):
    write(files[0], line("a"))
    files[1].write_bytes(content)
    with pytest.raises(ConfigError, match="name another file"):
        run(files)
    assert files[1].read_bytes() == content


def test_two_runs_cannot_write_one_file(files):
    write(files[0], line("a"))
    with BatchOutput(files[1]), pytest.raises(ConfigError, match="another run"):
        run(files)


def test_a_full_disk_is_told_and_leaves_a_file_that_can_be_resumed(files, monkeypatch):
    write(files[0], *(line(f"r{i}") for i in range(6)))
    real = os.write
    room = 900

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if not data.startswith(b'{"id":"batch_req_') and room == 900:
            return real(fd, data)  # the event loop's own
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr("octavo.server.batch_output.os.write", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device; run again"):
            run(files)
    assert _size(files[1]) == 900
    counts = run(files)
    assert counts.resumed + counts.answered == 6
    assert sorted(by_id(files[1])) == [f"r{i}" for i in range(6)]


def test_a_device_is_no_output(files):
    write(files[0], line("a"))
    with pytest.raises(ConfigError, match="is not a file"):
        run((files[0], Path("/dev/full")))


def test_the_engine_s_end_is_no_answer(files):
    write(files[0], *(line(f"r{i}") for i in range(20)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.batch_fake", *map(str, files), "0", "5"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    found = by_id(files[1])
    assert 5 <= len(found) < 20
    assert all(r["response"]["status_code"] == 200 for r in found.values())
    engine = FakeEngine()
    engine.dead.set()
    with pytest.raises(EngineDeadError):
        run(files, engine)
    assert run(files).answered == 20 - len(found)
    assert len(by_id(files[1])) == 20


def test_kill_after_kill_loses_and_repeats_nothing(files):
    count = 60
    write(files[0], *(line(f"r{i}", max_tokens=4) for i in range(count)), b"bad", line("r3"))
    rng = random.Random(0)
    kills = 0
    for _ in range(40):
        had = _size(files[1])
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.server.batch_fake", *map(str, files), "0.01"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        wanted = had + rng.randint(500, 7000)
        while child.poll() is None and _size(files[1]) < wanted:
            time.sleep(0.002)
        if child.poll() is not None:
            assert child.stderr is not None
            assert child.wait() == 0, child.stderr.read()
            break
        child.kill()
        child.wait()
        kills += 1
        if kills % 2:  # as if the kill had come in the middle of a write
            with files[1].open("r+b") as file:
                file.truncate(max(_size(files[1]) - rng.randint(1, 60), 0))
    assert kills >= 2
    found = results(files[1])
    assert len(found) == count + 2
    answered = [r["custom_id"] for r in found if r["response"]]
    assert sorted(answered) == sorted(f"r{i}" for i in range(count))
    reference = files[1].with_name("reference.jsonl")
    run((files[0], reference))
    texts = {r["custom_id"]: r["response"]["body"]["choices"] for r in results(reference) if r["response"]}
    assert all(r["response"]["body"]["choices"] == texts[r["custom_id"]] for r in found if r["response"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
