"""Keys from a file, the access log, full queues, requests that take too long, clients that do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server import access_log
from octavo.server.access_log import AccessLog
from octavo.server.api_keys import ApiKeys
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import reload
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

TEXTS, CHAT = "/v1/completions", "/v1/chat/completions"


def lines_of(path: Path, count: int) -> list[dict[str, Any]]:
    """The log's lines, once there are so many."""
    until = time.monotonic() + 5
    while time.monotonic() < until and path.read_bytes().count(b"\n") < count:
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- API keys -----------------------------------------------------------------------------------


def test_keys_of_a_file_and_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the first tenant\nalpha\n\n  beta  \n")
    with running(api_key=["gamma"], api_key_file=str(file)) as server:

        def status(key: str) -> int:
            return server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        keys = ["alpha", "beta", "gamma", "delta", "# of the first tenant", "Bearer"]
        assert [status(key) for key in keys] == [200, 200, 200, 401, 401, 401]
        file.write_text("delta\n")
        server.call(lambda: reload(server.service.keys, server.service.access_log))
        assert [status(key) for key in ("alpha", "delta", "gamma")] == [401, 200, 200]
        file.unlink()
        # The old ones stay: nobody is shut out, and nobody let in.
        server.call(lambda: reload(server.service.keys, server.service.access_log))
        assert [status(key) for key in ("alpha", "delta")] == [401, 200]
        for path in ("/health", "/ready", "/ping"):
            assert server.client.get(path).status_code == 200


@pytest.mark.parametrize("text", [None, "", "# no key\n", "\xff"])
def test_a_file_without_keys_is_refused_at_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="api_key_file=.*keys"):
        ApiKeys(ServerConfig(api_key_file=str(file)))


# ---- the access log -----------------------------------------------------------------------------


def test_a_line_per_request_without_contents(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    with running(access_log=str(file)) as server:
        chat = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}
        first = server.post(CHAT, chat, headers={"x-request-id": "mine"})
        second = server.post(CHAT + "?key=secret", chat | {"stream": True})
        server.post(TEXTS, {"prompt": "secret", "request_id": "body"})
        server.post(TEXTS, {"prompt": 7})
        server.client.get("/nowhere")
        entries = lines_of(file, 5)
    assert [(e["method"], e["path"], e["status"]) for e in entries] == [
        ("POST", CHAT, 200), ("POST", CHAT, 200), ("POST", TEXTS, 200), ("POST", TEXTS, 400),
        ("GET", "/nowhere", 404),
    ]  # fmt: skip
    assert entries[0]["request_id"] == "mine" and first.json()["id"] == "chatcmpl-mine"
    told = json.loads(second.text.splitlines()[0].removeprefix("data: "))["id"]
    assert told == f"chatcmpl-{entries[1]['request_id']}" and len(entries[1]["request_id"]) == 32
    assert entries[2]["request_id"] == "body"
    assert [e["bytes_sent"] for e in entries[:2]] == [len(first.content), len(second.content)]
    for entry in entries:
        assert entry["complete"] and entry["client"] == "127.0.0.1"
        assert 0 < entry["first_byte_seconds"] <= entry["seconds"] < 5
    assert "secret" not in file.read_text()


