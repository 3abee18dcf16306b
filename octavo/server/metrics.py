"""Prometheus metrics under vLLM's names, so that its dashboards carry over.

Gauges and token counters are read from the engine core when scraped; latencies are observed as
answers pass through the server.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.kv.residency import BOUNDS
from octavo.messages import CoreStats
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort")

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip  # noqa: E501
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip  # noqa: E501
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip  # noqa: E501

# Counters of the KV cache and its tiers: name, what it counts, field of `CoreStats`.
_KV_COUNTERS = (
    ("octavo:prefix_cache_evictions", "Cached blocks that were reused.", "prefix_cache_evictions"),
    (
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that the device did not have, looked up in the host tier.",
        "host_cache_queries",
    ),
    ("vllm:external_prefix_cache_hits", "Tokens of them that were copied back.", "host_cache_hits"),
    ("octavo:host_cache_evictions", "Blocks of the host tier that gave way.", "host_evictions"),
    ("octavo:host_cache_loads_failed", "Requests whose copies failed.", "host_loads_failed"),
    ("octavo:kv_bytes_to_host", "Bytes of KV copied to host memory.", "host_bytes_out"),
    ("octavo:kv_bytes_from_host", "Bytes of KV copied back from host memory.", "host_bytes_in"),
    ("octavo:kv_blocks_to_host", "Blocks copied to host memory.", "host_blocks_out"),
    ("octavo:kv_blocks_from_host", "Blocks copied back from host memory.", "host_blocks_in"),
    ("octavo:disk_cache_hits", "Tokens read from disk for a request.", "disk_cache_hits"),
    ("octavo:kv_blocks_to_disk", "Blocks written to disk.", "disk_blocks_out"),
    ("octavo:kv_blocks_from_disk", "Blocks read from disk.", "disk_blocks_in"),
    ("octavo:disk_failures", "Blocks that could not be read or written.", "disk_failures"),
    (
        "octavo:preemptions_resumed_by_copy",
        "Preempted requests that came back with copied KV.",
        "resumed_by_copy",
    ),
    (
        "octavo:preemptions_resumed_by_compute",
        "Preempted requests whose KV was computed again.",
        "resumed_by_compute",
    ),
)


class LatencyHistogram:
    """Counts values by bucket, for one thread (the event loop); cheap enough to observe every token."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]):
        self.name = f"vllm:{name}"
        self.text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value: in the first bucket whose upper bound is not below it."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def family(self, labels: tuple[str, str]) -> HistogramMetricFamily:
        """What Prometheus is told: cumulative counts and the sum."""
        return _family(self.name, self.text, self._buckets, self._counts, self._sum, labels)


def _family(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    counts: list[int],
    total: float,
    labels: tuple[str, str],
) -> HistogramMetricFamily:
    """A histogram of counts by bucket (one more than bounds; none counted yet: empty)."""
    bounds = [*(repr(bound) for bound in buckets), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=LABELS)
    cumulative = accumulate(counts or [0] * len(bounds))
    family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), total)
    return family


