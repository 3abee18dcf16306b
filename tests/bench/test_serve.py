"""`bench serve`'s driver: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from octavo.bench.client import HttpClient, RequestFailed, Target
from octavo.bench.serve import (
    CHAT,
    COMPLETIONS,
    Driver,
    RequestRecord,
    ServeOptions,
    ServeRun,
    arrival_times,
    render_serve,
    summarize_serve,
)
from octavo.bench.words import WordText
from octavo.bench.workloads import WorkItem, WorkloadSpec
from octavo.errors import ConfigError
from tests.bench.scripted import answer, chunk, event, scripted, start_stream, text_event
from tests.server.conftest import running
from tests.server.fakes import FakeEngine

SMALL = (0, 255)  # ids of the fake engine's bytes


def drive(
    url: str, items: list[WorkItem], key: str | None = None, timeout: float = 20.0, **options: Any
) -> ServeRun:
    async def main() -> ServeRun:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = HttpClient(Target.parse(url), headers, timeout)
        driver = Driver(client, ServeOptions(**{"ready_timeout": 0.0, **options}), WordText())
        try:
            await driver.prepare()
            return await driver.run(items, lambda record: None)
        finally:
            client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_our_server_counts_itself(path):
    items = WorkloadSpec(num_prompts=12, input_len=12, output_len=20, range_ratio=0.5).items(SMALL)
    with running(FakeEngine(text="plain text of one byte a token ", delay=0.001)) as server:
        run = drive(server.url, items, path=path)
        assert run.model == server.engine.config.model
        sent = server.engine.seen[1:]  # the first is the driver's own
    assert all(r.success and r.counted == "usage" and r.finish_reason == "length" for r in run.records)
    assert [r.output_tokens for r in run.records] == [i.max_tokens for i in items]
    if path == COMPLETIONS:
        assert [r.prompt_tokens for r in run.records] == [len(i.prompt_token_ids) for i in items]
        assert sorted(p for p, _, _ in sent) == sorted(i.prompt_token_ids for i in items)
    assert all(params.temperature == 0.0 for _, params, _ in sent)
    for record, item in zip(run.records, items, strict=True):
        assert len(record.itl_ms) == item.max_tokens - 1
        assert 0 < record.ttft_ms <= record.e2el_ms
        assert record.ttft_ms + sum(record.itl_ms) == pytest.approx(record.e2el_ms)
        assert record.tpot_ms == pytest.approx(sum(record.itl_ms) / (item.max_tokens - 1), abs=1e-9)
    summary = summarize_serve(run, {"e2el": 60_000.0}, (50.0, 99.0))
    assert (summary["completed"], summary["failed"]) == (12, 0)
    assert summary["total_output_tokens"] == sum(i.max_tokens for i in items)
    assert summary["output_throughput"] == pytest.approx(summary["total_output_tokens"] / run.duration_s)
    assert summary["request_goodput"] == summary["request_throughput"]
    assert summary["p50_itl_ms"] == summary["median_itl_ms"]
    assert summary["cached_tokens"] == 0
    shown = render_serve(summary, ["ttft", "itl"], (50.0, 99.0))
    assert "P99 TTFT (ms):" in shown and "TPOT" not in shown
    assert "Goodput" in shown


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_server_whose_drafts_stand_by_chance_is_found_out(path):
    for given, want in ((None, None), ({"method": "ngram", "synthetic_acceptance": "0.5"}, [0.5])):
        with running(FakeEngine(speculative_config=given)) as server:
            assert drive(server.url, [WorkItem(3, text="hi")], path=path).synthetic == want


def test_a_server_without_a_tokenizer_takes_ids():
    async def handler(request, writer):
        if request.method == "GET":
            return answer(writer, {"data": [{"id": "m"}]})
        if not isinstance(request.body.get("prompt"), list):
            return answer(writer, {"error": {"message": "no tokenizer"}}, 400)
        start_stream(writer)
        chunk(writer, text_event("x", "length"))
        chunk(writer, b"")

    with scripted(handler) as server:
        [record] = drive(server.url, [WorkItem(7, [1, 2, 3])]).records
        assert record.success
        with pytest.raises(RequestFailed, match="no tokenizer"):
            drive(server.url, [WorkItem(7, text="x")], path=CHAT)


def test_times_are_those_of_the_tokens():
    """First token after 100 ms, then three more, 50 ms apart, then the end."""

    async def handler(request, writer):
        if request.method == "GET":
            return answer(writer, {"data": [{"id": "m"}]})
        start_stream(writer)
        chunk(writer, event({"choices": [{"index": 0, "text": ""}]}))  # brings no token
        for i in range(4):
            await writer.drain()
            await asyncio.sleep(0.05 if i else 0.1)
            chunk(writer, text_event("x", "length" if i == 3 else None))
        chunk(writer, event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}))
        chunk(writer, event(b"[DONE]"))
        chunk(writer, b"")

    with scripted(handler) as server:
        [record] = drive(server.url, [WorkItem(7, [1, 2, 3])]).records
    assert (record.prompt_tokens, record.output_tokens, record.counted) == (3, 7, "usage")
    assert 100 <= record.ttft_ms < 400
    assert len(record.itl_ms) == 3
    assert all(gap >= 40 for gap in record.itl_ms)
    assert record.e2el_ms == pytest.approx(record.ttft_ms + sum(record.itl_ms))
    assert record.tpot_ms == pytest.approx(sum(record.itl_ms) / 6)  # 7 tokens in 4 chunks


def test_a_server_without_usage_is_counted_by_chunks():
    async def handler(request, writer):
        if request.method == "GET":
            return answer(writer, {"data": [{"id": "m"}]})
        if "stream_options" in request.body:
            return answer(writer, {"error": {"message": "unknown field: stream_options"}}, 422)
        start_stream(writer)
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        chunk(writer, event(role))
        for text in ("a", "b", "c"):
            chunk(writer, event({"choices": [{"index": 0, "delta": {"content": text}}]}))
        chunk(writer, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        chunk(writer, event(b"[DONE]"))
        chunk(writer, b"")

    with scripted(handler) as server:
        run = drive(server.url, [WorkItem(9, [1, 2, 3]), WorkItem(9, text="hello")], path=CHAT)
        sent = server.requests[-2].body
    assert [(r.prompt_tokens, r.output_tokens, r.counted) for r in run.records] == [
        (3, 3, "chunks"),
        (None, 3, "chunks"),
    ]
    assert sent["messages"][0]["content"].count(" ") == 2  # three words for three ids
    summary = summarize_serve(run, {})
    assert summary["total_output_tokens"] == 6
    assert summary["request_goodput"] is None
    assert "note: the server refuses stream_options: tokens are counted by chunks" in render_serve(
        summary, []
    )


def test_failures_are_counted_and_told_and_stop_nothing():
    replies = ["ok", "status", "error", "early", "closed", "garbage", "json", "slow", "ok"]

    async def handler(request, writer):
        if request.method == "GET" or request.body["prompt"] == "Hello":
            if request.method == "GET":
                return answer(writer, {"data": [{"id": "m"}]})
            kind = "ok"
        else:
            kind = replies[request.body["prompt"][0]]
        if kind == "status":
            return answer(writer, {"error": {"message": "no room", "code": "busy"}}, 503)
        if kind == "json":
            return answer(writer, {"choices": []})
        start_stream(writer)
        chunk(writer, text_event("x"))
        if kind == "error":
            chunk(writer, event({"error": {"message": "the engine\nhas stopped"}}))
        if kind == "garbage":
            chunk(writer, event(b"<html>"))
        if kind == "slow":
            await writer.drain()
            await asyncio.sleep(20)
        if kind == "closed":
            await writer.drain()
            return writer.close()
        if kind == "ok":
            chunk(writer, text_event("y", "length"))
            chunk(writer, event(b"[DONE]"))
        chunk(writer, b"")

    with scripted(handler) as server:
        run = drive(server.url, [WorkItem(2, [i]) for i in range(len(replies))], timeout=2.0)
    assert [r.success for r in run.records] == [kind == "ok" for kind in replies]
    told = dict(zip(replies, [r.error for r in run.records], strict=True))
    assert told["status"] == "HTTP 503: no room"
    assert told["error"] == "error in the stream: the engine has stopped"
    assert told["early"] == "the stream ended early"
    assert "connection was closed" in told["closed"]
    assert "not the OpenAI API's" in told["garbage"]
    assert told["json"] == "the answer is not a stream"
    assert told["slow"] == "no complete answer within 2 s"
    summary = summarize_serve(run, {"ttft": 1e6})
    assert (summary["completed"], summary["failed"]) == (2, 7)
    assert summary["total_output_tokens"] == 4  # of the answers that are whole
    assert "failed 1x: HTTP 503: no room" in render_serve(summary, [])


def test_concurrency_is_bounded_and_turns_wait_for_their_answers():
    live: set[int] = set()
    most = 0
    order: list[tuple[int, ...]] = []

    async def handler(request, writer):
        nonlocal most
        if request.method == "GET":
            return answer(writer, {"data": [{"id": "m"}]})
        live.add(request.number)
        most = max(most, len(live))
        await asyncio.sleep(0.01)
        live.discard(request.number)
        order.append(tuple(request.body["prompt"]))
        start_stream(writer)
        chunk(writer, text_event("x", "length"))
        chunk(writer, event(b"[DONE]"))
        chunk(writer, b"")

    spec = WorkloadSpec(kind="multi-turn", num_prompts=12, turns=4, input_len=4, turn_len=2, output_len=1)
    items = spec.items()
    with scripted(handler) as server:
        run = drive(server.url, items, max_concurrency=2)
    assert most == 2
    assert run.peak_concurrency == 2
    place = {prompt: i for i, prompt in enumerate(order)}
    for item in items:
        if item.after is not None:
            before = place[tuple(items[item.after].prompt_token_ids)]
            assert before < place[tuple(item.prompt_token_ids)]


def test_gaps_are_poisson_and_seeded():
    times = arrival_times(20_000, 50.0, 1.0, 3)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert times[0] == 0.0
    assert mean == pytest.approx(0.02, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)  # an exponential distribution's
    assert times == arrival_times(20_000, 50.0, 1.0, 3) != arrival_times(20_000, 50.0, 1.0, 4)
    even = arrival_times(1000, 50.0, 1e6, 0)
    assert even[-1] == pytest.approx(999 / 50, rel=1e-3)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_requests_start_at_their_times():
    with running() as server:
        run = drive(server.url, [WorkItem(2, [65]) for _ in range(10)], request_rate=50.0, seed=1)
    assert [r.scheduled_s for r in run.records] == arrival_times(10, 50.0, 1.0, 1)
    assert all(r.scheduled_s <= r.start_s < r.scheduled_s + 0.3 for r in run.records)


def test_fields_of_every_request():
    with running(api_key=["secret"], served_model_name=["one", "two"]) as server:
        items = [WorkItem(3, [65, 66])]
        run = drive(
            server.url + "/v1", items, key="secret", model="two", temperature=0.7, ignore_eos=True,
            extra_body={"top_k": 5, "seed": 9},
        )  # fmt: skip
        assert run.records[0].success
        _, params, _ = server.engine.seen[-1]
        assert (params.temperature, params.ignore_eos, params.top_k, params.seed) == (0.7, True, 5, 9)
        with pytest.raises(ConfigError, match="--api-key"):
            drive(server.url, items)
        with pytest.raises(RequestFailed, match="HTTP 404: the model 'three' is not served here"):
            drive(server.url, items, key="secret", model="three")


def test_no_server():
    with pytest.raises(RequestFailed, match=r"no server at http://127.0.0.1:1 within 0.3 s: nothing listens"):
        drive("http://127.0.0.1:1", [], ready_timeout=0.3)


def test_goodput_counts_requests_within_every_limit():
    records = [
        RequestRecord(0, 0, 0, success=True, output_tokens=5, ttft_ms=100.0, tpot_ms=10.0, e2el_ms=150.0),
        RequestRecord(1, 0, 0, success=True, output_tokens=5, ttft_ms=600.0, tpot_ms=10.0, e2el_ms=650.0),
        RequestRecord(2, 0, 0, success=True, output_tokens=5, ttft_ms=100.0, tpot_ms=90.0, e2el_ms=600.0),
        RequestRecord(3, 0, 0, success=True, output_tokens=1, ttft_ms=100.0, e2el_ms=100.0),
        RequestRecord(4, 0, 0, success=False, error="x", ttft_ms=1.0, tpot_ms=1.0),
    ]
    run = ServeRun(records, 2.0, 0.1, 5, "m", [])
    summary = summarize_serve(run, {"ttft": 500.0, "tpot": 50.0})
    assert summary["request_goodput"] == 1.0  # two of them in two seconds
    assert summary["request_throughput"] == 2.0
    assert summary["mean_tpot_ms"] == pytest.approx(110 / 3)


@pytest.mark.parametrize("options", [{"request_rate": 0.0}, {"burstiness": -1.0}, {"max_concurrency": 0}])
def test_wrong_options_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServeOptions(**options)
