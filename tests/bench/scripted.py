"""An HTTP server that does what a test says, byte for byte, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Writer = asyncio.StreamWriter
Handler = Callable[["Request", Writer], Awaitable[None]]


@dataclass
class Request:
    """What came in. `number` counts from 0; `connection` is the same for requests of one connection."""

    number: int
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Scripted:
    """A running server. The handler writes the answer; a connection is kept unless the handler closes it."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)


@contextlib.contextmanager
def scripted(handler: Handler) -> Iterator[Scripted]:
    state = Scripted()
    loop = asyncio.new_event_loop()
    connections = iter(range(1 << 30))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        connection = next(connections)
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        # Cancelled when the test ends; asyncio would log a task that ends so.
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else None
                request = Request(len(state.requests), connection, method, path, headers, body)
                state.requests.append(request)
                await handler(request, writer)
                await writer.drain()
        writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def answer(writer: Writer, value: Any, status: int = 200) -> None:
    """A JSON answer."""
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def start_stream(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunk(writer: Writer, data: bytes) -> None:
    """One chunk of HTTP's chunked encoding; an empty one ends the answer."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})
