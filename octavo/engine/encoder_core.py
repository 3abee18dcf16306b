"""The engine core of an encoder: whole texts in batches of like length. Knows tokens and vectors only."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.executor import EncoderExecutor
from octavo.engine.pulse import LoopPulse
from octavo.errors import EngineDeadError
from octavo.kv.map import STATES
from octavo.messages import (
    ITERATION_BOUNDS,
    CoreOutput,
    CoreRequest,
    CoreStats,
    DescribeKV,
    KVMap,
    RequestInfo,
    RequestMetrics,
)
from octavo.step_messages import ModelFacts

logger = logging.getLogger(__name__)


class EncoderCore:
    """Owns an encoder's queue and worker and runs one batch per step.

    Those that wait are taken together, sorted by length and cut into batches, so that little is padding;
    requests that come meanwhile wait for the next round, so that none waits for ever.
    """

    def __init__(self, config: EngineConfig, executor: EncoderExecutor | None = None):
        self.config = config
        self.pulse = LoopPulse()
        self.executor = executor or EncoderExecutor(config)
        self._waiting: dict[str, CoreRequest] = {}
        self._batches: list[list[CoreRequest]] = []
        self._stats = CoreStats()
        self.wrap_stages(None)
        logger.info("engine ready: %s", ", ".join(f"{k} {v}" for k, v in self.facts.summary.items()))

    @property
    def facts(self) -> ModelFacts:
        """What the worker found."""
        return self.executor.facts

    def add(self, request: CoreRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use.
        """
        if request.request_id in self._waiting:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        self._waiting[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests that wait; unknown ids are ignored."""
        ended = [i for i in request_ids if self._waiting.pop(i, None) is not None]
        return [CoreOutput(i, finish_reason="abort", metrics=RequestMetrics()) for i in ended]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting)

    def wrap_stages(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Run `wrap(name, function)` in the place of each stage of a step (for profiles); None: plainly."""
        encode = self.executor.encode
        self._encode = encode if wrap is None else wrap("execute", encode)

    def step(self) -> list[CoreOutput]:
        """Run one batch. One that fails is run again in halves; a text that fails alone ends with an error.

        Raises:
            EngineDeadError: the device can run nothing more.
        """
        batch: list[CoreRequest] = []
        while not batch and self._waiting:
            if not self._batches:
                self._batches = self._cut(list(self._waiting.values()))
            batch = [r for r in self._batches.pop() if r.request_id in self._waiting]
        if not batch:
            return []
        begin = time.time()
        tokens = sum(len(request.prompt_token_ids) for request in batch)
        longest = max(len(request.prompt_token_ids) for request in batch)
        kind = (tokens.bit_length(), longest.bit_length())
        self.pulse.launch(kind)
        for request in batch:
            del self._waiting[request.request_id]
        try:
            vectors = self._encode([request.prompt_token_ids for request in batch])
        except EngineDeadError:
            raise
        except Exception as error:
            logger.error("a batch of %d texts failed: %s", len(batch), error, exc_info=error)
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            if len(batch) == 1:
                return [CoreOutput(batch[0].request_id, finish_reason="error", error=text)]
            half = len(batch) // 2
            self._waiting.update({request.request_id: request for request in batch})
            self._batches += [batch[half:], batch[:half]]
            return []
        self._stats.num_steps += 1
        self._stats.prompt_tokens += tokens
        self._stats.iteration_tokens.add(ITERATION_BOUNDS, tokens)
        end = time.time()
        self.pulse.finish(kind, end - begin)
        return [
            CoreOutput(
                request.request_id,
                finish_reason="stop",
                pooled=vector,
                metrics=RequestMetrics(
                    arrival_time=request.arrival_time,
                    scheduled_time=begin,
                    first_token_time=end,
                    last_token_time=end,
                    finished_time=end,
                ),
            )
            for request, vector in zip(batch, vectors, strict=True)
        ]

    def _cut(self, requests: list[CoreRequest]) -> list[list[CoreRequest]]:
        """Batches within the budget of padded tokens, the longest texts' first to be popped last."""
        requests.sort(key=lambda r: len(r.prompt_token_ids), reverse=True)
        batches: list[list[CoreRequest]] = []
        for request in requests:
            current = batches[-1] if batches else []
            longest = len(current[0].prompt_token_ids) if current else 0
            fits = (len(current) + 1) * longest <= self.facts.max_num_batched_tokens
            if current and fits and len(current) < self.config.max_num_seqs:
                current.append(request)
            else:
                batches.append([request])
        return batches

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def stats(self) -> CoreStats:
        """Gauges and counters now (a copy)."""
        self._stats.num_waiting = len(self._waiting)
        return CoreStats(*(getattr(self._stats, name) for name in CoreStats.__struct_fields__))

    def describe_kv(self, asked: DescribeKV) -> KVMap:
        """There is no KV cache: a map without blocks. Texts wait, or are through within a step."""
        told = KVMap(b"", 1, 0, 0, 0, dict.fromkeys(STATES, 0), num_waiting=len(self._waiting))
        for core in itertools.islice(self._waiting.values(), asked.requests):
            tail = core.prompt_token_ids[-asked.tokens :] if asked.tokens else []
            told.requests.append(
                RequestInfo(
                    core.request_id,
                    "waiting",
                    num_prompt_tokens=len(core.prompt_token_ids),
                    num_output_tokens=0,
                    max_tokens=0,
                    num_computed_tokens=0,
                    num_cached_tokens=0,
                    num_preemptions=0,
                    arrival_time=core.arrival_time,
                    prompt_tail=tail,
                )
            )
        return told

    def close(self) -> None:
        """Free the worker."""
        self.executor.close()
