"""Metrics count each event once, however a request ends."""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import (
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from octavo.messages import TOKEN_BOUNDS, BucketCounts, CoreStats
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.metrics import Metrics
from octavo.server.metrics.families import Namer, ValueHistogram
from octavo.server.metrics.requests import RequestHistograms, RequestRecord
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

CORE_GAUGES = ("octavo:num_requests_running", "octavo:num_requests_waiting", "octavo:kv_cache_usage_perc")


def samples(text: str) -> dict[str, float]:
    """Values by name (and finish reason) of an exposition, buckets left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert "model_name" in sample.labels or sample.name.startswith(("process_", "http_"))
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                found[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return found


def scrape(server: Running) -> dict[str, float]:
    text = server.client.get("/metrics").text
    assert 'model_name="some/model"' in text
    return samples(text)


def test_counts_add_up() -> None:
    with running(FakeEngine(delay=0.002)) as server:
        body = {"prompt": "abc", "max_tokens": 10}
        for stream in (False, True):
            for n in (1, 2):
                answer = server.post("/v1/completions", body | {"stream": stream, "n": n})
                assert answer.status_code == 200
        for _ in range(3):
            with server.client.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 150}
            ) as r:
                next(r.iter_lines())
        for _ in range(200):
            if not server.engine.live:
                break
            time.sleep(0.01)
        found = scrape(server)
    assert found["octavo:request_success_total/length"] == 6
    assert found["octavo:request_success_total/abort"] == 3
    assert found["octavo:request_success_total/stop"] == 0
    assert found["octavo:time_to_first_token_seconds_count"] == 7
    assert found["octavo:e2e_request_latency_seconds_count"] == 4
    assert found["octavo:request_generation_tokens_sum"] == 60
    assert found["octavo:request_prompt_tokens_sum"] == 16
    assert found["octavo:num_requests_running"] == 0
    assert found["octavo:generation_tokens_total"] == server.engine.generated
    for name in (
        "octavo:num_requests_waiting", "octavo:kv_cache_usage_perc", "octavo:prefix_cache_queries_total",
        "octavo:prefix_cache_hits_total", "octavo:num_preemptions_total", "octavo:prompt_tokens_total",
        "octavo:request_queue_time_seconds_count", "octavo:request_time_per_output_token_seconds_count",
        "octavo:inter_token_latency_seconds_count",
    ):  # fmt: skip
        assert name in found


def test_choices_that_are_told_one_after_the_other_are_one_request() -> None:
    histograms = RequestHistograms(128)
    record = RequestRecord(histograms, SamplingParams(n=3))
    for step in range(4):
        for index in range(3):
            last = step == 3
            output = CompletionOutput(index, "a", [1], finish_reason="length" if last else None)
            record.observe(RequestOutput("r", None, [1], [output], last and index == 2))

    def told(histogram: ValueHistogram) -> tuple[float, float]:
        count, total = (
            sample.value
            for sample in histogram.family(Namer("octavo", ("m", "0"))).samples
            if sample.name.endswith(("_count", "_sum"))
        )
        return count, total

    assert told(histograms.ttft)[0] == 1
    assert told(histograms.output_len) == (1, 12) and told(histograms.longest) == (1, 4)


def test_embeddings_are_counted() -> None:
    with running(FakeEngine()) as server:
        assert server.post("/v1/embeddings", {"input": ["ab", "c"]}).status_code == 200
        assert server.post("/v1/score", {"text_1": "a", "text_2": "b"}).status_code == 200
        assert server.post("/v1/embeddings", {"input": [[]]}).status_code == 400
        found = scrape(server)
    assert found["octavo:request_success_total/stop"] == 4
    assert sum(v for name, v in found.items() if name.startswith("octavo:request_success_total")) == 4
    assert found["octavo:e2e_request_latency_seconds_count"] == 4
    assert found["octavo:request_prompt_tokens_sum"] == 3 + 2 + 2 + 2
    assert found["octavo:time_to_first_token_seconds_count"] == 0


def test_refused_requests_leave_no_latency() -> None:
    with running() as server:
        assert server.post("/v1/completions", {"prompt": [-1]}).status_code == 400
        found = scrape(server)
    assert found["octavo:time_to_first_token_seconds_count"] == 0
    assert found["octavo:request_success_total/abort"] == 0


def test_histogram_buckets_are_cumulative() -> None:
    histogram = ValueHistogram("x", "A test.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    family = histogram.family(Namer("octavo", ("m", "0")))
    assert {s.labels["le"]: s.value for s in family.samples if "le" in s.labels} == {
        "1.0": 2,
        "2.0": 3,
        "+Inf": 4,
    }
    assert [s.value for s in family.samples if s.name.endswith("_sum")] == [12.0]


def test_memory_and_the_cache_s_times_are_told() -> None:
    import types

    from octavo.kv.residency import BOUNDS

    stats = CoreStats(
        token_intervals=BucketCounts([4, 1, *[0] * (len(TOKEN_BOUNDS) - 1)], 0.055),
        graph_bytes=30,
        prefix_cache_evictions=4,
        host_bytes_out=1000,
        host_cache_hits=64,
        block_idle=BucketCounts([0, 2, *[0] * (len(BOUNDS) - 1)], 0.003),
    )
    memory = {"total": 100, "weights": 60, "free": 40}
    kept = "gptq: W4A16 as W4A8, since so"
    text = Metrics(lambda: stats, "m", 128, lambda: types.MappingProxyType(memory), kept).render().decode()
    assert f'octavo:weights_info{{engine="0",model_name="m",weights="{kept}"}} 1.0' in text
    told = {s.labels.get("kind"): s.value for f in text_string_to_metric_families(text) for s in f.samples
            if s.name == "octavo:memory_bytes"}  # fmt: skip
    # Recorded steps take their memory from what was free.
    assert told == {"total": 100, "weights": 60, "free": 10, "graphs": 30}
    found = samples(text)
    assert found["octavo:prefix_cache_evictions_total"] == 4
    assert found["octavo:kv_bytes_to_host_total"] == 1000
    assert found["octavo:external_prefix_cache_hits_total"] == 64
    assert found["octavo:kv_block_idle_before_evict_seconds_count"] == 2
    assert found["octavo:kv_block_lifetime_seconds_count"] == 0
    assert found["octavo:inter_token_latency_seconds_count"] == 5
    assert found["octavo:inter_token_latency_seconds_sum"] == 0.055


def test_a_dead_engine_is_told_and_its_requests_failed() -> None:
    with running(FakeEngine(delay=0.01)) as server:
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 150, "stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            assert scrape(server)["octavo:engine_up"] == 1
            server.call(server.engine.kill)
            assert "engine_dead" in "".join(lines)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
            assert server.post(path, body).status_code == 503  # refused, which counts nowhere
        found = scrape(server)
    assert found["octavo:engine_up"] == 0
    assert [found[name] for name in CORE_GAUGES] == [0, 0, 0]
    assert found["octavo:request_success_total/error"] == 1
    assert found["octavo:request_success_total/abort"] == 0
    assert found["octavo:time_to_first_token_seconds_count"] == 1


def test_nothing_runs_in_an_engine_that_has_ended_whatever_it_told_last() -> None:
    last = CoreStats(num_running=3, num_waiting=2, kv_cache_usage=0.5, host_blocks_used=4, num_preemptions=7)
    metrics = Metrics(lambda: last, "m", 128)
    gauges = (*CORE_GAUGES, "octavo:host_kv_blocks_used", "octavo:engine_up")
    up, down = (samples(metrics.render(alive).decode()) for alive in (True, False))
    assert [up[name] for name in gauges] == [3, 2, 0.5, 4, 1]
    assert [down[name] for name in gauges] == [0] * 5
    assert up["octavo:num_preemptions_total"] == down["octavo:num_preemptions_total"] == 7


def test_speculation_is_told_once_there_is_some() -> None:
    told = {"spec_drafts": 4, "spec_draft_tokens": 12, "spec_accepted_tokens": 7}
    assert b"spec_decode" not in Metrics(CoreStats, "m", 128).render()
    stats = CoreStats(**told, spec_accepted_per_pos=[4, 2, 1])
    text = Metrics(lambda: stats, "m", 128, prefix="vllm").render().decode()
    values = {
        s.name + s.labels.get("position", ""): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if "spec_decode" in s.name
    }
    accepted = "vllm:spec_decode_num_accepted_tokens"
    assert values == {
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 12,
        f"{accepted}_total": 7,
        f"{accepted}_per_pos_total0": 4,
        f"{accepted}_per_pos_total1": 2,
        f"{accepted}_per_pos_total2": 1,
    }


@pytest.mark.parametrize("prefix", ["", "7b", "a b", "a:b", "é"])
def test_a_prefix_that_makes_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix=.* is no beginning"):
        ServerConfig(metrics_prefix=prefix)


def test_http_requests_are_counted_by_path_method_and_answer() -> None:
    with running(FakeEngine(delay=0.01)) as server:
        body = {"prompt": "abc", "max_tokens": 2}
        for _ in range(3):
            server.post("/v1/completions", body)
        server.post("/v1/completions", body | {"stream": True})
        server.post("/v1/completions", {"prompt": [-1]})
        server.client.get("/v1/models/some/model")
        server.client.get("/v1/models/other")
        for path in ("/nothing", "/v1/nothing", "/v1/completions"):
            server.client.get(path)
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", body | {"max_tokens": 100}, timeout=0.2)
        for _ in range(100):
            if not server.engine.live:
                break
            time.sleep(0.01)
        text = server.client.get("/metrics").text
    counts = {
        tuple(s.labels[name] for name in ("handler", "method", "status")): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if s.name == "http_requests_total"
    }
    assert counts == {
        ("/v1/completions", "POST", "2xx"): 4,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/completions", "POST", "none"): 1,
        ("/v1/completions", "GET", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 2,
    }


def test_how_a_record_ends_is_counted_once() -> None:
    def ends(error: Exception | None, told: bool) -> dict[str, int]:
        histograms = RequestHistograms(128)
        record = RequestRecord(histograms, SamplingParams(n=2))
        if told:
            record.observe(RequestOutput("r", None, [1], [CompletionOutput(0, "a", [7])], finished=False))
        if error is not None:
            record.fail(error)
        record.close()
        record.close()
        return {reason: count for reason, count in histograms.finished.items() if count}

    assert ends(None, told=False) == ends(None, told=True) == {"abort": 2}
    for refusal in (RequestError("no"), EngineAsleepError("asleep")):
        assert ends(refusal, told=False) == {}
        assert ends(refusal, told=True) == {"error": 2}
    aborted = RequestAbortedError("put to sleep")
    assert ends(aborted, told=False) == ends(aborted, told=True) == {"abort": 2}
    for failure in (RequestFailedError("failed"), EngineDeadError("dead"), KeyError("ours")):
        assert ends(failure, told=False) == ends(failure, told=True) == {"error": 2}


def test_the_bubble_of_a_pipeline_is_told_where_there_is_one() -> None:
    assert "pipeline" not in Metrics(CoreStats, "some/model", 128).render().decode()
    stats = CoreStats(pipeline_bubble=0.25, pipeline_stage_seconds=6.0, pipeline_total_seconds=8.0)
    found = samples(Metrics(lambda: stats, "some/model", 128).render().decode())
    assert found["octavo:pipeline_bubble_perc"] == 0.25
    assert found["octavo:pipeline_stage_seconds_total"] == 6.0
    assert found["octavo:pipeline_seconds_total"] == 8.0
