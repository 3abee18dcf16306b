"""Uvicorn's fast HTTP protocol with a bound on what comes before a request's body."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers (what uvicorn's other protocol, h11, allows as well)."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses requests whose head is larger than `MAX_HEAD`, which httptools would collect without end."""

    _head: int | None = None  # bytes of the head that is arriving; None between heads

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response(f"the request's headers are larger than {MAX_HEAD} bytes: send less")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()
