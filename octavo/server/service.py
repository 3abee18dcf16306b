"""What all endpoints share: the engine, the model's names, the threads for text, the metrics, the jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from octavo.config import EngineConfig
from octavo.messages import CoreStats, KVMap, ModelFacts, ProfileStatus, SleepStatus
from octavo.models.config import ModelConfig
from octavo.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics, RequestRecord, cache_labels
from octavo.server.otlp import check_endpoint
from octavo.server.page.cache import Cached
from octavo.server.responses.store import ResponseStore
from octavo.server.text import TextService, Tokenizer
from octavo.server.tracing import RequestTrace, RequestTracer
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


class Service:
    """The state of one server.

    `jobs` holds the tasks of requests that the engine is answering; `expired` those among them that
    the shutdown ended, whose clients are told so.
    """

    def __init__(self, engine: Engine, config: ServerConfig):
        self.engine = engine
        self.config = config
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
        facts = engine.facts
        self.metrics = Metrics(
            engine.stats,
            self.names[0],
            engine.max_model_len,
            facts.memory,
            facts.summary.get("weights", ""),
            prefix=config.metrics_prefix,
            cache=cache_labels(engine.config),
        )
        self.responses = ResponseStore(config.response_store_bytes)
        endpoint = config.otlp_traces_endpoint
        self.tracer = RequestTracer(check_endpoint(endpoint), self.names[0]) if endpoint else None
        self.jobs: set[asyncio.Task[None]] = set()
        self.expired: set[asyncio.Task[None]] = set()
        self.draining = False
        self.page_state = Cached(0.5)

    def check_model(self, name: str | None) -> str:
        """The name to answer with for the model that a request names (none: the first).

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name is None:
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

    def check_accepting(self) -> None:
        """Raises: ApiError: 503 while the server shuts down."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: send the request to another one",
                code="shutting_down",
                headers={"connection": "close", "retry-after": "5"},
            )

    async def drain(self, timeout: float, hurry: asyncio.Event) -> None:
        """Refuse new requests; give the others `timeout` seconds, or until `hurry`; then end them."""
        self.draining = True
        until = time.monotonic() + timeout
        while self.jobs and not hurry.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self.expired = set(self.jobs)
        for job in self.expired:
            job.cancel()
        if self.expired:
            await asyncio.wait(self.expired, timeout=5.0)

    def results(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int,
        cache_salt: str | None,
    ) -> AsyncGenerator[ResultBatch, None]:
        """Run one or many prompts; yields what is new as (prompt index, result) pairs.

        Closing the generator aborts what still runs. The first error of any prompt ends all.
        """
        if len(prompts) == 1:
            return self._one(0, prompts[0], params, request_id, priority, cache_salt)
        return _merge(
            [
                self._one(index, prompt, params, f"{request_id}-{index}", priority, cache_salt)
                for index, prompt in enumerate(prompts)
            ]
        )

    async def _one(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str | None,
    ) -> AsyncGenerator[ResultBatch, None]:
        watchers: list[RequestRecord | RequestTrace] = [self.metrics.start(params)]
        if self.tracer is not None:
            watchers.append(self.tracer.start(request_id, params))
        stream = self.engine.generate(prompt, params, request_id, priority=priority, cache_salt=cache_salt)
        try:
            async for out in stream:
                for watcher in watchers:
                    watcher.observe(out)
                yield [(index, out)]
        except Exception as error:
            for watcher in watchers:
                watcher.fail(error)
            raise
        finally:
            for watcher in watchers:
                watcher.close()
            await stream.aclose()


async def _merge(streams: Sequence[AsyncGenerator[ResultBatch, None]]) -> AsyncGenerator[ResultBatch, None]:
    """Results of many prompts, all that are there at a time in one batch."""
    queue: asyncio.Queue[ResultBatch | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ResultBatch, None]) -> None:
        try:
            async with aclosing(stream):
                async for batch in stream:
                    queue.put_nowait(batch)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

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
