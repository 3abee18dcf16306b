"""Metrics count each event once, however a request ends."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from octavo.server.metrics import LatencyHistogram
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

CORE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def samples(text: str) -> dict[str, float]:
    """Values by name (and finish reason) of an exposition, buckets left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert "model_name" in sample.labels
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
    assert found["vllm:request_success_total/length"] == 6
    assert found["vllm:request_success_total/abort"] == 3
    assert found["vllm:request_success_total/stop"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 7
    assert found["vllm:e2e_request_latency_seconds_count"] == 4
    assert found["vllm:request_generation_tokens_sum"] == 60
    assert found["vllm:request_prompt_tokens_sum"] == 16
    assert found["vllm:num_requests_running"] == 0
    assert found["vllm:generation_tokens_total"] == server.engine.generated
    assert found["vllm:inter_token_latency_seconds_count"] >= 2 * 9
    for name in (
        "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_total",
        "vllm:request_queue_time_seconds_count", "vllm:request_time_per_output_token_seconds_count",
    ):  # fmt: skip
        assert name in found


def test_refused_requests_leave_no_latency() -> None:
    with running() as server:
        assert server.post("/v1/completions", {"prompt": [-1]}).status_code == 400
        found = scrape(server)
    assert found["vllm:time_to_first_token_seconds_count"] == 0
    assert found["vllm:request_success_total/abort"] == 0


def test_histogram_buckets_are_cumulative() -> None:
    histogram = LatencyHistogram("x", "A test.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    family = histogram.family(("m", "0"))
    assert {s.labels["le"]: s.value for s in family.samples if "le" in s.labels} == {
        "1.0": 2,
        "2.0": 3,
        "+Inf": 4,
    }
    assert [s.value for s in family.samples if s.name.endswith("_sum")] == [12.0]


def test_memory_and_the_cache_s_times_are_told() -> None:
    import types

    from octavo.kv.residency import BOUNDS
    from octavo.messages import CoreStats, TimeHistogram
    from octavo.server.metrics import Metrics

    stats = CoreStats(
        graph_bytes=30,
        prefix_cache_evictions=4,
        host_bytes_out=1000,
        host_cache_hits=64,
        block_idle=TimeHistogram([0, 2, *[0] * (len(BOUNDS) - 1)], 0.003),
    )
    memory = {"total": 100, "weights": 60, "free": 40}
    kept = "gptq: W4A16 as W4A8, since so"
    text = Metrics(lambda: stats, "m", 128, types.MappingProxyType(memory), kept).render().decode()
    assert f'octavo:weights_info{{engine="0",model_name="m",weights="{kept}"}} 1.0' in text
    told = {s.labels.get("kind"): s.value for f in text_string_to_metric_families(text) for s in f.samples
            if s.name == "octavo:memory_bytes"}  # fmt: skip
    # Recorded steps take their memory from what was free.
    assert told == {"total": 100, "weights": 60, "free": 10, "graphs": 30}
    found = samples(text)
    assert found["octavo:prefix_cache_evictions_total"] == 4
    assert found["octavo:kv_bytes_to_host_total"] == 1000
    assert found["vllm:external_prefix_cache_hits_total"] == 64
    assert found["vllm:kv_block_idle_before_evict_seconds_count"] == 2
    assert found["vllm:kv_block_lifetime_seconds_count"] == 0
