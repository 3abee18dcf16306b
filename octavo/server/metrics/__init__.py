"""Prometheus metrics under vLLM's names, so that its dashboards carry over.

Gauges and token counters are read from the engine core when scraped; latencies are observed as
answers pass through the server. The text before each name's colon is a setting, `metrics_prefix`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.config import EngineConfig
from octavo.messages import CoreStats
from octavo.sampling_params import SamplingParams
from octavo.server.metrics.core import CoreMetrics
from octavo.server.metrics.families import Namer
from octavo.server.metrics.http import HttpRequests
from octavo.server.metrics.requests import RequestHistograms, RequestRecord

__all__ = ["CONTENT_TYPE", "Metrics", "RequestRecord", "cache_labels"]

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


# Labels of `cache_config_info` (vLLM's names) and the settings that they tell.
_CACHE_LABELS = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "prefix_caching_hash_algo": "prefix_caching_hash_algo",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "swap_space": "swap_space",
}


def cache_labels(config: EngineConfig) -> dict[str, str]:
    """The labels of `cache_config_info` that settings give."""
    return {label: str(getattr(config, setting)) for label, setting in _CACHE_LABELS.items()}


class Metrics(Collector):
    """All metrics of one server, in a registry of their own, with those of its process.

    Attributes:
        http: counts the requests of the application that it is put around.
    """

    def __init__(
        self,
        stats: Callable[[], CoreStats],
        model_name: str,
        max_model_len: int,
        memory: Callable[[], Mapping[str, int]] = dict,
        weights: str = "",
        *,
        prefix: str = "octavo",
        cache: Mapping[str, str] | None = None,
        synthetic_acceptance: Sequence[float] | None = None,
    ):
        """Set them up.

        Args:
            memory: bytes by what holds them (`ModelFacts.memory`), now.
            weights: how they are kept (`ModelFacts.summary`).
            prefix: stands before the colon of every name.
            cache: settings of the KV cache by name.
            synthetic_acceptance: by which drafts stand in a benchmark.
        """
        self._namer = Namer(prefix, (model_name, "0"))
        self._core = CoreMetrics(stats, self._namer, memory, weights, cache or {}, synthetic_acceptance)
        self._requests = RequestHistograms(max_model_len)
        self.http = HttpRequests()
        self._engine_up = True
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def start(self, params: SamplingParams) -> RequestRecord:
        """A record for a request that arrives now."""
        return RequestRecord(self._requests, params)

    def start_embedding(self) -> RequestRecord:
        """A record for a text that arrives now, to be embedded."""
        return RequestRecord(self._requests, SamplingParams())

    def describe(self) -> list[Metric]:
        """Nothing: registering them must not read the engine's figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them now."""
        yield from self._core.collect(self._engine_up)
        yield from self._requests.collect(self._namer)
        yield from self.http.collect()

    def render(self, engine_up: bool = True) -> bytes:
        """Everything in Prometheus's text format.

        Args:
            engine_up: whether the engine can serve requests.
        """
        self._engine_up = engine_up
        return generate_latest(self._registry)
