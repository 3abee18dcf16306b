"""An engine without a model: deterministic text, failures and delays on demand."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.input_processor import check_salt
from octavo.errors import (
    EngineAsleepError,
    EngineDeadError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.map import describe_kv
from octavo.kv.pool import BlockPool
from octavo.messages import CoreStats, KVMap, ProfileStatus, RequestInfo, RequestMetrics, SleepStatus
from octavo.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import RequestOutputKind, SamplingParams

VOCAB = 260
EOS = 257
FAULT = 0x18  # a prompt with this token fails after two tokens of its answer


class ByteTokenizer:
    """One token per byte of UTF-8; 256 and 257 are special (begin and end)."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([256] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        table = self.byte_table(skip_special_tokens)
        return b"".join(table[i] for i in ids).decode("utf-8", "replace")

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        table = {i: bytes([i]) for i in range(256)}
        for i in range(256, VOCAB):
            table[i] = b"" if skip_special_tokens else b"<%d>" % i
        return table

    def apply_chat_template(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        from octavo.tokenization.chat_template import render_chat

        template = chat_template or (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        return render_chat(template, messages, {}, add_generation_prompt, continue_final_message, **kwargs)


class FakeEngine:
    """Answers every prompt with `text`, a byte a token, over and over until max_tokens (once, if `ends`).

    `delay` is the time between tokens, `per_step` their number; `kill()` makes it dead. `replies` are other
    texts, by a word of the prompt.
    """

    def __init__(self, text: str = "héllo 🙂 world. ", delay: float = 0.0, per_step: int = 1, **config: Any):
        self.config = EngineConfig(model="some/model", **config)
        self.model_config = types.SimpleNamespace(vocab_size=VOCAB, extra={})
        self.tokenizer: Any = ByteTokenizer()
        self.model_name = "model"
        self.max_model_len = 200
        self.cache_root = bytes(range(32))
        self.defaults: dict[str, Any] = {}
        self.delay = delay
        self.per_step = per_step
        self.answer = text.encode()
        self.replies: dict[str, str] = {}
        self.live: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.salts: list[str | None] = []  # of texts to be embedded
        self.aborted = 0
        self.generated = 0
        self.dead = asyncio.Event()
        self.cached: dict[tuple[int, ...], int] = {}
        self.down = False
        self.ends = False
        self.level = 0  # at which it sleeps
        self.mode = ""
        self.profiles = 0  # under way
        memory = {"total": 100, "weights": 60, "kv_cache": 30, "free": 10}
        self.facts = types.SimpleNamespace(
            memory=memory,
            summary={"weights": "as dtype"},
            pooling_type=None,
            max_num_batched_tokens=2048,
        )
        self.pool = BlockPool(5000)

    def kill(self) -> None:
        self.dead.set()

    @property
    def most_output_tokens(self) -> int | None:
        return self.defaults.get("max_tokens")

    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.defaults)

    async def check_health(self) -> None:
        if self.dead.is_set():
            raise EngineDeadError("killed by a test")

    def stats(self) -> CoreStats:
        return CoreStats(num_running=len(self.live), generation_tokens=self.generated, prefix_cache_queries=7)

    async def describe_kv(self, cells: int, requests: int = 0, tokens: int = 0) -> KVMap:
        await self.check_health()
        told = describe_kv(self.pool, [KVGroup("full", (0,), KVFormat("bfloat16", 16, 2, 8))], cells)
        told.requests = [
            RequestInfo(
                name,
                "running",
                5,
                3,
                10,
                8,
                2,
                0,
                time.time() - 1.5,
                *(([*b"ask"], [*b"say"]) if tokens else ()),
            )
            for name in sorted(self.live)[:requests]
        ]
        return told

    async def reset_prefix_cache(self) -> None:
        self.cached.clear()

    @property
    def is_sleeping(self) -> bool:
        return self.level > 0

    async def sleep(self, level: int = 1, mode: str = "wait") -> SleepStatus:
        if self.level:
            raise RequestError("the engine sleeps already")
        self.level, self.mode = level, mode
        return SleepStatus(level, 1000, 0.25)

    async def wake_up(self) -> SleepStatus:
        if not self.level:
            raise RequestError("the engine is awake")
        self.level = 0
        return SleepStatus()

    def _check_awake(self) -> None:
        if self.level:
            raise EngineAsleepError("the engine sleeps: wake it up first (POST /wake_up)")

    async def start_profile(self) -> None:
        if self.profiles:
            raise RequestError("a profile is under way already: stop it first")
        self.profiles = 1

    async def stop_profile(self) -> ProfileStatus:
        if not self.profiles:
            raise RequestError("no profile is under way: start one first")
        self.profiles = 0
        return ProfileStatus("t.json.gz", "t.txt", 3, rank_traces=["t-rank0.json.gz"])

    async def shutdown(self, drain_timeout: float) -> None:
        self.down = True

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        await self.check_health()
        self._check_awake()
        self.seen.append((prompt, params, {"id": request_id, "priority": priority, "cache_salt": cache_salt}))
        self._check(prompt, request_id)
        check_salt(cache_salt)
        assert request_id is not None
        self.live.add(request_id)
        finished = False
        try:
            async for out in self._steps(prompt, params, request_id):
                yield out
            finished = True
        finally:
            self.live.discard(request_id)
            self.aborted += not finished

    async def embed(
        self,
        prompt: Any,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """The first numbers are the prompt's length and first token."""
        await self.check_health()
        self._check_awake()
        ids = prompt.get("prompt_token_ids")
        ids = self.tokenizer.encode(prompt["prompt"]) if ids is None else ids
        check_salt(prompt["cache_salt"])
        self.salts.append(prompt["cache_salt"])
        self._check(ids, request_id)
        name = request_id or ""
        self.live.add(name)
        finished = False
        try:
            await asyncio.sleep(self.delay)
            finished = True
        finally:
            self.live.discard(name)
            self.aborted += not finished
        vector = [float(len(ids)), float(ids[0]), 0.25, -1.5][: params.dimensions if params else None]
        return EmbeddingRequestOutput(request_id or "", None, ids, EmbeddingOutput(vector))

    def _check(self, prompt: list[int], request_id: str | None) -> None:
        if not prompt:
            raise RequestError("prompt is empty", "prompt")
        if request_id in self.live:
            raise RequestError(f"request_id={request_id!r} is in use", "request_id")
        for token in prompt:
            if not 0 <= token < VOCAB:
                raise RequestError(f"token id {token} is outside the vocabulary of {VOCAB}", "prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context {self.max_model_len}", "prompt"
            )

    async def _steps(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        words = bytes(t for t in prompt if t < 256).decode("utf-8", "replace")
        answer = next((r.encode() for word, r in self.replies.items() if word in words), self.answer)
        total = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        ends = self.ends and len(answer) <= total
        total = len(answer) if ends else total
        metrics = RequestMetrics(time.time(), time.time() + 1e-4, time.time() + 2e-4)
        cached = self.cached.get(tuple(prompt), 0)
        self.cached[tuple(prompt)] = len(prompt) // 16 * 16
        delta = params.output_kind == RequestOutputKind.DELTA
        tokens = [answer[i % len(answer)] for i in range(total)]
        told = 0  # bytes of text told so far
        for start in range(0, total, self.per_step):
            if self.delay:
                try:
                    await asyncio.wait_for(self.dead.wait(), self.delay)
                except asyncio.TimeoutError:
                    pass
                await self.check_health()
            else:
                await asyncio.sleep(0)
            if self.level and self.mode == "abort":
                raise RequestAbortedError("the engine was put to sleep")
            if FAULT in prompt and start >= 2:
                raise RequestFailedError("a step failed for a test")
            end = min(start + self.per_step, total)
            last = end == total
            self.generated += (end - start) * params.n
            if not delta and not last:
                continue
            metrics.last_token_time = time.time()
            first = start if delta else 0
            whole = end if last else _character_end(tokens, end)
            text = bytes(tokens[told if delta else 0 : whole]).decode("utf-8", "replace")
            told = max(told, whole)
            outputs = [
                CompletionOutput(
                    index,
                    text,
                    tokens[first:end],
                    0.0,
                    [self._logprobs(t, params.logprobs) for t in tokens[first:end]]
                    if params.logprobs is not None
                    else None,
                    ("stop" if ends else "length") if last else None,
                )
                for index in range(params.n)
            ]
            top = params.prompt_logprobs
            prompt_logprobs = None
            if top is not None and first == 0:
                prompt_logprobs = [None, *(self._logprobs(t, top) for t in prompt[1:])]
            yield RequestOutput(request_id, None, prompt, outputs, last, prompt_logprobs, cached, metrics)

    def _logprobs(self, token: int, top: int) -> dict[int, Logprob]:
        entries = {token: Logprob(-1.5, 3)}
        for rank in range(top):
            entries.setdefault(
                (token + 1 + rank) % 128, Logprob(-0.5 - rank if rank < 2 else -2.0 - rank, rank + 1)
            )
        return entries


def _character_end(tokens: list[int], end: int) -> int:
    """The largest index up to `end` at which no character is cut."""
    while end and end < len(tokens) and tokens[end] & 0xC0 == 0x80:
        end -= 1
    return end
