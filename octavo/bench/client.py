"""A small HTTP client that times streamed answers: httptools on asyncio, a connection a request at a time.

It is made to cost little per event, so that with many streams the server is measured and not the client:
an event's time is taken when its bytes arrive, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError, OctavoError

OnEvent = Callable[[float, bytes], None]
"""Takes the time of arrival (`time.perf_counter`) and the data of one server-sent event."""


class RequestFailed(OctavoError):
    """A request that got no complete answer: refused, cut off, too late, or no connection."""


@dataclass
class HttpResponse:
    """Status, and the body of an answer that isn't a stream of events."""

    status: int
    body: bytes = b""


@dataclass(frozen=True)
class Target:
    """Where a server is.

    Attributes:
        prefix: path before `/v1`, without a slash at its end.
    """

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Target:
        """`http://host:port/prefix`, with or without `/v1` at its end.

        Raises:
            ConfigError: anything else.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"base_url={url!r} is not an address: write for example http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), prefix)

    @property
    def url(self) -> str:
        """The address as text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


@dataclass
class _Exchange:
    """One request under way on a connection."""

    done: asyncio.Future[HttpResponse]
    on_event: OnEvent | None
    status: int = 0
    is_stream: bool = False
    body: bytearray = field(default_factory=bytearray)


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time. `idle`: it can take the next one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle = True
        self._exchange: _Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._now = 0.0
        self._pending = b""

    def request(self, data: bytes, on_event: OnEvent | None) -> asyncio.Future[HttpResponse]:
        """Send a request; the future ends with its answer, or with ConnectionError."""
        assert self.idle and self.transport is not None
        future: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self.idle = False
        self._exchange = _Exchange(future, on_event)
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self.transport.write(data)
        return future

    def close(self) -> None:
        """Drop the connection, whatever is under way."""
        self.idle = False
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio's callbacks --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self._exchange
        self.idle = False
        self.transport = None
        if exchange is not None and exchange.status and not self._delimited:
            self.on_message_complete()  # an answer without a length ends with its connection
        self._fail(ConnectionError(f"the connection was closed{f': {error}' if error else ''}"))

    # ---- httptools' callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._delimited = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._delimited = True
        elif name == b"content-type" and self._exchange is not None:
            self._exchange.is_stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.is_stream or exchange.on_event is None:
            exchange.body += body
            return
        if self._pending:
            body = self._pending + body
        *lines, self._pending = body.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # each OpenAI event is one data line
                exchange.on_event(self._now, line[5:].strip())

    def on_message_complete(self) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None or exchange.status < 200:  # 100 Continue
            return
        self._exchange = self._parser = None
        self.idle = self.transport is not None and self._delimited and parser.should_keep_alive()
        if not self.idle:
            self.close()
        if not exchange.done.done():
            exchange.done.set_result(HttpResponse(exchange.status, bytes(exchange.body)))

    _delimited = False

    def _fail(self, error: ConnectionError) -> None:
        exchange, self._exchange, self._parser = self._exchange, None, None
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(error)
        if self.transport is not None:
            self.close()


class HttpClient:
    """Requests to one server over connections that are kept and used again.

    Args:
        headers: sent with every request.
        timeout: seconds that a whole answer may take.
    """

    def __init__(self, target: Target, headers: dict[str, str] | None = None, timeout: float = 3600.0):
        self.target = target
        self.timeout = timeout
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.scheme == "https" else None
        given = {"Host": target.url.partition("://")[2].partition("/")[0], "Accept": "*/*", **(headers or {})}
        for name, value in given.items():
            if not (name + value).isprintable() or not (name + value).isascii() or ":" in name:
                raise ConfigError(f"header {name!r} is not valid: give printable ASCII, as NAME=VALUE")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in given.items())

    async def get(self, path: str) -> HttpResponse:
        """GET `path` (below the target's prefix).

        Raises:
            RequestFailed: no answer.
        """
        return await self._exchange("GET", path, b"", None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> HttpResponse:
        """POST JSON; if the answer is a stream, `on_event` gets each event as it arrives.

        Raises:
            RequestFailed: no complete answer.
        """
        return await self._exchange("POST", path, body, on_event)

    def close(self) -> None:
        """Drop all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> HttpResponse:
        head = f"{method} {self.target.prefix}{path} HTTP/1.1\r\n{self._head}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = f"{head}\r\n".encode("ascii") + body
        try:
            return await asyncio.wait_for(self._send(data, on_event), self.timeout)
        except asyncio.TimeoutError:
            raise RequestFailed(f"no complete answer within {self.timeout:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise RequestFailed(_reason(error, self.target)) from None

    async def _send(self, data: bytes, on_event: OnEvent | None) -> HttpResponse:
        while True:
            connection, fresh = await self._connection()
            answer = connection.request(data, on_event)
            begun = connection._exchange
            try:
                response = await answer
            except ConnectionError:
                # The server may have closed a kept connection just as the request was sent.
                if fresh or (begun is not None and begun.status):
                    raise
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.idle:
                self._idle.append(connection)
            return response

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.idle and connection.transport is not None:
                return connection, False
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self.target.host, self.target.port, ssl=self._tls
        )
        return connection, True


def _reason(error: Exception, target: Target) -> str:
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return f"nothing listens at {target.url}"
    return str(error) or type(error).__name__
