"""What all endpoints share: the engine, the model's names, the threads for text, the metrics, the jobs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from msgspec import UNSET

from octavo.config import EngineConfig
from octavo.errors import EngineAsleepError, RequestError
from octavo.messages import CoreStats, KVMap, ProfileStatus, SleepStatus
from octavo.models.config import ModelConfig
from octavo.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.server.access_log import AccessLog
from octavo.server.api_keys import ApiKeys
from octavo.server.bounds import check_bounds
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics, RequestRecord, cache_labels
from octavo.server.otlp import check_endpoint
from octavo.server.page.cache import Cached
from octavo.server.params import named_by
from octavo.server.protocol.answers import Synthetic
from octavo.server.protocol.requests import SamplingFields
from octavo.server.responses.store import ResponseStore
from octavo.server.text import TextService, Tokenizer
from octavo.server.tracing import RequestTrace, RequestTracer
from octavo.step_messages import ModelFacts
from octavo.tokenization.chat_template import load_chat_template

ResultBatch = list[tuple[int, RequestOutput]]


class Engine(Protocol):
    """What the server asks of `octavo.async_llm.AsyncLLM`."""

    config: EngineConfig

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_name(self) -> str: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def cache_root(self) -> bytes: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def most_output_tokens(self) -> int | None: ...

    def default_params(self) -> SamplingParams: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def embed(
        self,
        prompt: Any,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput: ...

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> ProfileStatus: ...

    async def describe_kv(self, cells: int, requests: int = 0, tokens: int = 0) -> KVMap: ...

    async def reset_prefix_cache(self) -> None: ...

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self, level: int = 1, mode: str = "wait") -> SleepStatus: ...

    async def wake_up(self) -> SleepStatus: ...

    async def check_health(self) -> None: ...

    def stats(self) -> CoreStats: ...

    async def shutdown(self, drain_timeout: float) -> None: ...


_SHUT_DOWN = ApiError(
    503, "the server shut down before the request was finished: send it to another one", code="shutting_down"
)
_MOST_NEWS = 4  # batches of results that wait for a slow reader of many prompts, each


class Service:
    """The state of one server.

    `jobs` holds the tasks of requests that the engine is answering; `ended` those among them that the
    server itself ends, with what their clients are told. `unfinished` counts choices that the engine has, and
    `live` has the names of its requests.
    `synthetic` is what all answers are marked with where chance judges drafts.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        keys: ApiKeys | None = None,
        access_log: AccessLog | None = None,
    ):
        """`keys`: those of the settings, if they have been read already."""
        self.engine = engine
        self.config = config
        self.synthetic: Synthetic = engine.config.synthetic_acceptance or UNSET
        self.names = list(config.served_model_name or [engine.config.model or engine.model_name])
        self.created = int(time.time())
        template = engine.config.chat_template
        self.text = TextService(
            engine.tokenizer,
            engine.max_model_len,
            engine.model_config.vocab_size,
            config.tokenizer_threads,
            load_chat_template(template) if template else None,
        )
        self.metrics = Metrics(
            engine.stats,
            self.names[0],
            engine.max_model_len,
            lambda: engine.facts.memory,
            engine.facts.summary.get("weights", ""),
            prefix=config.metrics_prefix,
            cache=cache_labels(engine.config),
            synthetic_acceptance=engine.config.synthetic_acceptance,
        )
        self.responses = ResponseStore(config.response_store_bytes)
        endpoint = config.otlp_traces_endpoint
        self.tracer = RequestTracer(check_endpoint(endpoint), self.names[0]) if endpoint else None
        self.jobs: set[asyncio.Task[None]] = set()
        self.ended: dict[asyncio.Task[None], ApiError] = {}
        self.unfinished = 0
        self.live: set[str] = set()
        self.draining = False
        self.page_state = Cached(0.5)
        self.keys = keys or ApiKeys(config)
        self.access_log = access_log

    def check_model(self, name: str | None) -> str:
        """The name to answer with for the model that a request names (none: the first).

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if not name:
            return self.names[0]
        if name not in self.names:
            shown = name if len(name) <= 128 else name[:128] + "…"
            raise ApiError(
                404,
                f"the model {shown!r} is not served here: use {' or '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def names_tokens_by_id(self, body: SamplingFields) -> bool:
        """Whether log-probabilities name tokens as `token_id:N`: as the request says, else the settings."""
        asked = body.return_tokens_as_token_ids
        return self.config.return_tokens_as_token_ids if asked is None else asked

    def check_accepting(self) -> None:
        """Whether a request may be begun.

        Raises:
            ApiError: 503 while the server shuts down, or where as many choices wait as may.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: send the request to another one",
                code="shutting_down",
                headers={"connection": "close", "retry-after": "5"},
            )
        self.check_queue()

    def check_queue(self) -> None:
        """Raises: ApiError: 503 where as many choices wait as may."""
        most = self.config.max_num_queued_reqs
        if most is None or self.unfinished == 0:
            return
        stats = self.engine.stats()
        # What the engine tells may be a step old; what was sent since is in the count.
        places = stats.num_running if stats.num_waiting else self.engine.config.max_num_seqs
        waiting = self.unfinished - max(places, 1)
        if waiting >= most:
            raise ApiError(
                503,
                f"{waiting} choices wait already, and max_num_queued_reqs={most}: send the request "
                "later, or to another server",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    async def check_ready(self) -> None:
        """Whether new requests would be served.

        Raises:
            ApiError, EngineAsleepError, EngineDeadError: 503, with the reason.
        """
        if self.draining:
            self.check_accepting()
        await self.engine.check_health()
        if self.engine.is_sleeping:
            raise EngineAsleepError("the engine sleeps: wake it up, or send requests to another server")

    def end(self, job: asyncio.Task[None], error: ApiError) -> None:
        """End a request from here; its client is told the error."""
        if job in self.jobs and job not in self.ended:
            self.ended[job] = error
            job.cancel()

    async def drain(self, timeout: float, hurry: asyncio.Event) -> None:
        """Refuse new requests; give the others `timeout` seconds, or until `hurry`; then end them."""
        self.draining = True
        until = time.monotonic() + timeout
        while self.jobs and not hurry.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        left = set(self.jobs)
        for job in left:
            self.end(job, _SHUT_DOWN)
        if left:
            await asyncio.wait(left, timeout=5.0)

    def close(self) -> None:
        """End the threads, and send what spans are left; blocks until that is through or given up."""
        self.text.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.access_log is not None:
            self.access_log.close()

    def take_name(self, request_id: str, exact: bool) -> str:
        """What the engine is to call a request, until it is taken out of `live`.

        Args:
            exact: the client names this request so, and no other; else what it sends is of all that belongs
                together (a gateway's X-Request-Id), and may come several times at once.

        Raises:
            RequestError: a request is under way that has exactly this name.
        """
        name = request_id
        if exact and name in self.live:
            raise RequestError(f"request_id {name!r} is in use: choose another", "request_id")
        while name in self.live:
            name = f"{request_id}~{random.getrandbits(64):016x}"
        self.live.add(name)
        return name

    def results(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        exact: bool,
        priority: int,
        cache_salt: str | None,
        names: Mapping[str, str],
    ) -> AsyncGenerator[ResultBatch, None]:
        """Run one or many prompts; yields what is new as (prompt index, result) pairs.

        Closing the generator aborts what still runs. The first error of any prompt ends all.

        Args:
            exact: whether the client chose `request_id` for this request alone (`take_name`).
            names: what the request calls the engine's settings, where it has other words for them.

        Raises:
            ApiError: 503 where too many wait.
            RequestError: for more than one request may come to (`octavo.server.bounds`).
        """
        self.check_queue()
        try:
            check_bounds(prompts, params, self.engine.max_model_len, self.engine.model_config.vocab_size)
        except RequestError as error:
            raise named_by(error, names) from None
        if len(prompts) == 1:
            return self._one(0, prompts[0], params, request_id, exact, priority, cache_salt, names)
        return _merge(
            [
                self._one(index, prompt, params, f"{request_id}-{index}", exact, priority, cache_salt, names)
                for index, prompt in enumerate(prompts)
            ]
        )

    async def _one(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        exact: bool,
        priority: int,
        cache_salt: str | None,
        names: Mapping[str, str],
    ) -> AsyncGenerator[ResultBatch, None]:
        await self.engine.check_health()  # what is refused counts nowhere
        request_id = self.take_name(request_id, exact)
        watchers: list[RequestRecord | RequestTrace] = [self.metrics.start(params)]
        if self.tracer is not None:
            watchers.append(self.tracer.start(request_id, params))
        self.unfinished += params.n
        stream = self.engine.generate(prompt, params, request_id, priority=priority, cache_salt=cache_salt)
        try:
            async for out in stream:
                for watcher in watchers:
                    watcher.observe(out)
                yield [(index, out)]
        except Exception as error:
            for watcher in watchers:
                watcher.fail(error)
            if isinstance(error, RequestError):
                raise named_by(error, names) from None
            raise
        finally:
            self.unfinished -= params.n
            for watcher in watchers:
                watcher.close()
            try:
                await stream.aclose()
            finally:
                self.live.discard(request_id)


async def _merge(streams: Sequence[AsyncGenerator[ResultBatch, None]]) -> AsyncGenerator[ResultBatch, None]:
    """Results of many prompts, all that are there at a time in one batch."""
    queue: asyncio.Queue[ResultBatch | Exception | None] = asyncio.Queue(_MOST_NEWS)

    async def pump(stream: AsyncGenerator[ResultBatch, None]) -> None:
        try:
            async with aclosing(stream):
                async for batch in stream:
                    await queue.put(batch)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    live = len(tasks)
    try:
        while live:
            news = [await queue.get()]
            while not queue.empty():
                news.append(queue.get_nowait())
            batch: ResultBatch = []
            for item in news:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    live -= 1
                else:
                    batch += item
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
