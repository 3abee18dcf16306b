"""Drives any OpenAI-compatible server with a workload and measures what its clients would see.

docs/bench.md defines each figure.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from octavo.bench.bounds import at_least
from octavo.bench.client import HttpClient, HttpResponse, RequestFailed
from octavo.bench.report import Row, table
from octavo.bench.statistics import describe, meets, percentile_name
from octavo.bench.stream import Answer, error_text
from octavo.bench.workloads import WorkItem
from octavo.errors import ConfigError

T = TypeVar("T")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (the first excluded)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@dataclass(frozen=True)
class ServeOptions:
    """How a workload is sent.

    Attributes:
        path: `CHAT` or `COMPLETIONS`.
        request_rate: requests started per second, with Poisson arrivals; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, lower is burstier.
        max_concurrency: most requests under way; a later one starts when there is room.
        extra_body: further fields of every request.
        ready_timeout: seconds to wait for the server to be there.
    """

    path: str = COMPLETIONS
    model: str | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    ready_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not valid: give a number above 0")
        at_least(self, max_concurrency=1)


@dataclass
class RequestRecord:
    """One request. Times are seconds since the start of the run, or milliseconds by their names' end.

    `prompt_tokens` and `output_tokens` are the server's usage, else what was sent (None if text) and the
    number of chunks; `counted` says which: usage or chunks.
    """

    index: int
    scheduled_s: float
    start_s: float
    success: bool = False
    error: str | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: str = "chunks"
    finish_reason: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    itl_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float | None]:
        """What goodput is judged by; the request's mean stands for its inter-token latencies."""
        itl = sum(self.itl_ms) / len(self.itl_ms) if self.itl_ms else None
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "itl": itl, "e2el": self.e2el_ms}


@dataclass
class ServeRun:
    """What happened. `notes` are for the reader of the table, `profile` is the server's answer about one,
    `synthetic` the rates by which drafts stood, if by chance."""

    records: list[RequestRecord]
    duration_s: float
    client_cpu_share: float
    peak_concurrency: int
    model: str
    notes: list[str]
    profile: dict[str, Any] | None = None
    synthetic: list[float] | None = None


