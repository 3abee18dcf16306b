"""HTTP as other clients speak it: old versions, offers of upgrades, many requests at once, wrong types."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.server import http
from octavo.server.lifecycle import uvicorn_config
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import check_error

TEXTS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 3}
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
JSON = "Content-Type: application/json\r\n"


def talk(server: Running, *pieces: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
        for piece in pieces:
            sock.sendall(piece)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer


def post(body: Any, headers: str = "", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {TEXTS} HTTP/{version}\r\nHost: x\r\n{JSON}{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def wait_until(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


LAST = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_an_old_client_gets_no_chunks(server: Running) -> None:
    head, _, body = talk(server, post(BODY | {"stream": True}, version="1.0")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head.lower()
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2]) and len(events) >= 4
    head, _, body = talk(server, post(BODY, version="1.0")).partition(b"\r\n\r\n")
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert talk(server, b"GET /ping HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def test_a_websocket_that_is_offered_is_passed_over(server: Running) -> None:
    """Whatever library for it is installed."""
    assert uvicorn_config(None, server.service.config).ws == "none"
    offer = UPGRADE.replace("h2c", "websocket") + "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n"
    answer = talk(server, f"GET /ping HTTP/1.1\r\nHost: x\r\n{offer}\r\n".encode() + LAST)
    assert answer.count(b'{"status":"ok"}') == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_an_upgrade_that_is_offered_is_passed_over(server: Running, stream: bool, split: bool) -> None:
    """As Java's HttpClient does it; then further requests on the connection, one of them in chunks."""
    chunk = json.dumps(BODY).encode()
    chunked = (
        f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\n{JSON}{UPGRADE}Transfer-Encoding: chunked\r\n\r\n".encode()
    )
    chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk)
    get = f"GET /ping HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n".encode()
    data = post(BODY | {"stream": stream}, UPGRADE) + chunked + get + LAST
    answer = talk(server, *(bytewise(data) if split else [data]))
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.count(b'"completion_tokens":3') == 1 + (not stream)
    assert answer.count(b"data: [DONE]") == stream
    assert answer.count(b'{"status":"ok"}') == 2


def test_many_requests_at_once_are_answered_in_order(server: Running) -> None:
    asked = [3, 1, 5, 2]
    answer = talk(server, b"".join(post(BODY | {"max_tokens": n}) for n in asked) + LAST)
    told = [int(part.partition(b",")[0]) for part in answer.split(b'"completion_tokens":')[1:]]
    assert told == asked and answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("ahead", [100, 60_000])
def test_a_request_behind_a_large_body_is_not_taken_for_a_large_head(server: Running, ahead: int) -> None:
    """The end of a body and the beginning of the next head come in one read."""
    large = post(BODY | {"user": "a" * 200_000})
    second = post(BODY, f"X-Large: {'a' * ahead}\r\n")
    pieces = [large + second[: ahead // 2], second[ahead // 2 :], LAST]
    for data in (pieces, [b"".join(pieces)]):
        answer = talk(server, *data)
        assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b'"completion_tokens":3') == 2


@pytest.mark.parametrize("before", [b"", post(BODY | {"user": "a" * 100_000})])
def test_a_large_head_is_refused_however_it_comes(server: Running, before: bytes) -> None:
    """Whole, in one read, it used to be taken."""
    large = LAST.replace(b"Host: x", b"Host: x\r\n" + b"X: %s\r\n" % (b"a" * 1000) * 90)
    with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
        sock.sendall(before + large)
        answer = b""
        with contextlib.suppress(ConnectionError):  # of what it did not read
            while data := sock.recv(65536):
                answer += data
    assert b"headers are larger than" in answer or not answer.endswith(b'{"status":"ok"}')


def chunked(chunks: list[bytes], trailers: bytes = b"", headers: str = "") -> bytes:
    head = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\n{JSON}{headers}Transfer-Encoding: chunked\r\n\r\n"
    return (
        head.encode()
        + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in [*chunks, b""])[:-2]
        + trailers
        + b"\r\n"
    )


def test_bodies_of_tiny_chunks_and_trailers_are_read(server: Running) -> None:
    data = json.dumps(BODY | {"user": "a" * 50_000}).encode()
    whole = chunked(bytewise(data), b"X-Checksum: 1\r\nAuthorization: none\r\n")
    answer = talk(server, whole + whole + LAST)
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b'"completion_tokens":3') == 2


