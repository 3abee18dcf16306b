"""What the server sees of its requests: how long they take, how large they are, how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import Metric

from octavo.errors import EngineAsleepError, RequestAbortedError, RequestError
from octavo.messages import TOKEN_BOUNDS
from octavo.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.metrics.families import (
    N_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    Namer,
    ValueHistogram,
    powers,
)

FINISH_REASONS = ("stop", "length", "abort", "error")


class RequestHistograms:
    """Histograms over requests, and the count of choices by how they ended. For one thread."""

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len
        self._histograms: list[ValueHistogram] = []
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        histogram, lengths = self._histogram, powers(max_model_len)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BOUNDS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first schedule.", REQUEST_BUCKETS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "First schedule to first token.", REQUEST_BUCKETS
        )
        self.decode = histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS)
        self.inference = histogram(
            "request_inference_time_seconds", "First schedule to last token.", REQUEST_BUCKETS
        )
        self.prompt_len = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.computed_len = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that no cache served.", lengths
        )
        self.output_len = histogram("request_generation_tokens", "Tokens generated for a request.", lengths)
        self.longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", lengths
        )
        self.params_n = histogram("request_params_n", "The request's n.", N_BUCKETS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The request's max_tokens, or the room that it has.", lengths
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> ValueHistogram:
        self._histograms.append(ValueHistogram(name, text, buckets))
        return self._histograms[-1]

    def collect(self, namer: Namer) -> Iterator[Metric]:
        """All of them now."""
        for histogram in self._histograms:
            yield histogram.family(namer)
        counts: dict[str, float] = dict(self.finished)
        yield namer.counters("request_success", "Choices that ended, by reason.", "finished_reason", counts)


class RequestRecord:
    """Follows one request; each event is observed exactly once, whatever way the request ends."""

    __slots__ = ("_closed", "_metrics", "_params", "_arrival", "_begun", "_tokens", "_unfinished")

    def __init__(self, metrics: RequestHistograms, params: SamplingParams):
        self._metrics = metrics
        self._params = params
        self._arrival = time.perf_counter()
        self._begun = False
        self._tokens = [0] * params.n
        self._unfinished = params.n
        self._closed = False

    def observe(self, out: RequestOutput) -> None:
        """Take note of a result (a delta, or the only one)."""
        for choice in out.outputs:
            if choice.finish_reason is not None:
                self._unfinished -= 1
                self._metrics.finished[choice.finish_reason] += 1
            if not choice.token_ids:
                continue
            if not self._begun:
                self._begun = True
                self._metrics.ttft.observe(self._first_token(out))
            self._tokens[choice.index] += len(choice.token_ids)
        if out.finished:
            self._finish(out, time.perf_counter())

    def observe_embedding(self, out: EmbeddingRequestOutput) -> None:
        """Take note of a text's embedding, which ends it."""
        self._unfinished = 0
        self._metrics.finished["stop"] += 1
        self._observe_prompt(out, time.perf_counter())

    def _observe_prompt(self, out: RequestOutput | EmbeddingRequestOutput, now: float) -> None:
        metrics, prompt = self._metrics, len(out.prompt_token_ids)
        metrics.e2e.observe(now - self._arrival)
        metrics.prompt_len.observe(prompt)
        metrics.computed_len.observe(prompt - out.num_cached_tokens)

    def _first_token(self, out: RequestOutput) -> float:
        """Seconds to the first token; a request that reports once, at its end, tells them in its metrics."""
        told = out.metrics.first_token_time - out.metrics.arrival_time
        return told if out.finished and told > 0 else time.perf_counter() - self._arrival

    def fail(self, error: Exception) -> None:
        """The request ends with an error. One that the engine refused before any token never ran, and
        counts nowhere."""
        if not self._closed:
            self._closed = True
            if self._begun or not isinstance(error, RequestError | EngineAsleepError):
                reason = "abort" if isinstance(error, RequestAbortedError) else "error"
                self._metrics.finished[reason] += self._unfinished

    def close(self) -> None:
        """The request is over; choices that have not finished were aborted."""
        if not self._closed:
            self._closed = True
            self._metrics.finished["abort"] += self._unfinished

    def _finish(self, out: RequestOutput, now: float) -> None:
        metrics, times, prompt = self._metrics, out.metrics, len(out.prompt_token_ids)
        tokens = sum(self._tokens)
        self._observe_prompt(out, now)
        metrics.output_len.observe(tokens)
        metrics.longest.observe(max(self._tokens))
        metrics.params_n.observe(self._params.n)
        metrics.params_max_tokens.observe(self._params.max_tokens or metrics.max_model_len - prompt)
        if times.scheduled_time:
            metrics.queue.observe(times.scheduled_time - times.arrival_time)
        if times.scheduled_time and times.first_token_time:
            metrics.prefill.observe(times.first_token_time - times.scheduled_time)
        if times.first_token_time and times.last_token_time:
            decode = times.last_token_time - times.first_token_time
            metrics.decode.observe(decode)
            per_choice = tokens / self._params.n
            if per_choice > 1:
                metrics.tpot.observe(decode / (per_choice - 1))
        if times.scheduled_time and times.last_token_time:
            metrics.inference.observe(times.last_token_time - times.scheduled_time)
