"""The server as a process: ready line, port in use, SIGTERM; clients that leave; an engine that dies."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import running
from tests.server.fakes import FakeEngine

BODY = {"prompt": "a", "max_tokens": 150}
TEXTS = "/v1/completions"


@contextlib.contextmanager
def process(*args: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "tests.server.serve_fake", *args]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        url = (
            "http://unused" if args[3:] else child.stdout.readline().removeprefix("Octavo is ready: ").strip()
        )
        with httpx.Client(base_url=url.removesuffix("/v1"), timeout=20, trust_env=False) as client:
            yield child, client
    finally:
        child.kill()
        child.communicate()


def stream(client: httpx.Client, started: threading.Event, lines: list[str], body: dict[str, Any]) -> None:
    with client.stream("POST", TEXTS, json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line)
                started.set()


def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_0() -> None:
    with process("0", "0.01", "30") as (child, client):
        started, lines = threading.Event(), list[str]()
        thread = threading.Thread(target=stream, args=(client, started, lines, BODY))
        thread.start()
        assert started.wait(10)
        child.send_signal(signal.SIGTERM)
        for _ in range(100):
            refused = client.post(TEXTS, json=BODY | {"max_tokens": 1})
            if refused.status_code == 503:
                break
            time.sleep(0.01)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert client.get("/health").json() == {"status": "draining"}
        assert client.get("/ready").status_code == 503
        thread.join(20)
        assert lines[-1] == "data: [DONE]" and len(lines) > 100
        assert child.wait(20) == 0
        assert child.stdout is not None and child.stdout.read() == "engine down\n"


def test_drain_timeout_ends_streams_with_an_error() -> None:
    with process("0", "0.05", "0.2") as (child, client):
        started, lines, whole = threading.Event(), list[str](), list[httpx.Response]()
        threads = [
            threading.Thread(target=stream, args=(client, started, lines, BODY)),
            threading.Thread(target=lambda: whole.append(client.post(TEXTS, json=BODY))),
        ]
        for thread in threads:
            thread.start()
        assert started.wait(10)
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        for thread in threads:
            thread.join(10)
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "shutting_down"


def test_while_loading_it_is_neither_live_nor_ready_and_sigterm_exits_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process(str(port), "0", "1", "slow") as (child, client):
        client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        for path in ("/health", "/ready", "/v1/models"):
            answer = client.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            assert answer.headers["retry-after"] == "5"
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


def test_port_in_use_is_told_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "tests.server.serve_fake", port, "0", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"octavo: port={port} is in use: choose another one, or 0 for a free one"
    ]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_is_aborted(streaming: bool) -> None:
    engine = FakeEngine(delay=0.02)
    with running(engine) as server:
        payload = json.dumps(BODY | {"stream": streaming, "n": 2, "prompt": ["a", "b"]}).encode()
        head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(payload)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(head + payload)
                for _ in range(500):
                    if len(engine.live) == 2:
                        break
                    time.sleep(0.005)
                assert len(engine.live) == 2
            until = time.monotonic() + 1.5
            while engine.live and time.monotonic() < until:
                time.sleep(0.005)
            assert not engine.live
        assert engine.aborted == 10
        assert not server.service.jobs


def test_a_dead_engine_shows_in_health_and_in_flight() -> None:
    engine = FakeEngine(delay=0.05)
    with running(engine) as server:
        started, lines, whole = threading.Event(), list[str](), list[httpx.Response]()
        threads = [
            threading.Thread(target=stream, args=(server.client, started, lines, BODY)),
            threading.Thread(target=lambda: whole.append(server.post(TEXTS, BODY))),
        ]
        for thread in threads:
            thread.start()
        assert started.wait(10)
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.client.get("/ready").json() == {"status": "ok"}
        time.sleep(0.1)
        before = time.monotonic()
        server.call(engine.kill)
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - before < 2
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        assert server.post(TEXTS, BODY).status_code == 503


def test_many_prompts_share_one_failure() -> None:
    engine = FakeEngine(delay=0.01)
    with running(engine) as server:
        answer = server.post(TEXTS, {"prompt": [[1], [2], [-1]], "max_tokens": 150})
        assert answer.status_code == 400
        assert not engine.live and engine.aborted == 2


@pytest.mark.parametrize("line", [b"X-%d: aaaaaaaa\r\n", b"aaaaaaaaaaaaaaaa"])
def test_headers_without_end_are_refused(line: bytes) -> None:
    with process("0", "0", "1") as (_, client):
        assert client.get("/health", headers={"x-large": "a" * 50_000}).status_code == 200
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), 5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            answer = b""
            for number in range(100_000):
                try:
                    sock.sendall(line % number if b"%" in line else line)
                except OSError:
                    break  # closed while this side went on writing
            else:
                raise AssertionError("1.6 MB of headers were taken")
            with contextlib.suppress(OSError):
                answer = sock.recv(1000)
            assert answer in (b"",) or answer.startswith(b"HTTP/1.1 400 ")
        assert client.get("/health").status_code == 200