ENDLESS = {
    "trailers": (b"0\r\n", b"X: aaaaaaaaaaaaaaaaaaaaaaaaa\r\n"),
    "one trailer": (b"0\r\nX: ", b"aaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    "extension": (b"1;x=", b"aaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    "empty lines": (b"0\r\n\r\n", b"\r\n\r\n\r\n"),
}


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("what", ENDLESS)
def test_what_comes_beside_a_body_is_bounded(what: str, key: str | None) -> None:
    """Trailers without end used to be collected, of clients without a key too."""
    begin, more = ENDLESS[what]
    with running(api_key=[key] if key else None) as server:
        with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
            head = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
            sent = 0
            with contextlib.suppress(ConnectionError):
                sock.sendall(head.encode() + begin)
                while sent < 8 << 20:
                    sock.sendall(more * 1000)
                    sent += len(more) * 1000
            assert sent < 8 << 20
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [b"", b"G", post(BODY) * 3])
def test_a_client_that_asks_ahead_and_goes_away_is_aborted(stream: bool, more: bytes) -> None:
    """What waits for its turn is not begun either."""
    engine = FakeEngine(delay=0.02)
    with running(engine) as server:
        with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
            sock.sendall(post(BODY | {"max_tokens": 150, "stream": stream}) + post(BODY))
            wait_until(lambda: len(engine.live) == 1)
            sock.sendall(more)
            time.sleep(0.1)
        wait_until(lambda: not engine.live, 1.5)
        assert engine.aborted == 1 and len(engine.seen) == 1
        assert not server.service.jobs and server.client.get("/health").status_code == 200


def test_what_comes_behind_requests_that_wait_is_kept_for_its_turn() -> None:
    """Slow answers, bodies that are cut anywhere, and more of them than are read ahead."""
    with running(FakeEngine(delay=0.01)) as server:
        asked = [9, 2, 5, 1, 3]
        data = b"".join(post(BODY | {"max_tokens": n, "user": "a" * 50_000}) for n in asked) + LAST
        with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
            for start in range(0, len(data), 7777):
                sock.sendall(data[start : start + 7777])
                time.sleep(0.001)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
    told = [int(part.partition(b",")[0]) for part in answer.split(b'"completion_tokens":')[1:]]
    assert told == asked and answer.endswith(b'{"status":"ok"}')


def test_a_head_that_waits_behind_others_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.http.HEAD_TIMEOUT", 0.2)
    with running(FakeEngine(delay=0.02)) as server:
        whole = post(BODY | {"max_tokens": 20}) + post(BODY) + LAST
        answer = talk(server, whole[:-20], whole[-20:])
    assert answer.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
     b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 70_000), b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
     b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_refused(server: Running, data: bytes) -> None:
    assert talk(server, data).startswith(b"HTTP/1.1 400 ")
    assert server.client.get("/health").status_code == 200


def test_what_is_no_http_does_not_fill_the_log(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "_refusals", http._Refusals())
    for _ in range(30):
        assert talk(server, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    told = [record.getMessage() for record in caplog.records if "not HTTP" in record.getMessage()]
    assert told == ["1 requests were refused that are not HTTP/1.1"]
    monkeypatch.setattr(http._refusals, "_next", 0.0)  # some time later
    talk(server, b"\x16\x03\x01\r\n\r\n")
    assert caplog.records[-1].getMessage() == "30 requests were refused that are not HTTP/1.1"


@pytest.mark.parametrize("beginning", [b"", b"GET /ping HTT", LAST.replace(b"close", b"keep-alive") + b"GET"])
def test_who_says_nothing_holds_no_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr("octavo.server.http.HEAD_TIMEOUT", 0.2)
    answer = talk(server, beginning)
    assert answer.count(b"HTTP/1.1 200") == beginning.count(b"\r\n\r\n")


def test_methods(server: Running) -> None:
    head = server.client.head("/v1/models")
    assert head.status_code == 200 and head.content == b""
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "GET"):
        assert check_error(server.client.request(method, TEXTS), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_types_that_web_pages_may_send_unasked_are_refused(server: Running, kind: str | None) -> None:
    seen = len(server.engine.seen)
    headers = {} if kind is None else {"content-type": kind}
    answer = server.client.post(TEXTS, content=json.dumps(BODY).encode(), headers=headers)
    assert "application/json" in check_error(answer, 415)["message"]
    assert len(server.engine.seen) == seen


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/ld+json"]
)
def test_types_of_json(server: Running, kind: str) -> None:
    data = json.dumps(BODY).encode()
    assert server.client.post(TEXTS, content=data, headers={"content-type": kind}).status_code == 200


def test_a_packed_body_is_refused_by_name(server: Running) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert check_error(server.client.post(TEXTS, content=b"\x1f\x8b", headers=headers), 415)["param"] == (
        "Content-Encoding"
    )


@pytest.fixture
def dev() -> Iterator[Running]:
    with running(enable_dev_endpoints=True, allowed_origins=["https://friend.example"]) as server:
        yield server


def test_pages_of_other_sites_change_nothing(dev: Running) -> None:
    """A POST without a body needs no leave: CORS would only hide the answer."""
    for site in ("cross-site", "same-site"):
        foe = {"origin": "https://foe.example", "sec-fetch-site": site}
        for path in ("/sleep", "/reset_prefix_cache"):
            check_error(dev.client.post(path, headers=foe), 403)
        check_error(dev.client.post(TEXTS, json=BODY, headers=foe), 403)
    assert dev.engine.level == 0 and not dev.engine.seen
    friend = {"origin": "https://friend.example", "sec-fetch-site": "cross-site"}
    own = {"origin": dev.url, "sec-fetch-site": "same-origin"}
    for headers in (friend, own, {"sec-fetch-site": "none"}, {}):
        assert dev.client.post(TEXTS, json=BODY, headers=headers).status_code == 200
