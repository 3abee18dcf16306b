"""The engine core: scheduler and executor in one loop. Knows requests and tokens, no text, no tensor."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.describe import describe_requests
from octavo.engine.executor import Executor, PendingStep, make_executor
from octavo.engine.grammar_compiler import GrammarCompiler
from octavo.engine.grammar_masks import begin_masks, collect_masks
from octavo.engine.limits import SchedulerLimits
from octavo.engine.pipeline_clock import PipelineClock
from octavo.engine.pulse import LoopPulse, step_kind
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_maker import ScheduledStep
from octavo.errors import ConfigError, EngineDeadError, RequestError
from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.draft_pages import draft_pages
from octavo.kv.groups import page_bytes
from octavo.kv.keys import BlockHasher
from octavo.kv.manager import KVManager
from octavo.kv.map import describe_kv
from octavo.kv.offloading import Offloading, TierRates
from octavo.messages import CoreOutput, CoreRequest, CoreStats, DescribeKV, KVMap, RequestMetrics
from octavo.speculative.registry import make_host_proposer
from octavo.speculative.synthetic import show_rates
from octavo.step_messages import ModelFacts, StepResult, TokenMasks

logger = logging.getLogger(__name__)

_DISK_WAIT = 0.05  # seconds to sleep at most where nothing can be computed before a block has been read
_KEEP_SECONDS = 5.0  # that an engine takes at its end to bring cached blocks to disk
_MASK_WAIT = 0.001  # the same where all requests wait for masks


class EngineCore:
    """Owns one replica's scheduler and executor and advances them step by step.

    With overlap, step n + 1 is scheduled and launched before step n's tokens are read; without it
    (nothing to overlap on a CPU) the loop is the same with an empty queue in between.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None):
        self.config = config
        self.pulse = LoopPulse()
        try:
            self._allocate(executor)
        except MemoryError as error:
            raise ConfigError(
                f"no memory for the tables of max_num_seqs={config.max_num_seqs} requests and "
                f"max_num_batched_tokens={config.max_num_batched_tokens} tokens ({error}): lower these, or "
                "max_model_len"
            ) from None
        self._depth = self._steps_ahead()
        stages = config.pipeline_parallel_size
        self._clock = PipelineClock(stages) if stages > 1 else None
        # With the time at which each was launched, seconds (`time.perf_counter`).
        self._in_flight: collections.deque[tuple[ScheduledStep, PendingStep, float]] = collections.deque()
        self._last_end = 0.0
        self.grammars = GrammarCompiler(self.config, self.facts.vocab_size)
        self.wrap_stages(None)

    def _allocate(self, executor: Executor | None) -> None:
        """Load the model and make the tables of cache and scheduler."""
        config = self.config
        self.executor = executor or make_executor(config)
        facts = self.facts
        hasher = None
        # A mean or a first vector needs every row, and the cache holds none of them.
        if config.enable_prefix_caching and facts.pooling_type in (None, "LAST"):
            hasher = BlockHasher(config.prefix_caching_hash_algo, facts.cache_root, config.block_size)
        logger.info("engine ready: %s", ", ".join(f"{name} {value}" for name, value in facts.summary.items()))
        if config.synthetic_acceptance is not None:
            logger.warning(
                "synthetic acceptance of drafts is on (%s): what this engine answers is not the model's text",
                show_rates(config.synthetic_acceptance),
            )
        # Rows that were computed before can't be skipped where all of them make the vector.
        num_host_blocks = facts.num_host_blocks if facts.pooling_type in (None, "LAST") else 0
        self.kv = KVManager(
            facts.groups,
            facts.num_blocks,
            hasher,
            num_host_blocks,
            TierRates(page_bytes(facts.groups), facts.host_copy_rate, facts.prefill_rate),
            self.executor.block_store,
        )
        speculative = config.speculative
        confidence = None if speculative is None else speculative.draft_confidence_threshold
        if confidence and self._overlaps:
            raise ConfigError(
                f"draft_confidence_threshold={confidence:g} needs steps that wait for drafts: give "
                "async_scheduling=False, or leave it out"
            )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=facts.max_num_batched_tokens,
                # An embedding's text may fill the context; its one token, which nobody sees, comes after.
                max_model_len=facts.max_model_len + (facts.pooling_type is not None),
                vocab_size=facts.vocab_size,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                use_priority=config.scheduling_policy == "priority",
                find_shared_prefix=not config.disable_cascade_attn,
                look_ahead=config.look_ahead_admission,
                num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
                adaptive_drafts=speculative is None or speculative.adaptive,
                draft_method="draft_model" if speculative is None else speculative.method,
                stops_drafts=speculative is not None
                and speculative.method != "pard"
                and not self._overlaps
                and (speculative.adaptive if confidence is None else confidence > 0),
                draft_confidence=confidence,
                pipeline_stages=config.pipeline_parallel_size,
            ),
            self.kv,
            None if speculative is None else make_host_proposer(speculative),
            self._draft_blocks(),
            facts.draft_max_model_len,
        )

    def _draft_blocks(self) -> DraftBlocks | None:
        """What a model or head that drafts on the workers takes of the pool; None: there is none."""
        facts, pool = self.facts, self.kv.pool
        if not facts.draft_groups:
            return None
        pages = draft_pages(facts.groups, facts.draft_groups, pool.num_blocks)
        slots = self.config.max_num_seqs
        return DraftBlocks(facts.draft_groups, pages, pool, slots, len(facts.groups))

    def _steps_ahead(self) -> int:
        """Steps that are under way while the next one is scheduled: with pipeline stages, one in each.

        On a GPU with ranks in processes, one more: the way of a result to the engine and of the next plan to
        every rank takes as long as a step of a few milliseconds.
        """
        far = self.config.runs_ranks and self.facts.overlap and self._overlaps
        return self.config.pipeline_parallel_size - 1 + self._overlaps + far

    @property
    def _overlaps(self) -> bool:
        """Whether a step is planned before the one before it is through."""
        asked, stages = self.config.async_scheduling, self.config.pipeline_parallel_size
        # With stages the first one would wait for the engine whenever the last is through.
        return self.facts.overlap or stages > 1 if asked is None else asked

    @property
    def facts(self) -> ModelFacts:
        """What the workers found."""
        return self.executor.facts

    def add(self, request: CoreRequest) -> None:
        """Queue a request; one whose output has a form once its grammar is compiled (`admit_compiled`)."""
        if request.params.structured_outputs is None:
            self.scheduler.add(request)
        elif (run := self.grammars.begin(request)) is not None:
            self.scheduler.add(request, run)

    def admit_compiled(self) -> list[CoreOutput]:
        """Queue requests whose grammars have been compiled; the ends of those that are refused."""
        outputs = []
        for compiled in self.grammars.take():
            request, error = compiled.request, compiled.error
            if error is None:
                self.scheduler.add(request, compiled.run)
            else:
                param = error.param if isinstance(error, RequestError) else None
                outputs.append(_ended(request.request_id, "error", str(error), param))
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests at once; their blocks are free when this returns."""
        request_ids = list(request_ids)
        outputs = [_ended(request_id, "abort") for request_id in self.grammars.abort(request_ids)]
        outputs += self.scheduler.abort(request_ids)
        self._check()
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_requests or bool(self._in_flight) or self.scheduler.is_copying

    def wrap_stages(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Run `wrap(name, function)` in the place of each stage of a step (for profiles); None: plainly."""

        def stage(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return function if wrap is None else wrap(name, function)

        self._schedule = stage("schedule", self.scheduler.schedule)
        self._execute = stage("execute", self.executor.execute)
        self._wait = stage("wait", _wait)
        self._update = stage("update", self.scheduler.update)

    def step(self) -> list[CoreOutput]:
        """Launch the next step, then take in the oldest one if the queue is full or nothing was launched.

        A step that fails ends the request that makes it fail with an error (`Trials` finds it); the engine
        goes on.

        Raises:
            EngineDeadError: the device can run no further step.
        """
        held = self.scheduler.release_held()
        outputs: list[CoreOutput] = []
        drafting = self.scheduler.drafting
        under_way = bool(self._in_flight)
        several = self.config.pipeline_parallel_size > 1
        waits = drafting is not None and drafting.look_ahead(under_way or several) and under_way
        while waits and self._in_flight:  # drafts are proposed from tokens that are known
            outputs += self._take_in_oldest()
        step = self._schedule()
        if step is None and not self._in_flight:
            step = self.scheduler.poll()
            if step is None and held:
                time.sleep(_MASK_WAIT)
            elif step is None and self.kv.offloading is not None:
                self.kv.offloading.wait(_DISK_WAIT)
        if step is not None:
            begin_masks(step.grammars)
            begin = time.perf_counter()
            if drafting is not None:
                drafting.launched(begin - self._last_end if waits else 0.0)
            self.pulse.launch(step_kind(step.plan))
            try:
                if self._clock is not None:
                    self._clock.launched(begin)
                self._in_flight.append((step, self._execute(step.plan), begin))
            except EngineDeadError:
                raise
            except Exception as error:
                # Steps in flight may be the cause: theirs is the failure then.
                self._in_flight.append((step, _NotLaunched(error), begin))
                while self._in_flight:
                    outputs += self._take_in_oldest()
                return outputs
            if step.grammars:
                outputs += self._sample(step)
        if self._in_flight and (step is None or len(self._in_flight) > self._depth):
            outputs += self._take_in_oldest()
        self._check()
        return outputs

    def _take_in_oldest(self) -> list[CoreOutput]:
        """Wait for the oldest step in flight; its news."""
        oldest, pending, begin = self._in_flight.popleft()
        asked = time.perf_counter()
        try:
            result = self._wait(pending)
        except EngineDeadError:
            raise
        except Exception as error:
            self._last_end = time.perf_counter()
            if self._clock is not None:
                self._clock.failed()
            return self._fail(oldest, error)
        end = time.perf_counter()
        self.pulse.finish(step_kind(oldest.plan), end - begin)
        if self._clock is not None:
            self._clock.ended(end, result.stage_seconds, more=bool(self._in_flight))
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.slack = end - asked
            self.scheduler.drafting.timed(oldest.plan, result, end - max(begin, self._last_end))
            self._last_end = end
        return self._update(oldest, result)

    def _sample(self, step: ScheduledStep) -> list[CoreOutput]:
        """Draw a step's tokens under masks; what they follow is taken in first, beside its forward pass.

        Returns:
            News of the earlier steps.
        """
        outputs: list[CoreOutput] = []
        while self._in_flight and self._in_flight[0][0].plan.step_id <= step.plan.tokens_through:
            outputs += self._take_in_oldest()
        if not self._in_flight:  # a step before it failed, and this one with it
            return outputs
        masked = step.plan.masked
        assert masked is not None
        try:
            self._in_flight[-1][1].sample(collect_masks(masked, step.grammars))
        except EngineDeadError:
            raise
        except Exception as error:
            self._in_flight.pop()
            outputs += self._fail(step, error)
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks (those in use stay with their requests)."""
        self.kv.reset_cache()

    def sleep(self, level: int) -> int:
        """Give memory back while no request is under way; see `Executor.sleep`.

        Raises:
            RequestError: it cannot be done with these settings.
        """
        while self.has_work:  # steps of requests that have ended
            self.step()
        freed = self.executor.sleep(level)
        self.reset_prefix_cache()
        return freed

    def stats(self) -> CoreStats:
        """Gauges and counters now."""
        stats, pool = self.scheduler.current_stats(), self.kv.pool
        stats.num_waiting += self.grammars.num_waiting
        stats.prefix_cache_evictions = pool.evictions
        stats.graph_bytes = self.executor.graph_bytes
        if self._clock is not None:
            stats.pipeline_bubble = self._clock.bubble
            stats.pipeline_stage_seconds = self._clock.stage_seconds
            stats.pipeline_total_seconds = self._clock.total_seconds
        times = pool.residency
        stats.block_lifetime, stats.block_idle = times.lifetime, times.idle
        stats.block_reuse_gap = times.reuse_gap
        return stats

    def describe_kv(self, asked: DescribeKV) -> KVMap:
        """What the blocks of the pool (and of the host tier) are now, and the requests."""
        offloading, stats = self.kv.offloading, self.scheduler.current_stats()
        host = None if offloading is None else offloading.tier
        told = describe_kv(self.kv.pool, self.facts.groups, asked.cells, host)
        told.num_running = stats.num_running
        told.num_waiting = stats.num_waiting + self.grammars.num_waiting
        told.requests = describe_requests(self.scheduler, asked.requests, asked.tokens)
        return told

    def close(self) -> None:
        """Free the workers. What is cached goes to the disk tier before, if there is one."""
        self.grammars.close()
        if self.kv.offloading is not None and self.kv.offloading.has_store:
            try:
                self._keep_cached(self.kv.offloading)
            except Exception as error:
                logger.warning("cached KV blocks have not all been kept on disk: %s", error)
        self._in_flight.clear()
        self.executor.close()

    def _keep_cached(self, offloading: Offloading) -> None:
        """End all requests and bring what is cached to disk, or as much as there is time for."""
        end = time.monotonic() + _KEEP_SECONDS
        self.scheduler.abort([request.core.request_id for request, _, _ in self.scheduler.live_requests()])
        while (self._in_flight or self.scheduler.has_requests) and time.monotonic() < end:
            self.step()
        offloading.keep()
        while offloading.keeps and time.monotonic() < end:
            self.step()

    def _fail(self, step: ScheduledStep, error: Exception) -> list[CoreOutput]:
        logger.error("step %d failed: %s", step.plan.step_id, error, exc_info=error)
        # Later steps in flight were computed on the failed one's results.
        failed = [step, *(later for later, _, _ in self._in_flight if later.plan.step_id > step.plan.step_id)]
        self._in_flight = collections.deque(
            entry for entry in self._in_flight if entry[0].plan.step_id < step.plan.step_id
        )
        outputs = self.scheduler.fail(failed, f"{type(error).__name__}: {error}".splitlines()[0])
        self._check()
        return outputs

    def _check(self) -> None:
        if self.config.check_invariants:
            self.scheduler.check()


class _NotLaunched:
    """A step whose launch failed."""

    def __init__(self, error: Exception):
        self._error = error

    def sample(self, masks: TokenMasks) -> None:
        """There is nothing to draw from."""

    def wait(self) -> StepResult:
        raise self._error


def _ended(request_id: str, reason: str, error: str | None = None, param: str | None = None) -> CoreOutput:
    """The end of a request that never ran."""
    return CoreOutput(
        request_id, finish_reason=reason, error=error, error_param=param, metrics=RequestMetrics()
    )


def _wait(pending: PendingStep) -> StepResult:
    return pending.wait()
