"""Spans of requests for OpenTelemetry, with vLLM's names, sent to an OTLP/HTTP receiver."""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import RequestAbortedError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SPAN = "llm_request"
_HEADERS = frozenset({b"traceparent", b"tracestate"})
# The trace headers of the HTTP request that the running task answers.
_carrier: ContextVar[dict[str, str]] = ContextVar("octavo_trace_headers")


class RequestTracer:
    """Makes a span of each request, a child of what the client's `traceparent` names.

    Spans are sent in batches by a thread of OpenTelemetry's; a receiver that does not answer costs a
    line in its log and the spans.
    """

    def __init__(self, endpoint: str, model_name: str):
        """Connects to nobody yet.

        Args:
            endpoint: of `octavo.server.otlp.check_endpoint`.
            model_name: as clients know it.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = os.environ.get("OTEL_SERVICE_NAME") or "octavo"
        self._provider = TracerProvider(resource=Resource.create({"service.name": named}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("octavo.server")
        self._model_name = model_name

    def start(self, request_id: str, params: SamplingParams) -> RequestTrace:
        """The span of a request that arrives now, in the task that answers it."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(_carrier.get({}))
        span = self._tracer.start_span(SPAN, context=context, kind=SpanKind.SERVER, start_time=time.time_ns())
        if span.is_recording():
            span.set_attributes(_asked(request_id, params, self._model_name))
        return RequestTrace(span)

    def flush(self) -> None:
        """Send what is there now; blocks until it is through or given up."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what is left; blocks until it is through or given up."""
        self._provider.shutdown()


class RequestTrace:
    """One request's span; ended once, whatever way the request ends."""

    def __init__(self, span: Span):
        self._span = span
        self._recording = span.is_recording()
        self._arrival = time.time()
        self._tokens = 0
        self._reasons: list[str] = []
        self._last: RequestOutput | None = None

    def observe(self, out: RequestOutput) -> None:
        """Take note of a result."""
        if not self._recording:
            return
        self._last = out
        for choice in out.outputs:
            self._tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._reasons.append(choice.finish_reason)
        if out.finished:
            self._end()

    def fail(self, error: Exception) -> None:
        """The request ends with an error."""
        from opentelemetry.trace import Status, StatusCode

        if self._recording:
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._reasons.append("abort" if isinstance(error, RequestAbortedError) else "error")
            self._end()

    def close(self) -> None:
        """The request is over; one that has not finished was aborted."""
        if self._recording:
            self._reasons.append("abort")
            self._end()

    def _end(self) -> None:
        self._recording = False
        now = time.time()
        told: dict[str, Any] = {
            "gen_ai.usage.completion_tokens": self._tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            "gen_ai.latency.e2e": now - self._arrival,
        }
        if self._last is not None:
            told |= _times(self._last)
        self._span.set_attributes(told)
        self._span.end(int(now * 1e9))


def _asked(request_id: str, params: SamplingParams, model_name: str) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
    }
    if params.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = params.max_tokens
    return asked


def _times(out: RequestOutput) -> dict[str, Any]:
    """The engine's times, as far as they were reached, and the prompt's length."""
    times = out.metrics
    told: dict[str, Any] = {"gen_ai.usage.prompt_tokens": len(out.prompt_token_ids)}
    spans = {
        "gen_ai.latency.time_in_queue": (times.arrival_time, times.scheduled_time),
        "gen_ai.latency.time_to_first_token": (times.arrival_time, times.first_token_time),
        "gen_ai.latency.time_in_model_prefill": (times.scheduled_time, times.first_token_time),
        "gen_ai.latency.time_in_model_decode": (times.first_token_time, times.last_token_time),
        "gen_ai.latency.time_in_model_inference": (times.scheduled_time, times.last_token_time),
    }
    for name, (begin, end) in spans.items():
        if begin and end:
            told[name] = end - begin
    return told


def with_trace_headers(app: ASGIApp) -> ASGIApp:
    """The application, with the trace headers of each request where `RequestTracer.start` finds them."""

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _carrier.set(
                {k.decode("ascii"): v.decode("latin-1") for k, v in scope["headers"] if k in _HEADERS}
            )
        await app(scope, receive, send)

    return noting