def test_a_client_that_leaves_shows_in_the_log(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    with running(FakeEngine(delay=0.05), access_log=str(file)) as server:
        body = {"prompt": "a", "max_tokens": 150, "stream": True}
        with server.client.stream("POST", TEXTS, json=body) as response:
            next(response.iter_lines())
        [entry] = lines_of(file, 1)
    assert entry["status"] == 200 and not entry["complete"]


def test_a_full_disk_costs_lines_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with running(access_log="/dev/full") as server:
        for _ in range(3):
            assert server.client.get("/health").status_code == 200
        assert server.post(TEXTS, {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert [r.getMessage() for r in caplog.records if "lost" in r.getMessage()] == [
        "lines of the access log are lost: No space left on device"
    ]


def test_a_disk_that_has_room_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    room = [7]  # bytes
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write(fd, data[: room[0]])
        room[0] -= count
        return count

    log = AccessLog(str(tmp_path / "log"))
    monkeypatch.setattr(access_log.os, "write", limited)
    log.write({"number": 1})
    log.write({"number": 2})
    while log._lost < 2:
        time.sleep(0.001)
    room[0] = 1000
    log.write({"number": 3})
    log.close()
    assert (tmp_path / "log").read_text() == '{"numbe\n{"number":3}\n'


def test_the_log_is_opened_again_after_it_was_moved(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"))
    log.write({"number": 1})
    (tmp_path / "log").rename(tmp_path / "old")
    log.reopen()
    log.write({"number": 2})
    log.close()
    assert (tmp_path / "old").read_text() == '{"number":1}\n'
    assert (tmp_path / "log").read_text() == '{"number":2}\n'


def test_the_log_is_opened_again_though_lines_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(access_log, "_MOST_WAITING", 3)
    gate = threading.Event()
    write = os.write
    monkeypatch.setattr(access_log.os, "write", lambda fd, data: gate.wait(10) and write(fd, data))
    log = AccessLog(str(tmp_path / "log"))
    for number in range(10):
        log.write({"number": number})
    (tmp_path / "log").rename(tmp_path / "old")
    log.reopen()
    gate.set()
    lines_of(tmp_path / "old", 2)
    log.write({"number": 10})
    log.close()
    assert (tmp_path / "log").read_text() == '{"number":10}\n'


def test_a_disk_that_stands_still_holds_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(access_log, "_MOST_WAITING", 5)
    gate = threading.Event()
    write = os.write
    monkeypatch.setattr(access_log.os, "write", lambda fd, data: gate.wait(10) and write(fd, data))
    log = AccessLog(str(tmp_path / "log"))
    begin = time.monotonic()
    for number in range(100):
        log.write({"number": number})
    assert time.monotonic() - begin < 1
    gate.set()
    log.close()
    assert 5 <= len((tmp_path / "log").read_text().splitlines()) <= 7


def test_hangup_reads_keys_again_and_a_bad_log_is_told_at_start(tmp_path: Path) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("one\n")
    command = [sys.executable, "-m", "tests.server.serve_fake", "0", "0", "1"]
    env = os.environ | {"SERVE_FAKE": json.dumps({"api_key_file": str(keys), "access_log": str(log)})}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        url = child.stdout.readline().removeprefix("Octavo is ready: ").strip()
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:

            def status(key: str) -> int:
                return client.get("models", headers={"authorization": f"Bearer {key}"}).status_code

            assert [status("one"), status("two")] == [200, 401]
            assert [entry["status"] for entry in lines_of(log, 2)] == [200, 401]
            keys.write_text("two\n")
            log.rename(tmp_path / "old")
            child.send_signal(signal.SIGHUP)
            until = time.monotonic() + 5
            while status("two") != 200 and time.monotonic() < until:
                time.sleep(0.01)
            assert [status("one"), status("two")] == [401, 200]
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        assert [entry["status"] for entry in lines_of(tmp_path / "old", 2)][:2] == [200, 401]
        assert [entry["status"] for entry in lines_of(log, 2)][-2:] == [401, 200]
    finally:
        child.kill()
        child.communicate()
    env["SERVE_FAKE"] = json.dumps({"access_log": str(tmp_path)})
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"octavo: access_log={str(tmp_path)!r} cannot be opened: Is a directory\n"


def test_a_hangup_while_the_model_loads_ends_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.server.serve_fake", "0", "0", "1", "slow"]
    env = os.environ | {"SERVE_FAKE": json.dumps({"access_log": str(log)})}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None and child.stdout.readline() == "loading\n"
        log.rename(tmp_path / "old")
        child.send_signal(signal.SIGHUP)
        until = time.monotonic() + 10
        while not log.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert log.exists()
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate()


# ---- bounds -------------------------------------------------------------------------------------


def occupy(server: Running, count: int, **body: Any) -> list[threading.Thread]:
    """So many requests under way."""
    ask = {"prompt": "a", "max_tokens": 150, "stream": True} | body
    threads = [threading.Thread(target=lambda: server.post(TEXTS, ask)) for _ in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 10
    while len(server.engine.live) < count and time.monotonic() < until:
        time.sleep(0.005)
    assert len(server.engine.live) == count
    return threads


def test_a_full_queue_is_told_before_anything_else() -> None:
    engine = FakeEngine(delay=0.02, max_num_seqs=2)
    with running(engine, max_num_queued_reqs=2) as server:
        threads = occupy(server, 4)
        for path, body in ((TEXTS, {"prompt": "a"}), (TEXTS, {"prompt": ["a", "b"], "n": 3}), (CHAT, {})):
            answer = server.post(path, body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
            assert "max_num_queued_reqs=2" in answer.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
        for thread in threads:
            thread.join(20)
        assert server.service.unfinished == 0
        assert server.post(TEXTS, {"prompt": "a", "max_tokens": 1, "n": 7}).status_code == 200


def test_a_request_may_take_so_long() -> None:
    engine = FakeEngine(delay=0.02)
    with running(engine, request_timeout=0.3) as server:
        body = {"prompt": "a", "max_tokens": 150}
        whole = server.post(TEXTS, body)
        assert whole.status_code == 504 and whole.json()["error"]["code"] == "request_timeout"
        lines = [line for line in server.post(TEXTS, body | {"stream": True}).text.splitlines() if line]
        assert len(lines) > 5 and lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert server.post(TEXTS, body | {"max_tokens": 2}).status_code == 200
        assert not engine.live and not server.service.jobs and not server.service.ended


def test_a_client_that_does_not_read_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.server import app

    monkeypatch.setattr(app, "_TELLING_SECONDS", 0.2)
    engine = FakeEngine()
    engine.max_model_len = 200_000
    with running(engine, request_timeout=0.5) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 150_000, "stream": True, "logprobs": 5}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
            head += b"content-length: %d\r\n\r\n" % len(body)
            sock.sendall(head + body)
            until = time.monotonic() + 5
            while not engine.live and time.monotonic() < until:
                time.sleep(0.005)
            assert engine.live
            fast = server.post(TEXTS, {"prompt": "b", "max_tokens": 100})  # meanwhile
            assert fast.status_code == 200
            generated = engine.generated
            time.sleep(0.1)
            assert engine.generated - generated < 20_000 or engine.generated < 150_000
            while (engine.live or server.service.jobs) and time.monotonic() < until:
                time.sleep(0.01)
            assert not engine.live and not server.service.jobs
            assert engine.generated < 150_000


@pytest.mark.parametrize("path", [TEXTS, CHAT])
def test_many_log_probabilities_hold_nobody_up(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Making them takes seconds where there are millions; other requests are answered meanwhile."""
    from octavo.server import chat, completions

    meanwhile: list[int] = []
    chats = path == CHAT
    module, name = (chat, "chat_logprobs") if chats else (completions, "completion_logprobs")
    made = getattr(module, name)

    with running() as server:

        def slowly(*args: Any) -> Any:
            meanwhile.append(httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code)
            return made(*args)

        monkeypatch.setattr(module, name, slowly)
        asked = {"messages": [{"role": "user", "content": "a"}]} if chats else {"prompt": "a"}
        logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if chats else {"logprobs": 2}
        answer = server.post(path, asked | logprobs | {"max_tokens": 3, "n": 2})
        assert answer.status_code == 200 and meanwhile == [200, 200]
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
        assert all(choice["logprobs"] for choice in answer.json()["choices"])
