"""Spans as a receiver gets them: names and values, parents, every way that a request ends."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed")

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.otlp import check_endpoint
from tests import tiny
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.otlp_receiver import Received, Receiver, receiver
from tests.server.test_real_engine import octavo

TEXTS = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def taking() -> Iterator[Receiver]:
    with receiver() as taking:
        yield taking


def spans(server: Running, taking: Receiver, count: int) -> list[Received]:
    assert server.service.tracer is not None
    until = time.monotonic() + 5
    while server.engine.live and time.monotonic() < until:
        time.sleep(0.01)
    server.service.tracer.flush()
    return taking.wait(count)


def test_a_request_s_span_tells_what_was_asked_and_done(taking: Receiver) -> None:
    with running(FakeEngine(delay=0.002), otlp_traces_endpoint=taking.url) as server:
        body = {
            "prompt": "abc",
            "max_tokens": 10,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "request_id": "r1",
        }
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
        assert server.post(TEXTS, body, headers=headers).status_code == 200
        [span] = spans(server, taking, 1)
    assert taking.paths == ["/v1/traces"]
    assert (span.name, span.kind) == ("llm_request", 2)  # SPAN_KIND_SERVER
    assert (span.trace_id, span.parent_id, span.status) == (TRACE, PARENT, 0)
    assert span.resource["service.name"] == "octavo"
    told = span.attributes
    latencies = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.request.id": "cmpl-r1",
        "gen_ai.request.model": "some/model",
        "gen_ai.response.model": "some/model",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 10,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.completion_tokens": 20,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert set(latencies) == {
        f"gen_ai.latency.{name}"
        for name in (
            "e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode",
            "time_in_model_inference",
        )
    }  # fmt: skip
    assert all(seconds > 0 for seconds in latencies.values())
    assert latencies["gen_ai.latency.e2e"] == pytest.approx(span.seconds, abs=1e-3)


def test_without_a_parent_each_request_begins_a_trace(taking: Receiver) -> None:
    with running(otlp_traces_endpoint=f"{taking.url}/v1/traces") as server:
        for headers in ({}, {"traceparent": "no such thing"}):
            server.post(TEXTS, {"prompt": ["a", "b"], "max_tokens": 1}, headers=headers)
        found = spans(server, taking, 4)
    assert [span.parent_id for span in found] == [""] * 4
    assert len({span.trace_id for span in found}) == 4
    assert len({span.attributes["gen_ai.request.id"] for span in found}) == 4


def test_prompts_of_one_request_have_its_parent(taking: Receiver) -> None:
    with running(otlp_traces_endpoint=taking.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        server.post(TEXTS, {"prompt": ["a", "b", "c"], "max_tokens": 1, "stream": True}, headers=headers)
        server.post(TEXTS, {"prompt": "d", "max_tokens": 1})
        found = spans(server, taking, 4)
    assert [(s.trace_id, s.parent_id) for s in found[:3]] == [(TRACE, PARENT)] * 3
    assert found[3].trace_id != TRACE and not found[3].parent_id


def test_what_the_parent_does_not_sample_is_not_sent(taking: Receiver) -> None:
    with running(otlp_traces_endpoint=taking.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert server.post(TEXTS, {"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
        server.post(TEXTS, {"prompt": "b", "max_tokens": 1})
        [span] = spans(server, taking, 1)
    assert span.trace_id != TRACE


def test_other_ends(taking: Receiver) -> None:
    with running(FakeEngine(delay=0.01), otlp_traces_endpoint=taking.url) as server:
        ask = {"prompt": "abc", "max_tokens": 150, "stream": True}
        with server.client.stream("POST", TEXTS, json=ask) as response:
            next(response.iter_lines())
        assert server.post(TEXTS, {"prompt": [-1]}).status_code == 400
        [gone, refused] = sorted(spans(server, taking, 2), key=lambda span: span.status)
        with server.client.stream("POST", TEXTS, json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            server.call(server.engine.kill)
            assert "engine_dead" in "".join(lines)
        failed = spans(server, taking, 3)[-1]
    reasons = [span.attributes["gen_ai.response.finish_reasons"] for span in (gone, refused, failed)]
    assert reasons == [["abort"], ["error"], ["error"]]
    assert [span.status for span in (gone, refused, failed)] == [0, 2, 2]
    assert 0 < gone.attributes["gen_ai.usage.completion_tokens"] < 150


def test_a_receiver_that_is_not_there_costs_no_answer() -> None:
    with running(otlp_traces_endpoint="http://127.0.0.1:9") as server:
        for _ in range(3):
            assert server.post(TEXTS, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "", "/v1/traces"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no HTTP address: give one such as"):
        ServerConfig(otlp_traces_endpoint=address)


def test_the_path_of_an_address() -> None:
    assert check_endpoint("http://h:4318") == check_endpoint("http://h:4318/") == "http://h:4318/v1/traces"
    assert check_endpoint("https://h/otel/v1/traces") == "https://h/otel/v1/traces"


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, package: Any = None) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318")
    ServerConfig()


def test_the_real_server_sends_its_last_spans_as_it_ends(taking: Receiver) -> None:
    with octavo("--kv-cache-memory-bytes", "1MiB", "--otlp-traces-endpoint", taking.url) as server:
        server.stream(max_tokens=7, ignore_eos=True)
    [span] = taking.wait(1, 0.0)
    told = span.attributes
    assert told["gen_ai.usage.completion_tokens"] == 7
    assert told["gen_ai.usage.prompt_tokens"] == len(tiny.PROMPTS[0])
    inference = told["gen_ai.latency.time_in_model_inference"]
    parts = told["gen_ai.latency.time_in_model_prefill"] + told["gen_ai.latency.time_in_model_decode"]
    assert inference == pytest.approx(parts)
    assert told["gen_ai.latency.time_in_queue"] + inference <= told["gen_ai.latency.e2e"] + 0.05
