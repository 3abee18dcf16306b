"""Where the server listens: sockets of the file system, ports that somebody has, paths behind a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import _serve, run
from octavo.server.listening import bound
from tests.server.conftest import running
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import check_error

COMMAND = [sys.executable, "-m", "tests.server.serve_fake", "0", "0.01", "5"]


def settings(uds: Path | str) -> dict[str, str]:
    return os.environ | {"SERVE_FAKE": json.dumps({"uds": str(uds)})}


@contextlib.contextmanager
def serving(path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    pipe = subprocess.PIPE
    child = subprocess.Popen(COMMAND, stdout=pipe, stderr=pipe, text=True, env=settings(path))
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        assert child.stdout.readline() == f"Octavo is ready: unix:{path}\n"
        with httpx.Client(
            base_url="http://any", transport=httpx.HTTPTransport(uds=str(path)), timeout=20
        ) as client:
            yield child, client
    finally:
        child.kill()
        child.communicate()


def refused(uds: Path | str) -> str:
    """The one line that a server says which cannot listen there, before it loads a model."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=30, env=settings(uds))
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_requests_over_a_socket_of_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "o.sock"
    with serving(path) as (child, client):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert client.get("/health").json() == {"status": "ok"}
        body = {"prompt": "a", "max_tokens": 5}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert refused(path) == f"octavo: uds='{path}' is in use by another server: name another path"
        assert client.get("/health").status_code == 200
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 100}) as r:
            events = r.iter_lines()
            next(events)
            child.send_signal(signal.SIGTERM)
            assert [line for line in events if line][-1] == "data: [DONE]"
        assert child.wait(20) == 0
    assert not path.exists()


def test_the_socket_of_a_server_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "o.sock"
    with serving(path) as (child, _):
        child.kill()
        child.wait()
        assert path.exists()
        with serving(path) as (_, client):
            assert client.get("/health").status_code == 200


def test_what_is_no_place_for_a_socket_is_told(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        assert refused(path) == f"octavo: uds='{path}' is there already and is no socket: name another path"
    assert file.read_text() == "mine"
    assert "No such file or directory" in refused(tmp_path / "nowhere" / "o.sock")
    assert "too long" in refused(tmp_path / ("a" * 150))
    for none in ("", "\0octavo"):
        with pytest.raises(ConfigError, match="uds=.* is no path"):
            ServerConfig(uds=none)


def test_a_path_that_somebody_else_has_taken_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "o.sock"
    with bound(ServerConfig(uds=str(path))):
        path.unlink()
        path.write_text("another one's")
    assert path.read_text() == "another one's"


def test_of_two_servers_that_take_one_port_at_once_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have bound it before either listens, which the system allows; the later one used to say that it
    was ready, and to hear nothing."""
    listen = socket.socket.listen

    def after_the_other(sock: socket.socket, *backlog: int) -> None:
        monkeypatch.undo()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(sock.getsockname())
            listen(other)
            listen(sock, *backlog)

    monkeypatch.setattr(socket.socket, "listen", after_the_other)
    with pytest.raises(ConfigError, match="port=0 is in use"):
        with bound(ServerConfig(port=0)):
            raise AssertionError("both listen")


@pytest.mark.parametrize("seconds", [0, 10])
def test_a_server_that_cannot_listen_after_all_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    made: list[FakeEngine] = []

    async def create() -> FakeEngine:
        if seconds:
            await asyncio.sleep(seconds)
        made.append(FakeEngine())
        return made[0]

    async def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRINUSE, "in use")

    monkeypatch.setattr("octavo.server.lifecycle._Server.startup", fail)
    with bound(ServerConfig(port=0)) as sock:
        with pytest.raises(ConfigError, match="port=8000 is in use"):
            run(_serve(create, ServerConfig(), sock))
    assert len(made) == (not seconds) and all(engine.down for engine in made)
    assert "ready" not in capsys.readouterr().out


@pytest.mark.parametrize("key", [None, "secret"])
def test_behind_a_proxy_that_leaves_its_path_on(key: str | None) -> None:
    with running(root_path="/a/octavo/", api_key=[key] if key else None) as server:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for prefix in ("", "/a/octavo"):
            assert server.client.get(f"{prefix}/health").status_code == 200
            listed = server.client.get(f"{prefix}/v1/models", headers=headers).json()
            assert listed["data"][0]["id"] == "some/model"
            one = server.client.get(f"{prefix}/v1/models/some/model", headers=headers)
            assert one.json()["id"] == "some/model"
            answer = server.post(
                f"{prefix}/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=headers
            )
            assert answer.json()["usage"]["completion_tokens"] == 2
            assert server.client.get(f"{prefix}/").headers["content-type"].startswith("text/html")
            if key:
                check_error(server.client.get(f"{prefix}/v1/models"), 401)
        for wrong in ("/a/octavox/health", "/a/health", "/a/octavo/a/octavo/health"):
            check_error(server.client.get(wrong, headers=headers), 404)
        home = server.client.get("/a/octavo")
        assert home.status_code == 307 and home.headers["location"] == "/a/octavo/"
        document = server.client.get("/openapi.json", headers=headers).json()
        assert document["servers"] == [{"url": "/a/octavo"}]
        text = server.client.get("/metrics", headers=headers).text
        assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 2.0' in text


@pytest.mark.parametrize(("given", "kept"), [("/a/", "/a"), ("/", None), ("", None), ("/a/b", "/a/b")])
def test_root_paths(given: str, kept: str | None) -> None:
    assert ServerConfig(root_path=given).root_path == kept


@pytest.mark.parametrize("given", ["octavo", "http://x/y", "/a b", "/a?b", "/é", "/a\n"])
def test_what_is_no_root_path_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="root_path=.* is not valid: give a path, such as /octavo"):
        ServerConfig(root_path=given)
