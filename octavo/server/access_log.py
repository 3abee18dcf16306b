"""The access log: a line of JSON per request, with its id and without its contents."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import threading
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.request_ids import REQUEST_ID, give_id

logger = logging.getLogger(__name__)

_MOST_WAITING = 10_000  # lines that wait for a disk that is slow; more are dropped
_MOST_TEXT = 256  # characters of a path or an id
_REOPEN = b""  # among the lines: open the file again before what follows


class AccessLog:
    """Writes lines to a file, or to standard output, on a thread of its own.

    A disk that is full or slow costs lines, never a request; the log of the program tells how many.

    Raises (on construction):
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self._path = path
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._fd = self._open()
        self._torn = False  # the last line was written in part
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="octavo-access-log", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line; returns at once."""
        try:
            self._lines.put_nowait(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        except queue.Full:
            self._lose(1)

    def reopen(self) -> None:
        """Open the file by its name again, after it was moved away; lines from before go to the old one."""
        while True:
            try:
                return self._lines.put_nowait(_REOPEN)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._lines.get_nowait()
                    self._lose(1)

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        try:
            self._lines.put(None, timeout=2)
        except queue.Full:
            return
        self._thread.join(timeout=5)

    def _open(self) -> int:
        if self._path == "-":
            return 1
        try:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        except OSError as error:
            raise ConfigError(f"access_log={self._path!r} cannot be opened: {error.strerror}") from None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if line == _REOPEN:
                self._open_again()
                continue
            try:
                self._put(line)
            except OSError as error:
                self._lose(1, error)
            else:
                if self._lost:
                    logger.warning("the access log goes on; %d lines were lost", self._lost)
                    self._lost = 0
        if self._fd != 1:
            os.close(self._fd)

    def _put(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        finally:
            if written:
                self._torn = written < len(data)

    def _open_again(self) -> None:
        if self._fd == 1:
            return
        try:
            fd = self._open()
        except ConfigError as error:
            logger.error("%s; it goes on where it was", error)
            return
        os.close(self._fd)
        self._fd, self._torn = fd, False

    def _lose(self, count: int, error: OSError | None = None) -> None:
        if not self._lost:
            reason = "the disk is too slow" if error is None else error.strerror
            logger.error("lines of the access log are lost: %s", reason)
        self._lost += count


class AccessLogMiddleware:
    """Logs every request once its answer has been sent, or its client has gone."""

    def __init__(self, app: ASGIApp, log: AccessLog):
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        give_id(scope)
        entry = _Entry(send)
        try:
            await self._app(scope, receive, entry.send)
        finally:
            self._log.write(entry.told(scope))


class _Entry:
    """What is seen of one answer."""

    def __init__(self, send: Send):
        self._send = send
        self._begin = time.perf_counter()
        self._time = time.time()
        self._status: int | None = None
        self._first: float | None = None
        self._bytes = 0
        self._complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            if self._first is None:
                self._first = time.perf_counter() - self._begin
            self._bytes += len(message.get("body", b""))
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._complete = True

    def told(self, scope: Scope) -> dict[str, Any]:
        """The line."""
        begun = datetime.datetime.fromtimestamp(self._time, datetime.timezone.utc)
        client = scope.get("client")
        return {
            "time": begun.isoformat(timespec="milliseconds"),
            "request_id": scope[REQUEST_ID][:_MOST_TEXT],
            "client": client[0][:_MOST_TEXT] if client else None,
            "method": scope["method"],
            "path": scope["path"][:_MOST_TEXT],
            "status": self._status,
            "seconds": round(time.perf_counter() - self._begin, 6),
            "first_byte_seconds": None if self._first is None else round(self._first, 6),
            "bytes_sent": self._bytes,
            "complete": self._complete,
        }
