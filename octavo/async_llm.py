"""The asynchronous face: the engine core in its own process, requests as async iterators."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from octavo.config import EngineConfig, make_config
from octavo.engine.aside import run_aside
from octavo.engine.client import CoreClient, ProcessClient
from octavo.engine.embedding_input import EmbeddingInput
from octavo.engine.embedding_output import PreparedEmbedding
from octavo.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from octavo.engine.mailbox import Mailbox
from octavo.engine.output_processor import outputs_for
from octavo.engine.question import Question
from octavo.engine.restarts import RestartBudget
from octavo.engine.totals import Totals
from octavo.engine.watchdog import Watch
from octavo.errors import (
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    EngineRestartingError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from octavo.messages import (
    AbortRequests,
    AddRequests,
    CoreOutput,
    CoreOutputs,
    CoreStats,
    DescribeKV,
    KVMap,
    ProfileStatus,
    ResetPrefixCache,
    Sleep,
    SleepStatus,
    StartProfile,
    StopProfile,
    WakeUp,
)
from octavo.models.config import ModelConfig
from octavo.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.step_messages import ModelFacts
from octavo.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_Item = RequestOutput | EmbeddingRequestOutput | Exception
_DELTA = RequestOutputKind.DELTA
_RESTART_PAUSE = 1.0  # seconds between attempts
_PUT_TO_SLEEP = (
    "the engine was put to sleep before the request was finished: send it again once the engine is awake"
)
_QUICK_PROMPT = 4096  # tokens that are checked faster than handed to a thread


class AsyncLLM:
    """One engine for many concurrent requests of one event loop. Make it with `create`; leaving an
    `async with` block of it frees everything, as `shutdown` does.

    The core's news are detokenized on a reader thread and handed to the loop once per step, so the
    loop only moves finished results.
    """

    def __init__(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop | None,
        abandoned: threading.Event | None = None,
        restart_engine: bool = False,
        engine_timeout: float = 0.0,
    ):
        """Start the engine; blocks until the model is loaded (`create` does so off the loop). Without a loop,
        it is the one of the first request."""
        self.config = config
        self._loop: asyncio.AbstractEventLoop | None = loop
        self._processor = InputProcessor(config)
        self._embedding_input = EmbeddingInput(self._processor)
        self._outputs = outputs_for(self._processor)
        self._lock = threading.Lock()  # guards _outputs, _queues and _totals
        self._queues: dict[str, Mailbox[_Item]] = {}
        self._profiles: Question[ProfileStatus] = Question()
        self._kv_maps: Question[KVMap] = Question()
        self._sleeps: Question[SleepStatus] = Question()
        self._questions: tuple[Question[Any], ...] = (self._profiles, self._kv_maps, self._sleeps)
        self._asleep = False  # or about to be
        self._dozing: object | None = None  # the call of `sleep` that waits for requests
        self._totals = Totals()
        self._dead: EngineDeadError | None = None
        # Tokenizing is done here, off the loop; two threads keep a long prompt from delaying all others.
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="octavo-input")
        self._abandoned = abandoned or threading.Event()
        self._restarts = RestartBudget() if restart_engine else None
        self._watch = Watch(engine_timeout, self._is_awaited) if engine_timeout else None
        self._restarter: threading.Thread | None = None
        self._sent_twice: set[str] = set()  # requests that a restarted engine was given again
        self._client: CoreClient = self._start_engine()
        self._processor.facts = self._client.facts
        self._totals.take(self._first_stats())

    @classmethod
    async def create(
        cls,
        config: EngineConfig | str | None = None,
        *,
        restart_engine: bool = False,
        engine_timeout: float = 0.0,
        **settings: Any,
    ) -> AsyncLLM:
        """Start an engine and wait until it is ready. Cancelling it ends the engine's process at once.

        Args:
            config: all settings; or the model, with further `settings` as for `LLM`.
            restart_engine: start the engine's process again if it ends by itself, at most
                `octavo.engine.restarts.MOST_RESTARTS` times in `WINDOW` seconds. Requests of which nothing
                has been told are run again then, once; others end with an `EngineRestartingError`, as do
                those that come meanwhile.
            engine_timeout: seconds without progress after which the engine's process counts as hung and is
                ended, while requests wait for it (`octavo.engine.watchdog`); 0: it may take any time.

        Raises:
            ConfigError, ModelError: it cannot be started; one line says why.
        """
        if not isinstance(config, EngineConfig):
            own = make_config(EngineConfig, settings if config is None else {"model": config, **settings})
        elif settings:
            raise ConfigError(f"{next(iter(settings))} is given beside an EngineConfig: set it there")
        else:
            own = config
        loop, abandoned = asyncio.get_running_loop(), threading.Event()
        try:
            make = functools.partial(cls, own, loop, abandoned, restart_engine, engine_timeout)
            return await run_aside(make, lambda late: late._client.close())
        except asyncio.CancelledError:
            abandoned.set()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **_: Any) -> AsyncLLM:
        """Start an engine and wait until it is ready, blocking: `create` is better where a loop runs.

        The event loop may begin later; it is the one of the first request. Further arguments of vLLM's
        (start_engine_loop, usage_context, stat_loggers) say nothing here.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        return cls(engine_args, loop)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None under `skip_tokenizer_init`."""
        return self._processor.tokenizer

    @property
    def model_name(self) -> str:
        """What the model is called: its folder's or file's name."""
        return self._processor.model_name

    @property
    def model_config(self) -> ModelConfig:
        """The model's architecture."""
        return self._processor.model_config

    @property
    def facts(self) -> ModelFacts:
        """What was loaded and how much fits."""
        return self._client.facts

    @property
    def max_model_len(self) -> int:
        """Longest context served, tokens."""
        return self.facts.max_model_len

    @property
    def cache_root(self) -> bytes:
        """Root of the prefix cache's block keys, 32 bytes."""
        return self.facts.cache_root

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine core."""
        return getattr(self._client, "pid", None)

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._queues)

    def default_params(self) -> SamplingParams:
        """Sampling settings of a request that brings none."""
        return self._processor.default_params()

    @property
    def most_output_tokens(self) -> int | None:
        """Most tokens of a server's answer, by the generation config (`max_new_tokens`); None: any number."""
        return self._processor.most_output_tokens

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: Any = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields as `sampling_params.output_kind` says. Closing the iterator ends it.

        Raises (at the first iteration):
            RequestError: the request is wrong, or its id is in use.
        Raises (later):
            RequestFailedError: a step failed.
            EngineDeadError: the engine has ended.
            EngineAsleepError: the engine sleeps.
        """
        await self.check_health()
        self._check_awake()
        prepare = functools.partial(
            self._processor.prepare,
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        if isinstance(ids, list) and len(ids) <= _QUICK_PROMPT and not sampling_params.bad_words:
            prepared = prepare()  # nothing to tokenize: a thread would cost more than it saves
        else:
            prepared = await asyncio.get_running_loop().run_in_executor(self._pool, prepare)
        items = self._start(prepared)
        finished = False
        try:
            while not finished:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finished
                yield cast("RequestOutput", item)
        finally:
            self._end(prepared.request_id, items)

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """Embed one text; see `LLM.embed`. Cancelling the call ends the request.

        Raises:
            RequestError: the model makes texts, the request is wrong, or its id is in use.
            RequestFailedError: a step failed.
            EngineDeadError: the engine has ended.
            EngineAsleepError: the engine sleeps.
        """
        await self.check_health()
        self._check_awake()
        prepare = functools.partial(
            self._embedding_input.prepare,
            prompt,
            params,
            request_id,
            prompt_name=prompt_name,
            priority=priority,
        )
        prepared = await asyncio.get_running_loop().run_in_executor(self._pool, prepare)
        items = self._start(prepared)
        try:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            return cast("EmbeddingRequestOutput", item)
        finally:
            self._end(prepared.request_id, items)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator raises RequestAbortedError. Unknown ids are ignored."""
        self._abort(request_id, f"request {request_id} was aborted")

    def _abort(self, request_id: str, reason: str) -> None:
        items = self._queues.get(request_id)
        if items is not None:
            self._end(request_id, items)
            items.put(RequestAbortedError(reason))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks."""
        self._client.send(ResetPrefixCache())

    async def start_profile(self) -> None:
        """Record the next steps; see `LLM.start_profile`.

        Raises:
            RequestError: no folder is set for it, or a profile is under way.
            EngineDeadError: the engine has ended.
        """
        await self._profile(StartProfile())

    async def stop_profile(self) -> ProfileStatus:
        """End the profile and write it; see `LLM.stop_profile`.

        Raises:
            RequestError: nothing was recorded, or it cannot be written.
            EngineDeadError: the engine has ended.
        """
        return await self._profile(StopProfile())

    async def _profile(self, message: StartProfile | StopProfile) -> ProfileStatus:
        await self.check_health()
        status = await self._profiles.ask(lambda: self._client.send(message))
        if status.error is not None:
            raise RequestError(status.error)
        return status

    async def describe_kv(self, cells: int, requests: int = 0, tokens: int = 0) -> KVMap:
        """What the blocks of the KV pool are at the end of a step, in at most `cells` cells.

        Args:
            requests: of how many requests to tell as well (`KVMap.requests`).
            tokens: how many of the last token ids of their prompts and outputs to tell.

        Raises:
            EngineDeadError: the engine has ended.
        """
        await self.check_health()
        return await self._kv_maps.ask(lambda: self._client.send(DescribeKV(cells, requests, tokens)))

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, or is about to: requests are refused until `wake_up`."""
        return self._asleep

    async def sleep(self, level: int = 1, mode: str = "wait") -> SleepStatus:
        """Refuse new requests, end those under way, give memory back. What is cached is forgotten.

        Args:
            level: 1 gives back the KV cache and a GPU's weights, which host memory keeps; 2 all weights,
                which `wake_up` reads from the checkpoint again.
            mode: "wait" lets requests under way finish, "abort" ends them with a RequestAbortedError.

        Raises:
            RequestError: the engine sleeps already, or cannot, or was woken up before it slept; nothing has
                changed.
            EngineDeadError: the engine has ended.
        """
        await self.check_health()
        if mode not in ("wait", "abort"):
            raise RequestError(f"mode={mode!r} is not valid: give wait or abort", "mode")
        if self._asleep:
            raise RequestError("the engine sleeps already, or is about to: wake it up first")
        doze = self._dozing = object()
        self._asleep, asked, done = True, False, False
        try:
            if mode == "abort":
                for request_id in list(self._queues):
                    self._abort(request_id, _PUT_TO_SLEEP)
            while self._queues and self._dead is None and self._dozing is doze:
                await asyncio.sleep(0.01)
            await self.check_health()
            if self._dozing is not doze:
                raise RequestError("the engine was woken up before it slept")
            self._dozing, asked = None, True
            status = await self._sleeps.ask(lambda: self._client.send(Sleep(level)))
            if status.error is not None:
                raise RequestError(status.error)
            done = True
        finally:
            if asked:
                # A caller that went away while the engine went to sleep leaves it so.
                self._asleep = done or self._sleeps.waiting
            elif self._dozing is doze:  # not woken up meanwhile
                self._asleep, self._dozing = False, None
        return status

    async def wake_up(self) -> SleepStatus:
        """Take the memory again and serve requests.

        Raises:
            RequestError: the engine is awake.
            RequestFailedError: it cannot wake up, and sleeps on; one line says why.
            EngineDeadError: the engine has ended.
        """
        await self.check_health()
        if not self._asleep:
            raise RequestError("the engine is awake")
        if self._dozing is not None:  # it waits for requests yet
            self._asleep, self._dozing = False, None
            return SleepStatus()
        status = await self._sleeps.ask(lambda: self._client.send(WakeUp()))
        self._asleep = status.level > 0
        if status.error is not None:
            raise RequestFailedError(status.error)
        return status

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._dead is not None:
            raise self._dead

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineAsleepError("the engine sleeps: wake it up first (POST /wake_up)")

    def stats(self) -> CoreStats:
        """The core's latest gauges, and counters that go on when it is started again."""
        return self._totals.now

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Let running requests finish for up to `drain_timeout` seconds, end the others, free everything."""
        deadline = time.monotonic() + drain_timeout
        while self._queues and self._dead is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._queues):
            await self.abort(request_id)
        self._abandoned.set()  # a restart
        if self._restarter is not None:
            await asyncio.to_thread(self._restarter.join)
        self._dead = self._dead or EngineDeadError("the engine is shut down")
        await asyncio.to_thread(self._client.close)
        self._pool.shutdown(wait=False)

    def _start(self, prepared: PreparedRequest | PreparedEmbedding) -> Mailbox[_Item]:
        self._check_awake()
        merges = isinstance(prepared, PreparedRequest) and prepared.params.output_kind == _DELTA
        items: Mailbox[_Item] = Mailbox(merges)
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if prepared.request_id in self._outputs:
                raise RequestError(
                    f"request_id {prepared.request_id!r} is in use: choose another", "request_id"
                )
            self._outputs.add(cast("Any", prepared))
            self._queues[prepared.request_id] = items
            client = self._client  # another one, from here on, is sent the request by the restart
        try:
            client.send(AddRequests(prepared.choices))
        except EngineDeadError:
            if self._restarts is None:
                self._end(prepared.request_id, items)
                raise
        except Exception:
            self._end(prepared.request_id, items)
            raise
        return items

    def _end(self, request_id: str, items: Mailbox[_Item]) -> None:
        with self._lock:
            if self._queues.get(request_id) is not items:
                return
            del self._queues[request_id]
            self._sent_twice.discard(request_id)
            left = self._outputs.discard(request_id)
        if left:
            with contextlib.suppress(EngineDeadError):
                self._client.send(AbortRequests(left))

    # ---- called on the client's reader thread ---------------------------------------------------

    def _on_outputs(self, news: CoreOutputs) -> None:
        ready: list[tuple[Mailbox[_Item], _Item]] = []
        stopped: list[str] = []
        with self._lock:
            self._totals.take(news.stats)
        for share in _shares(news.outputs):
            with self._lock:
                results, ended = self._outputs.process(share)
                stopped += ended
                for output, error in results:
                    items = self._queues.get(output.request_id)
                    if items is not None:
                        ready.append((items, output if error is None else error))
        if stopped:
            with contextlib.suppress(EngineDeadError):
                self._client.send(AbortRequests(stopped))
        if ready:
            self._hand_over(ready)
        for question, answer in zip(self._questions, (news.profile, news.kv_map, news.sleep), strict=True):
            if answer is not None:
                self._on_loop(question.answers.put_nowait, answer)

    def _on_death(self, error: EngineDeadError) -> None:
        restarts = self._restarts is not None and not self._abandoned.is_set() and self._restarts.take()
        if restarts:
            logger.error("%s; it is started again", error)
            error = EngineRestartingError(f"{error} and is being started again: send the request once more")
        with self._lock:
            self._dead = error
            lost = {i: m for i, m in self._queues.items() if not restarts or not self._resendable(i)}
        self._hand_over([(items, error) for items in lost.values()])
        for question in self._questions:
            self._on_loop(question.answers.put_nowait, error)
        if restarts:
            self._restarter = threading.Thread(target=self._restart, name="octavo-restart")
            self._restarter.start()

    def _resendable(self, request_id: str) -> bool:
        """Whether a request may be run from its start: nobody has seen any of it, for the first time."""
        return request_id not in self._sent_twice and bool(self._outputs.untouched(request_id))

    def _start_engine(self) -> CoreClient:
        return ProcessClient(
            self._processor.config, self._on_outputs, self._on_death, self._abandoned, watch=self._watch
        )

    def _first_stats(self) -> CoreStats:
        return CoreStats(kv_blocks_total=self._client.facts.num_blocks)

    def _is_awaited(self) -> bool:
        """Whether anybody waits for the core."""
        return bool(self._queues) or any(question.waiting for question in self._questions)

    # ---- on a thread of its own -----------------------------------------------------------------

    def _restart(self) -> None:
        """Start the engine's process again and give it the requests that are left."""
        assert self._restarts is not None
        self._client.close()
        while True:
            try:
                client = self._start_engine()
                break
            except Exception as error:
                if self._abandoned.is_set() or not self._restarts.take():
                    dead = EngineDeadError(f"the engine core cannot be started again: {error}")
                    with self._lock:
                        self._dead = dead
                        waiting = list(self._queues.values())
                    self._hand_over([(items, dead) for items in waiting])
                    return
                logger.error("the engine core cannot be started again: %s; once more", error)
                time.sleep(_RESTART_PAUSE)
        with self._lock:
            self._client, self._dead, self._asleep = client, None, False
            self._processor.facts = client.facts
            self._totals.another_core(self._first_stats())
            names = [request_id for request_id in self._queues if self._resendable(request_id)]
            left = [core for request_id in names for core in self._outputs.untouched(request_id)]
            self._sent_twice.update(names)
            with contextlib.suppress(EngineDeadError):  # which the next restart sees to
                client.send(AddRequests(left))
        logger.info("the engine has been started again; %d choices are run from their start", len(left))

    # ---- to the loop ----------------------------------------------------------------------------

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call something on the loop's thread."""
        if self._loop is None:  # nobody has asked anything yet
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, *args)

    def _hand_over(self, items: list[tuple[Mailbox[_Item], _Item]]) -> None:
        """Put each item in its queue, in one call on the loop's thread."""
        self._on_loop(_put_all, items)


def _shares(outputs: list[CoreOutput]) -> list[list[CoreOutput]]:
    """What is taken in at a time: log-probabilities may be millions, and the loop waits for the lock."""
    if any(output.logprobs is not None or output.prompt_logprobs is not None for output in outputs):
        return [[output] for output in outputs]
    return [outputs]


def _put_all(items: list[tuple[Mailbox[_Item], _Item]]) -> None:
    for waiting, item in items:
        waiting.put(item)


AsyncLLMEngine = AsyncLLM
"""vLLM's earlier name."""