class Driver:
    """Sends a workload to one server. `notes` collects what the reader of the figures must know."""

    def __init__(self, client: HttpClient, options: ServeOptions, to_text: Callable[[list[int]], str]):
        self.client = client
        self.options = options
        self.model = options.model or ""
        self.notes: list[str] = []
        self._to_text = to_text
        self._with_usage = True
        self._running = self._peak = 0
        self._synthetic: list[float] | None = None  # what an answer was marked with

    async def prepare(self) -> None:
        """Wait until the server is there, find the model's name, and send one short request.

        Raises:
            RequestFailed: no server in time, or it refuses the request.
        """
        response = await self._wait_ready()
        if not self.model:
            self.model = _first_model(response)
        probe = WorkItem(2, text="Hello")
        answer, refusal = await self._send(probe)
        if refusal is not None and refusal.status in (400, 422) and b"stream_options" in refusal.body:
            self._with_usage = False
            self.notes.append("the server refuses stream_options: tokens are counted by chunks")
            answer, refusal = await self._send(probe)
        if refusal is not None and refusal.status == 400 and self.options.path == COMPLETIONS:
            # A server without a tokenizer takes ids alone.
            by_ids, _ = await self._send(WorkItem(2, [1, 2, 3]))
            answer = answer if by_ids.error is not None else by_ids
        if answer.error is not None:
            raise RequestFailed(f"the first request to {self.client.target.url}{self.options.path} failed: "
                                f"{answer.error}")  # fmt: skip

    def limit(self, max_concurrency: int) -> None:
        """Change how many requests may be under way, for the runs to come."""
        self.options = replace(self.options, max_concurrency=max_concurrency)
        self._peak = 0

    async def start_profile(self) -> None:
        """Let the server record its next steps.

        Raises:
            RequestFailed: it does not.
        """
        await self._profile("start")

    async def stop_profile(self) -> dict[str, Any]:
        """End the profile; what the server tells of it (Octavo: `trace`, `summary`, `num_steps`).

        Raises:
            RequestFailed: there is none.
        """
        return await self._profile("stop")

    async def _profile(self, verb: str) -> dict[str, Any]:
        response = await self.client.post(f"/{verb}_profile", b"{}")
        if response.status == 404:
            raise RequestFailed(
                f"{self.client.target.url} has no /{verb}_profile: start `octavo serve` with "
                "--torch-profiler-dir"
            )
        if response.status != 200:
            raise RequestFailed(f"/{verb}_profile: HTTP {response.status}: {error_text(response.body)}")
        try:
            told = msgspec.json.decode(response.body)
        except msgspec.DecodeError:  # nothing, or words: what other servers say
            told = None
        return told if isinstance(told, dict) else {}

    async def run(self, items: Sequence[WorkItem], on_done: Callable[[RequestRecord], None]) -> ServeRun:
        """Send every request at its time; `on_done` gets each record as it is complete."""
        options = self.options
        arrivals = arrival_times(len(items), options.request_rate, options.burstiness, options.seed)
        room = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else nullcontext()
        finished = [asyncio.Event() for _ in items]
        start, cpu = time.perf_counter(), time.process_time()

        async def one(index: int, item: WorkItem) -> RequestRecord:
            try:
                delay = start + arrivals[index] - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                if item.after is not None:
                    await finished[item.after].wait()
                async with room:
                    record = await self._measure(index, item, start, arrivals[index])
            finally:
                finished[index].set()
            on_done(record)
            return record

        records = await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))
        seconds = time.perf_counter() - start
        share = (time.process_time() - cpu) / seconds
        if share > 0.8:
            self.notes.append(f"the client was busy {share:.0%} of the time: it may be what was measured")
        sources = {r.counted for r in records if r.success}
        if "chunks" in sources and self._with_usage:
            self.notes.append("the server gave no usage: tokens are counted by chunks of the stream")
        return ServeRun(
            records, seconds, share, self._peak, self.model, self.notes, synthetic=self._synthetic
        )

    async def _measure(self, index: int, item: WorkItem, start: float, scheduled: float) -> RequestRecord:
        self._running += 1
        self._peak = max(self._peak, self._running)
        begin = time.perf_counter()
        record = RequestRecord(index, scheduled, begin - start)
        try:
            answer, _ = await self._send(item)
        finally:
            self._running -= 1
        record.status, record.error = answer.status, answer.error
        record.success = answer.error is None
        record.finish_reason = answer.finish_reason
        self._synthetic = answer.synthetic or self._synthetic
        if answer.usage is not None:
            record.counted = "usage"
            record.prompt_tokens, record.output_tokens = (
                answer.usage.prompt_tokens,
                answer.usage.completion_tokens,
            )
            details = answer.usage.prompt_tokens_details
            record.cached_tokens = None if details is None else details.cached_tokens
        else:
            record.prompt_tokens = len(item.prompt_token_ids) or None
            record.output_tokens = len(answer.times)
        if record.success:
            _fill_times(record, answer, begin)
        return record

    async def _send(self, item: WorkItem) -> tuple[Answer, HttpResponse | None]:
        """The answer, and the HTTP response if it was a refusal."""
        answer = Answer()
        response = None
        try:
            response = await self.client.post(self.options.path, self._body(item), answer.on_event)
            answer.end(response)
        except RequestFailed as error:
            answer.error = answer.error or str(error)
        return answer, response if response is not None and response.status != 200 else None

    def _body(self, item: WorkItem) -> bytes:
        options = self.options
        body: dict[str, Any] = {"model": self.model, "max_tokens": item.max_tokens, "stream": True}
        if options.path == CHAT:
            content = item.text if item.text is not None else self._to_text(item.prompt_token_ids)
            body["messages"] = item.messages or [{"role": "user", "content": content}]
        else:
            body["prompt"] = item.prompt
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if self._with_usage:
            body["stream_options"] = {"include_usage": True}
        if options.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | options.extra_body)

    async def _wait_ready(self) -> HttpResponse:
        until = time.monotonic() + self.options.ready_timeout
        while True:
            try:
                response = await self.client.get("/v1/models")
                if response.status in (401, 403):
                    raise ConfigError(
                        f"{self.client.target.url} answers {response.status}: give its key with --api-key or "
                        "in OPENAI_API_KEY"
                    )
                if response.status < 500:
                    return response
                reason = f"it answers {response.status}"
            except RequestFailed as error:
                reason = str(error)
            if time.monotonic() >= until:
                raise RequestFailed(
                    f"no server at {self.client.target.url} within {self.options.ready_timeout:g} s: {reason}"
                )
            await asyncio.sleep(0.2)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where it exists, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:  # not built for every platform
        return asyncio.run(work)
    return uvloop.run(work)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests start: gaps are gamma distributed with mean 1 / rate, the first is at 0."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def _first_model(response: HttpResponse) -> str:
    try:
        return str(msgspec.json.decode(response.body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"/v1/models answers {response.status} without a model's name: give --model"
        ) from None


def _fill_times(record: RequestRecord, answer: Answer, begin: float) -> None:
    times = answer.times or [answer.last]  # an answer without text: its end is its first token
    record.ttft_ms = (times[0] - begin) * 1e3
    record.e2el_ms = (max(answer.last, times[-1]) - begin) * 1e3
    record.itl_ms = [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]
    if record.output_tokens > 1:
        record.tpot_ms = (times[-1] - times[0]) * 1e3 / (record.output_tokens - 1)


def summarize_serve(
    run: ServeRun, goodput: dict[str, float], percentiles: Sequence[float] = (90.0, 99.0)
) -> dict[str, Any]:
    """All figures, with the names of vLLM's result files."""
    good = [r for r in run.records if r.success]
    prompt = sum(r.prompt_tokens or 0 for r in good)
    output = sum(r.output_tokens for r in good)
    known = [r.cached_tokens for r in good if r.cached_tokens is not None]
    seconds = run.duration_s
    samples: dict[str, list[float]] = {
        name: [v for r in good if (v := r.figures()[name]) is not None] for name in METRICS
    }
    samples["itl"] = [gap for r in good for gap in r.itl_ms]
    summary: dict[str, Any] = {
        "model": run.model,
        "duration_s": seconds,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_tokens": sum(known) if known else None,
        "cache_hit_rate": sum(known) / prompt if known and prompt else None,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(meets(r.figures(), goodput) for r in good) / seconds if goodput else None,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_concurrent_requests": run.peak_concurrency,
        "counted_by": sorted({r.counted for r in good}),
        "client_cpu_share": run.client_cpu_share,
        "errors": dict(Counter(r.error for r in run.records if not r.success).most_common()),
        "notes": run.notes,
        "profile": run.profile,
    }
    for name, values in samples.items():
        figures = describe(values, percentiles)
        summary |= {f"{key}_{name}_ms": value for key, value in figures.items() if key != "count"}
    return summary


def render_serve(
    summary: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float] = (90.0, 99.0)
) -> str:
    """The figures as a table; `metrics` are those whose percentiles are shown."""
    first: list[Row] = [
        ("Model", summary["model"]),
        ("Successful requests", summary["completed"]),
        ("Failed requests", summary["failed"]),
        ("Duration (s)", summary["duration_s"]),
        ("Input tokens", summary["total_input_tokens"]),
        ("Output tokens", summary["total_output_tokens"]),
    ]
    if summary["cached_tokens"] is not None:
        first.append(("Input tokens from the prefix cache", summary["cached_tokens"]))
    first += [
        ("Most requests at once", summary["max_concurrent_requests"]),
        ("Requests (req/s)", summary["request_throughput"]),
    ]
    if summary["request_goodput"] is not None:
        first.append(("Goodput (req/s)", summary["request_goodput"]))
    first += [
        ("Output tokens (tok/s)", summary["output_throughput"]),
        ("Input and output tokens (tok/s)", summary["total_token_throughput"]),
    ]
    keys = ["mean", "median", *(percentile_name(p) for p in percentiles)]
    sections: list[tuple[str, Sequence[Row]]] = [("", first)]
    for name in metrics:
        rows = [(f"{k.capitalize()} {name.upper()} (ms)", summary[f"{k}_{name}_ms"]) for k in keys]
        sections.append((METRICS[name], rows))
    text = table("Serving", sections)
    for message, count in list(summary["errors"].items())[:5]:
        text += f"\nfailed {count}x: {message}"
    text += "".join(f"\nnote: {note}" for note in summary["notes"])
    profile = summary["profile"]
    return text if profile is None else f"{text}\nprofile, on the server: {profile.get('trace', 'written')}"


def records_as_json(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Plain values for a result file."""
    return [asdict(record) for record in records]
