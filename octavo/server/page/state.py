"""`GET /server_state.json`: metrics, KV map and requests at one moment."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from prometheus_client.core import Metric
from starlette.responses import Response
from starlette.types import Scope

from octavo.messages import RequestInfo
from octavo.server.debug_kv import KVMapResponse, kv_map_response
from octavo.server.service import Service

CELLS = 1024
"""Most cells of the KV map."""
REQUESTS = 64
"""Most requests that are listed."""
TAIL = 48
"""Tokens of prompts and outputs that are shown where the settings allow it."""

LIFE = 0.5
"""Seconds that an answer is kept at least."""
BLOCKS_PER_SECOND = 100_000
"""Larger pools' answers are kept a second for each of so many blocks, since a map of these keeps the engine
from its steps for about 10 ms; so watching costs it a hundredth at most."""

_OURS = ("model_name", "engine")  # labels that are the same on all metrics of a server


class HistogramState(msgspec.Struct):
    """Values counted by bucket: `counts[i]` are those above bound i - 1 and up to bound i, the last those
    above all bounds; `sum` is the values' sum."""

    bounds: list[float]
    counts: list[int]
    sum: float


class RequestState(msgspec.Struct):
    """One request (choice) that has not ended; lengths in tokens, `age` in seconds since it arrived.

    `prompt` and `output` are the ends of its texts, None unless the server was started with
    --page-show-texts.
    """

    id: str
    state: str
    age: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    prompt: str | None = None
    output: str | None = None


class ServerState(msgspec.Struct):
    """One moment.

    Attributes:
        time: seconds since 1970, by the server's clock.
        draining: the server shuts down and takes no new requests.
        metrics: gauges and counters of /metrics by name, without prefix and the labels that all have;
            other labels follow the name in braces.
        histograms: those of /metrics.
        kv: the pool of KV blocks.
        requests: the first of the requests that run or wait.
    """

    time: float
    draining: bool
    metrics: dict[str, float]
    histograms: dict[str, HistogramState]
    kv: KVMapResponse
    requests: list[RequestState]


async def server_state(service: Service, scope: Scope, body: None) -> Response:
    """The handler."""
    answer = await service.page_state.get(lambda: _state(service))
    return Response(answer, media_type="application/json", headers={"cache-control": "no-store"})


async def _state(service: Service) -> bytes:
    told = await service.engine.describe_kv(CELLS, REQUESTS, TAIL if service.config.page_show_texts else 0)
    service.page_state.seconds = max(LIFE, told.num_blocks / BLOCKS_PER_SECOND)
    metrics, histograms = values(service.metrics.collect())
    now = time.time()
    return msgspec.json.encode(
        ServerState(
            time=now,
            draining=service.draining,
            metrics=metrics,
            histograms=histograms,
            kv=kv_map_response(told),
            requests=[await _request(service, info, now) for info in told.requests],
        )
    )


async def _request(service: Service, info: RequestInfo, now: float) -> RequestState:
    told = RequestState(
        id=info.request_id,
        state=info.state,
        age=max(0.0, now - info.arrival_time),
        prompt_tokens=info.num_prompt_tokens,
        output_tokens=info.num_output_tokens,
        max_tokens=info.max_tokens,
        computed_tokens=info.num_computed_tokens,
        cached_tokens=info.num_cached_tokens,
        preemptions=info.num_preemptions,
    )
    if service.config.page_show_texts and service.text.has_tokenizer:
        told.prompt = await service.text.decode(info.prompt_tail, skip_special_tokens=False)
        told.output = await service.text.decode(info.output_tail, skip_special_tokens=False)
    return told


def values(families: Iterable[Metric]) -> tuple[dict[str, float], dict[str, HistogramState]]:
    """Prometheus's families as plain values, summed over engines; see `ServerState`."""
    metrics: dict[str, float] = {}
    histograms: dict[str, HistogramState] = {}
    for family in families:
        if family.type == "histogram":
            histograms[_bare(family.name)] = _histogram(family)
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = [f'{name}="{text}"' for name, text in sample.labels.items() if name not in _OURS]
            name = _bare(sample.name) + (f"{{{','.join(labels)}}}" if labels else "")
            metrics[name] = metrics.get(name, 0) + sample.value
    return metrics, histograms


def _histogram(family: Metric) -> HistogramState:
    cumulative: dict[float, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            cumulative[bound] = cumulative.get(bound, 0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    bounds = sorted(cumulative)
    below = [0, *(int(cumulative[bound]) for bound in bounds)]
    counts = [after - before for before, after in zip(below, below[1:], strict=False)]
    return HistogramState(bounds[:-1], counts, total)  # the last bound is infinite


def _bare(name: str) -> str:
    """A metric's name without its prefix."""
    return name.rpartition(":")[2]
