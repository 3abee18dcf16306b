"""Uvicorn's fast HTTP protocol with what it lacks: bounds on heads and trailers, bodies of requests that
offer an upgrade, hang-ups of clients that ask ahead, and answers that HTTP/1.0 clients can read."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers (what uvicorn's other protocol, h11, allows as well)."""

MOST_FRAMING = 16
"""Bytes of chunk sizes, their extensions and trailers per byte of a body, beyond `MAX_HEAD` of them (a
chunk of one byte has 5)."""

HEAD_TIMEOUT = 60.0
"""Seconds within which a head must have arrived: who connects and says nothing holds no place for ever."""

_PIECE = 16 * 1024
"""Bytes that are parsed at a time: a piece with the end of a body and the beginning of a head counts for
neither, so that `MAX_HEAD` is never cut short, and exceeded by a piece at most."""

TELL_EVERY = 10.0
"""Seconds between lines of the log about what is no HTTP: whoever can connect could fill a disk with them."""

_FRAMING = (b"content-length", b"transfer-encoding")


class _Refusals:
    """Counts requests that are not HTTP, and tells of them now and then."""

    def __init__(self) -> None:
        self._count = 0
        self._next = 0.0

    def add(self, logger: logging.Logger) -> None:
        """One more."""
        self._count += 1
        now = time.monotonic()
        if now >= self._next:
            logger.warning("%d requests were refused that are not HTTP/1.1", self._count)
            self._count, self._next = 0, now + TELL_EVERY


_refusals = _Refusals()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses requests whose head is larger than `MAX_HEAD`, which httptools would collect without end, or
    takes longer than `HEAD_TIMEOUT`.

    An `Upgrade` is an offer that a server may pass over (RFC 9110, 7.8), as this one does. Java's HttpClient
    makes one with every first request; httptools takes what follows such a head for another protocol's.
    """

    _head: int | None = None  # bytes of the head that is arriving; None between heads
    _patience: asyncio.TimerHandle | None = None  # with a head that is to arrive
    _again = False  # the framing of a head that is known is being told to a new parser
    _begun = False  # a head began in the piece that is being parsed
    _taken = 0  # bytes that came with a body or after it
    _body = 0  # those of them that are the body's
    _ahead = b""  # what came after requests that wait for their turn
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        answering = self._answering
        if answering is not None and not answering.response_complete:
            # Uvicorn tells the request that came last, which may not have had its turn.
            answering.disconnected = True
            answering.message_event.set()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        if self.pipeline:  # what is missing may be there, and is not read yet
            self._await_head()
        else:
            self.transport.close()

    def _have_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PIECE):
            if self.pipeline:
                # Read but not parsed: who reads nothing does not see that the client has gone.
                self._ahead += data[start:]
                if len(self._ahead) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
                return
            self._parse(data[start : start + _PIECE])
            if self.transport.is_closing():
                return

    def _parse(self, data: bytes) -> None:
        size, self._begun = len(data), False
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._pass_over_upgrade()
            except httptools.HttpParserError:
                _refusals.add(self.logger)
                self.send_400_response("this is not a valid HTTP/1.1 request")
                return
        if self._head is not None and not self._begun:
            self._head += size
            if self._head > MAX_HEAD:
                self.send_400_response(f"the request's headers are larger than {MAX_HEAD} bytes: send less")
        elif self._head is None:
            self._taken += size
            if self._taken - self._body > MAX_HEAD + MOST_FRAMING * self._body:
                self.send_400_response("the request has more chunk sizes, extensions and trailers than body")

    def _pass_over_upgrade(self) -> None:
        """Go on with the request's body, and with requests after it."""
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._again = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))

    def on_message_begin(self) -> None:
        if not self._again:
            super().on_message_begin()
            self._head, self._begun = 0, True
            self._taken = self._body = 0
            self._await_head()

    def on_url(self, url: bytes) -> None:
        if not self._again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._again and self._head is not None:  # trailers are passed over (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._again:
            self._again = False
            return
        self._head = None
        self._have_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            # Its task has not begun yet.
            self.cycle.__class__ = _OldCycle
        if self.pipeline:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ahead and not self.pipeline and not self.transport.is_closing():
            ahead, self._ahead = self._ahead, b""
            self.data_received(ahead)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body is still to come
            super().on_message_complete()


class _OldCycle(RequestResponseCycle):
    """A request of HTTP/1.0 and its answer, whose end the closed connection shows if its length does not:
    such clients do not know chunks."""

    _until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                self._until_close = True
                self.chunked_encoding = False
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