class _CoreCollector(Collector):
    """The engine core's own figures and the server's latencies, read at each scrape."""

    def __init__(
        self,
        stats: Callable[[], CoreStats],
        histograms: list[LatencyHistogram],
        labels: tuple[str, str],
        memory: Mapping[str, int],
        weights: str,
    ):
        self._stats = stats
        self._weights = weights
        self._memory = memory
        self._histograms = histograms
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait to be scheduled.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage),
            ("octavo:kv_blocks", "Blocks of the device's pool.", stats.kv_blocks_total),
            ("octavo:host_kv_blocks", "Slots of the host tier.", stats.host_blocks_total),
            (
                "octavo:host_kv_blocks_used",
                "Slots of the host tier that hold a block.",
                stats.host_blocks_used,
            ),
        )
        counters = (
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens that the prefix cache served.",
                stats.prefix_cache_hits,
            ),
            ("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            *((name, text, getattr(stats, field)) for name, text, field in _KV_COUNTERS),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._kept()
        yield self._by_kind(stats)
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        for histogram in self._histograms:
            yield histogram.family(self._labels)
        for name, text, times in (
            ("kv_block_lifetime_seconds", "Allocation to eviction of sampled blocks.", stats.block_lifetime),
            (
                "kv_block_idle_before_evict_seconds",
                "Last use to eviction of sampled blocks.",
                stats.block_idle,
            ),
            (
                "kv_block_reuse_gap_seconds",
                "Last use to a prefix hit of sampled blocks.",
                stats.block_reuse_gap,
            ),
        ):
            yield _family(f"vllm:{name}", text, BOUNDS, times.counts, times.total, self._labels)

    def _kept(self) -> GaugeMetricFamily:
        """How weights are kept and computed on, as the start-up log says it."""
        gauge = GaugeMetricFamily(
            "octavo:weights_info", "How weights are kept and computed on.", labels=(*LABELS, "weights")
        )
        gauge.add_metric((*self._labels, self._weights), 1)
        return gauge

    def _by_kind(self, stats: CoreStats) -> GaugeMetricFamily:
        """The memory ledger; recorded steps come as they are first met, out of what was free."""
        held = dict(self._memory)
        if held and stats.graph_bytes:
            held["graphs"] = stats.graph_bytes
            held["free"] = held.get("free", 0) - stats.graph_bytes
        gauge = GaugeMetricFamily(
            "octavo:memory_bytes", "Memory by what holds it, measured at start.", labels=(*LABELS, "kind")
        )
        for kind, num_bytes in held.items():
            gauge.add_metric((*self._labels, kind), num_bytes)
        return gauge


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(
        self,
        stats: Callable[[], CoreStats],
        model_name: str,
        max_model_len: int,
        memory: Mapping[str, int] | None = None,
        weights: str = "",
    ):
        """Set them up.

        Args:
            memory: bytes by what holds them (`ModelFacts.memory`).
            weights: how they are kept (`ModelFacts.summary`).
        """
        self._registry = CollectorRegistry()
        labels = (model_name, "0")
        self._histograms: list[LatencyHistogram] = []
        self._registry.register(_CoreCollector(stats, self._histograms, labels, memory or {}, weights))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> LatencyHistogram:
            self._histograms.append(LatencyHistogram(name, text, buckets))
            return self._histograms[-1]

        lengths = _powers(max_model_len)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.itl = histogram(
            "inter_token_latency_seconds",
            "Between successive outputs of a streaming request.",
            _TOKEN_BUCKETS,
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_BUCKETS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first schedule.", _REQUEST_BUCKETS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "First schedule to first token.", _REQUEST_BUCKETS
        )
        self.decode = histogram("request_decode_time_seconds", "First to last token.", _REQUEST_BUCKETS)
        self.prompt_len = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.output_len = histogram("request_generation_tokens", "Tokens generated for a request.", lengths)
        self.params_n = histogram("request_params_n", "The request's n.", (1.0, 2.0, 5.0, 10.0, 20.0))
        success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.finished = {reason: success.labels(*labels, reason) for reason in FINISH_REASONS}

    def start(self, params: SamplingParams) -> RequestRecord:
        """A record for a request that arrives now."""
        return RequestRecord(self, params)

    def render(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)


class RequestRecord:
    """Follows one request; each event is observed exactly once, whatever way the request ends."""

    __slots__ = ("_closed", "_metrics", "_params", "_arrival", "_last", "_tokens", "_unfinished")

    def __init__(self, metrics: Metrics, params: SamplingParams):
        self._metrics = metrics
        self._params = params
        self._arrival = time.perf_counter()
        self._last = 0.0
        self._tokens = 0
        self._unfinished = params.n
        self._closed = False

    def observe(self, out: RequestOutput) -> None:
        """Take note of a result (a delta, or the only one)."""
        now = time.perf_counter()
        new = 0
        for choice in out.outputs:
            new += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._unfinished -= 1
                self._metrics.finished[choice.finish_reason].inc()
        single = not self._tokens and out.finished
        if new:
            if not self._tokens:
                # A request that reports once, at its end, tells its first token's time in its metrics.
                first = out.metrics.first_token_time - out.metrics.arrival_time
                self._metrics.ttft.observe(first if single and first > 0 else now - self._arrival)
            elif self._last:
                self._metrics.itl.observe(now - self._last)
            self._tokens += new
            self._last = now
        if out.finished:
            self._finish(out)

    def refused(self) -> None:
        """The engine did not take the request: it never ran, so that nothing of it counts."""
        self._closed = True

    def close(self) -> None:
        """The request is over; choices that have not finished were aborted."""
        if not self._closed:
            self._closed = True
            if self._unfinished > 0:
                self._metrics.finished["abort"].inc(self._unfinished)

    def _finish(self, out: RequestOutput) -> None:
        self._unfinished = 0
        metrics, times = self._metrics, out.metrics
        metrics.e2e.observe(time.perf_counter() - self._arrival)
        metrics.prompt_len.observe(len(out.prompt_token_ids))
        metrics.output_len.observe(self._tokens)
        metrics.params_n.observe(self._params.n)
        if times.scheduled_time:
            metrics.queue.observe(times.scheduled_time - times.arrival_time)
        if times.scheduled_time and times.first_token_time:
            metrics.prefill.observe(times.first_token_time - times.scheduled_time)
        if times.first_token_time and times.last_token_time:
            decode = times.last_token_time - times.first_token_time
            metrics.decode.observe(decode)
            per_choice = self._tokens / self._params.n
            if per_choice > 1:
                metrics.tpot.observe(decode / (per_choice - 1))


def _powers(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most`."""
    values = [float(m * 10**e) for e in range(8) for m in (1, 2, 5)]
    return tuple(v for v in values if v <= most) or (1.0,)
