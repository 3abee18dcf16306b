"""The server as a process: ready line, port in use, SIGTERM; clients that leave; an engine that dies."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
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


def test_sigterm_ends_a_start_that_cannot_be_interrupted(tmp_path: Path) -> None:
    """A download, whose threads the interpreter would wait for."""
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import octavo.async_llm\n"
        "from octavo.cli.main import main\n"
        "pool = ThreadPoolExecutor()\n"
        "octavo.async_llm.InputProcessor = lambda config: pool.submit(time.sleep, 60).result()\n"
        "sys.exit(main(['serve', 'some/model', '--port', sys.argv[1]]))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        until, code = time.monotonic() + 30, 0
        while code != 503:
            assert time.monotonic() < until
            time.sleep(0.05)
            with contextlib.suppress(httpx.TransportError):
                code = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code
        child.send_signal(signal.SIGTERM)
        assert child.wait(15) == 0
    finally:
        child.kill()
        child.wait()


def test_sigterm_at_the_moment_at_which_the_model_is_loaded_is_not_lost() -> None:
    command = [sys.executable, "-m", "tests.server.serve_fake", "0", "0", "1", "late"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "engine down"


def test_a_request_whose_body_comes_while_the_server_shuts_down_is_refused() -> None:
    """It is not begun, since nobody would wait for its end."""
    engine = FakeEngine(delay=0.02)
    with running(engine) as server:
        payload = json.dumps(BODY).encode()
        head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(payload)
        with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
            sock.sendall(head + payload[:5])
            time.sleep(0.3)  # the request is there, and waits for the rest
            server.call(lambda: setattr(server.service, "draining", True))
            sock.sendall(payload[5:])
            answer = b""
            while data := sock.recv(10_000):  # until the connection is closed
                answer += data
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer
        assert not engine.seen


def test_as_many_files_as_may_be_are_open() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))  # noqa: E731
    command = [sys.executable, "-m", "tests.server.serve_fake", "0", "0", "1"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n" and "ready" in child.stdout.readline()
        soft = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0]
        assert soft == min(hard, 65_535) if hard != resource.RLIM_INFINITY else soft == 65_535
    finally:
        child.kill()
        child.communicate()


def test_idle_connections_outlive_those_of_clients() -> None:
    """A server that closes first answers the next request with a reset, now and then."""
    from octavo.server.config import ServerConfig
    from octavo.server.lifecycle import uvicorn_config

    kept = uvicorn_config(None, ServerConfig()).timeout_keep_alive
    assert kept > 60  # proxies keep them for a minute
    assert uvicorn_config(None, ServerConfig(timeout_keep_alive=9)).timeout_keep_alive == 9


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


MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    TEXTS: ({"prompt": ["a", "b"], "n": 2, "max_tokens": 150}, 2),
    "/v1/chat/completions": ({"messages": MESSAGES, "n": 2, "max_tokens": 150}, 1),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 150}, 1),
    "/v1/embeddings": ({"input": ["a", "b"]}, 2),
    "/v1/score": ({"text_1": "a", "text_2": ["b", "c"]}, 3),
}


def test_every_endpoint_that_runs_the_engine_is_here() -> None:
    from octavo.server.endpoints import OPERATIONS

    assert {operation.path for operation in OPERATIONS if operation.generates} == {*ENDPOINTS, "/score"}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_client_that_goes_away_is_aborted(path: str, streaming: bool) -> None:
    body, running_at_once = ENDPOINTS[path]
    embeds = path in ("/v1/embeddings", "/v1/score")
    if embeds and streaming:
        pytest.skip("has no stream")
    engine = FakeEngine(delay=5 if embeds else 0.02)
    with running(engine) as server:
        payload = json.dumps(body | ({} if embeds else {"stream": streaming})).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(payload)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(head + payload)
                for _ in range(500):
                    if len(engine.live) == running_at_once:
                        break
                    time.sleep(0.005)
                assert len(engine.live) == running_at_once
            until = time.monotonic() + 1.5
            while engine.live and time.monotonic() < until:
                time.sleep(0.005)
            assert not engine.live
        assert engine.aborted == 5 * running_at_once
        assert not server.service.jobs and not server.service.live and not server.service.unfinished


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
