"""A small OTLP/HTTP receiver: keeps the spans that it is sent."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Received:
    """One span as it came over the wire."""

    name: str
    kind: int
    trace_id: str
    parent_id: str
    seconds: float
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """Where it listens, and what came."""

    url: str
    paths: list[str] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)

    def wait(self, count: int, seconds: float = 20.0) -> list[Received]:
        """The spans, once there are `count`; fails if they don't come."""
        until = time.monotonic() + seconds
        while len(self.spans) < count and time.monotonic() < until:
            time.sleep(0.02)
        assert len(self.spans) == count, [span.name for span in self.spans]
        return self.spans


def _values(attributes: Any) -> dict[str, Any]:
    def value(given: Any) -> Any:
        kind = given.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in given.array_value.values]
        return getattr(given, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


def _handler(receiver: Receiver) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 (http.server's name)
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            receiver.paths.append(self.path)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    receiver.spans += [
                        Received(
                            span.name,
                            span.kind,
                            span.trace_id.hex(),
                            span.parent_span_id.hex(),
                            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            span.status.code,
                            _values(span.attributes),
                            resource,
                        )
                        for span in scope.spans
                    ]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """One on a free port of this machine."""
    received = Receiver("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(received))
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
