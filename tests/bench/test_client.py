"""The HTTP client against servers that behave and misbehave, byte for byte."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from octavo.bench.client import HttpClient, RequestFailed, Target
from octavo.errors import ConfigError
from tests.bench.scripted import answer, chunk, event, scripted, start_stream


def post(url: str, count: int = 1, timeout: float = 20.0, **headers: str):
    """(status, events, body) of requests sent one after the other over one client."""

    async def main():
        client = HttpClient(Target.parse(url), headers, timeout)
        found = []
        for _ in range(count):
            events: list[bytes] = []
            response = await client.post("/v1/x", b"{}", lambda now, data, to=events: to.append(data))
            found.append((response.status, events, response.body))
        client.close()
        return found

    return asyncio.run(main())


def test_events_are_found_however_the_bytes_are_cut():
    async def handler(request, writer):
        start_stream(writer)
        text = ": comment\n\n" + 'data: {"a": "é"}\r\n\r\n' + "event: x\ndata:2\n\n" + "data: [DONE]\n\n"
        for byte in text.encode():
            chunk(writer, bytes([byte]))
            await writer.drain()
        chunk(writer, b"")

    with scripted(handler) as server:
        [(status, events, body)] = post(server.url, authorization="Bearer k")
        assert (status, body) == (200, b"")
        assert events == ['{"a": "é"}'.encode(), b"2", b"[DONE]"]
        assert server.requests[0].headers["authorization"] == "Bearer k"
        assert server.requests[0].path == "/v1/x"


def test_a_connection_is_used_again_and_replaced_when_the_server_closes_it():
    async def handler(request, writer):
        answer(writer, {"n": request.number})
        if request.number == 1:
            await writer.drain()
            writer.close()

    with scripted(handler) as server:
        found = post(server.url, 4)
        assert [status for status, _, _ in found] == [200] * 4
        assert [r.connection for r in server.requests] == [0, 0, 1, 1]


def test_an_answer_without_length_ends_with_its_connection():
    async def handler(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event(b"1"))
        await writer.drain()
        writer.close()

    with scripted(handler) as server:
        assert post(server.url, 2) == [(200, [b"1"], b"")] * 2


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"", "connection was closed"),
        (b"SSH-2.0-OpenSSH_9\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "connection was closed"),
    ],
)
def test_a_broken_answer_is_told(reply, told):
    async def handler(request, writer):
        writer.write(reply)
        await writer.drain()
        writer.close()

    with scripted(handler) as server, pytest.raises(RequestFailed, match=told):
        post(server.url)


def test_a_late_answer_is_given_up():
    async def handler(request, writer):
        start_stream(writer)
        chunk(writer, event(b"1"))
        await writer.drain()
        await asyncio.sleep(30)

    begin = time.monotonic()
    with scripted(handler) as server, pytest.raises(RequestFailed, match=r"no complete answer within 0.2 s"):
        post(server.url, timeout=0.2)
    assert time.monotonic() - begin < 10


def test_nobody_there():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # taken, but nobody listens
        with pytest.raises(RequestFailed, match="nothing listens at http://127.0.0.1:"):
            post(f"http://127.0.0.1:{sock.getsockname()[1]}")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://h", ("http", "h", 80, "")),
        ("http://h:8000/v1/", ("http", "h", 8000, "")),
        ("https://h/api/v1", ("https", "h", 443, "/api")),
        ("http://[::1]:9", ("http", "::1", 9, "")),
    ],
)
def test_addresses(url, parts):
    target = Target.parse(url)
    assert (target.scheme, target.host, target.port, target.prefix) == parts


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://[::1"]
)
def test_what_is_no_address_is_named(url):
    with pytest.raises(ConfigError, match="is not an address"):
        Target.parse(url)


def test_a_header_cannot_smuggle_another():
    with pytest.raises(ConfigError, match="header 'a'"):
        HttpClient(Target.parse("http://h"), {"a": "b\r\nc: d"})
