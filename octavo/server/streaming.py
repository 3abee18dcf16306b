"""Answers as server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.outputs import RequestOutput
from octavo.server.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"

# Ends of lines to Unicode though not to the standard: clients that split decoded text would cut an event.
_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]
_encoder = msgspec.json.Encoder()
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass each event on at once
]


class AsgiResponse(Protocol):
    """Anything that can answer an HTTP request."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...


def event(value: msgspec.Struct) -> bytes:
    """One server-sent event that holds `value` as JSON."""
    return b"data: " + _one_line(value) + b"\n\n"


def named_event(value: msgspec.Struct) -> bytes:
    """The same of a struct with a tag, which is the event's name too."""
    name = str(value.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _one_line(value) + b"\n\n"


def is_text(out: RequestOutput) -> bool:
    """Whether a result adds to the text of one choice, and ends nothing."""
    return len(out.outputs) == 1 and out.outputs[0].finish_reason is None


class TextEvents:
    """Events that differ in one text alone, and are encoded once: the text is put in its place.

    Args:
        make: makes the event's value with a given text; it must hold this text once.
    """

    def __init__(self, make: Callable[[str], msgspec.Struct]):
        mark = secrets.token_hex(16)  # what clients can name (ids, models) must not look like it
        self._before, self._after = event(make(mark)).split(b'"' + mark.encode() + b'"')

    def event(self, text: str) -> bytes:
        """The event with this text: the same bytes as `event` of the value."""
        return self._before + _one_line(text) + self._after


def _one_line(value: msgspec.Struct | str) -> bytes:
    data = _encoder.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


class EventStream:
    """An answer made of events; each item of `events` is one write (all events of an engine step).

    Errors before the first item propagate, so that they get their own status; later ones become
    an event, since the status has been sent.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]):
        self._events = events
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            data = await anext(events)
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                await self.fail(as_api_error(error), send)
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError, send: Send) -> None:
        """End a stream that has begun with an error event."""
        await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work` (whose request body has been read) and cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
