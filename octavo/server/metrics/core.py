"""The engine core's own figures, read when the server is asked for its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from octavo.kv.residency import BOUNDS
from octavo.messages import ITERATION_BOUNDS, TOKEN_BOUNDS, CoreStats
from octavo.server.metrics.families import Namer
from octavo.server.metrics.throughput import Throughput

# name, what it is, field of `CoreStats`
_GAUGES = (
    ("num_requests_running", "Requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Requests that wait to be scheduled.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
    ("kv_blocks", "Blocks of the device's pool.", "kv_blocks_total"),
    ("host_kv_blocks", "Slots of the host tier.", "host_blocks_total"),
    ("host_kv_blocks_used", "Slots of the host tier that hold a block.", "host_blocks_used"),
)
# Nothing runs in an engine that has ended, whatever it told last.
_OF_RUNNING = frozenset({"num_running", "num_waiting", "kv_cache_usage", "host_blocks_used"})

_COUNTERS = (
    ("num_preemptions", "Preemptions.", "num_preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache served.", "prefix_cache_hits"),
    ("prompt_tokens", "Prompt tokens of requests that yielded a token.", "prompt_tokens"),
    ("prompt_tokens_cached", "Those of them that were not computed.", "prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_evictions", "Cached blocks that were reused.", "prefix_cache_evictions"),
    (
        "external_prefix_cache_queries",
        "Prompt tokens that the device did not have, looked up in the host tier.",
        "host_cache_queries",
    ),
    ("external_prefix_cache_hits", "Tokens of them that were copied back.", "host_cache_hits"),
    ("host_cache_evictions", "Blocks of the host tier that gave way.", "host_evictions"),
    ("host_cache_loads_failed", "Requests whose copies failed.", "host_loads_failed"),
    ("kv_bytes_to_host", "Bytes of KV copied to host memory.", "host_bytes_out"),
    ("kv_bytes_from_host", "Bytes of KV copied back from host memory.", "host_bytes_in"),
    ("kv_blocks_to_host", "Blocks copied to host memory.", "host_blocks_out"),
    ("kv_blocks_from_host", "Blocks copied back from host memory.", "host_blocks_in"),
    (
        "disk_cache_queries",
        "Tokens that neither device nor host tier had, looked up on disk.",
        "disk_cache_queries",
    ),
    ("disk_cache_hits", "Tokens of them that were read for a request.", "disk_cache_hits"),
    ("kv_blocks_to_disk", "Blocks written to disk.", "disk_blocks_out"),
    ("kv_blocks_from_disk", "Blocks read from disk.", "disk_blocks_in"),
    ("disk_failures", "Blocks that could not be read or written.", "disk_failures"),
    (
        "preemptions_resumed_by_copy",
        "Preempted requests that came back with copied KV.",
        "resumed_by_copy",
    ),
    (
        "preemptions_resumed_by_compute",
        "Preempted requests whose KV was computed again.",
        "resumed_by_compute",
    ),
)

_SPECULATION = (
    ("spec_decode_num_drafts", "Drafts that were verified.", "spec_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens of these drafts.", "spec_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Tokens of them that were accepted.", "spec_accepted_tokens"),
    (
        "kv_draft_blocks_given_back",
        "KV blocks that drafts gave back because blocks were short.",
        "draft_blocks_given_back",
    ),
)

_PIPELINE = (
    ("pipeline_stage_seconds", "Seconds that pipeline stages computed.", "pipeline_stage_seconds"),
    (
        "pipeline_seconds",
        "Seconds that pipeline stages could have computed, steps being under way.",
        "pipeline_total_seconds",
    ),
)

_HISTOGRAMS = (
    ("iteration_tokens_total", "Tokens computed by a step.", ITERATION_BOUNDS, "iteration_tokens"),
    (
        "inter_token_latency_seconds",
        "Between steps that yielded tokens of the same choice.",
        TOKEN_BOUNDS,
        "token_intervals",
    ),
    (
        "kv_block_lifetime_seconds",
        "Allocation to eviction of sampled blocks.",
        BOUNDS,
        "block_lifetime",
    ),
    (
        "kv_block_idle_before_evict_seconds",
        "Last use to eviction of sampled blocks.",
        BOUNDS,
        "block_idle",
    ),
    (
        "kv_block_reuse_gap_seconds",
        "Last use to a prefix hit of sampled blocks.",
        BOUNDS,
        "block_reuse_gap",
    ),
)


class CoreMetrics:
    """Turns an engine core's figures into metrics.

    Args:
        stats: the core's latest figures.
        memory: bytes by what holds them (`ModelFacts.memory`), as they are now.
        weights: how they are kept (`ModelFacts.summary`).
        cache: the settings of the KV cache, as `cache_config_info` tells them.
        synthetic: rates by which drafts stand in a benchmark; None: the model judges them.
    """

    def __init__(
        self,
        stats: Callable[[], CoreStats],
        namer: Namer,
        memory: Callable[[], Mapping[str, int]],
        weights: str,
        cache: Mapping[str, str],
        synthetic: Sequence[float] | None = None,
    ):
        self._stats = stats
        self._namer = namer
        self._memory = memory
        self._weights = weights
        self._cache = cache
        self._synthetic = synthetic
        self._throughput = Throughput()

    def collect(self, engine_up: bool) -> Iterator[Metric]:
        """All of them now; gauges of what runs are 0 once the engine has ended."""
        stats, namer = self._stats(), self._namer
        yield namer.gauge("engine_up", "1 while the engine can serve requests, else 0.", float(engine_up))
        for name, text, field in _GAUGES:
            value = 0 if field in _OF_RUNNING and not engine_up else getattr(stats, field)
            yield namer.gauge(name, text, value)
        yield from self._rates(stats)
        yield self._cache_config(stats)
        yield namer.gauge("weights_info", "How weights are kept and computed on.", 1, weights=self._weights)
        if engine_up:  # one that has ended holds nothing, and what is free then was not measured
            yield self._by_kind(stats)
        for name, text, field in _COUNTERS:
            yield namer.counter(name, text, getattr(stats, field))
        yield from self._speculation(stats)
        yield from self._pipeline(stats, engine_up)
        for name, text, bounds, field in _HISTOGRAMS:
            counted = getattr(stats, field)
            yield namer.histogram(name, text, bounds, counted.counts, counted.total)

    def _rates(self, stats: CoreStats) -> Iterator[Metric]:
        prompt, generated = self._throughput.rates(stats.prompt_tokens, stats.generation_tokens)
        yield self._namer.gauge(
            "avg_prompt_throughput_toks_per_s", "Prompt tokens per second of late.", prompt
        )
        yield self._namer.gauge(
            "avg_generation_throughput_toks_per_s", "Generated tokens per second of late.", generated
        )

    def _cache_config(self, stats: CoreStats) -> Metric:
        blocks = {
            "num_gpu_blocks": str(stats.kv_blocks_total),  # the device's, a GPU or not: vLLM's name
            "num_cpu_blocks": str(stats.host_blocks_total),
        }
        return self._namer.gauge("cache_config_info", "Settings of the KV cache.", 1, **self._cache, **blocks)

    def _by_kind(self, stats: CoreStats) -> GaugeMetricFamily:
        """The memory ledger; recorded steps come as they are first met, out of what was free."""
        held: dict[str, float] = dict(self._memory())
        if held and stats.graph_bytes:
            held["graphs"] = stats.graph_bytes
            held["free"] = held.get("free", 0) - stats.graph_bytes
        return self._namer.gauges("memory_bytes", "Memory by what holds it, measured at start.", "kind", held)

    def _pipeline(self, stats: CoreStats, engine_up: bool) -> Iterator[Metric]:
        """How busy the pipeline's stages are; nothing where there is one."""
        if not stats.pipeline_total_seconds:
            return
        yield self._namer.gauge(
            "pipeline_bubble_perc",
            "Share of the pipeline stages' time in which they waited while steps were under way, 0 to 1.",
            stats.pipeline_bubble if engine_up else 0,
        )
        for name, text, field in _PIPELINE:
            yield self._namer.counter(name, text, getattr(stats, field))

    def _speculation(self, stats: CoreStats) -> Iterator[Metric]:
        """What became of drafts; nothing while none is made."""
        if self._synthetic is not None:
            yield self._namer.gauges(
                "spec_decode_synthetic_acceptance",
                "Benchmark: drafts stand by chance, this likely if all before them do.",
                "position",
                {str(place): rate for place, rate in enumerate(self._synthetic)},
            )
        if not stats.spec_drafts:
            return
        yield self._namer.gauge("kv_draft_blocks", "KV blocks that hold drafts' KV.", stats.draft_blocks)
        for name, text, field in _SPECULATION:
            yield self._namer.counter(name, text, getattr(stats, field))
        yield self._namer.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft.",
            "position",
            {str(place): count for place, count in enumerate(stats.spec_accepted_per_pos)},
        )
