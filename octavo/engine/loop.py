"""The one loop that drives an engine core, on a thread or in a process of its own."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.engine.core import EngineCore
from octavo.engine.profiling import Profiling
from octavo.engine.sleeping import Sleeping
from octavo.messages import (
    AbortRequests,
    AddRequests,
    CoreOutput,
    CoreOutputs,
    CoreStats,
    DescribeKV,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    StartProfile,
    StopProfile,
    ToCore,
    WakeUp,
)

if TYPE_CHECKING:
    from octavo.engine.cores import Core

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue  # of ToCore


class _GrammarsReady:
    """In the inbox of a core: grammars have been compiled. Nothing outside the process sends it."""


class _ExecutorDied:
    """In the inbox of a core: its workers have died. Nothing outside the process sends it."""


_STATS_INTERVAL = 0.25  # seconds between reports when no request has news
_LOG_INTERVAL = 10.0  # seconds between lines in the log


class _RateLog:
    """Writes throughput and cache use to the log every few seconds while there is work."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._since = time.monotonic()
        self._before = CoreStats()

    def tick(self, now: float, core: Core) -> None:
        """Log if it is time."""
        seconds = now - self._since
        if not self._enabled or seconds < _LOG_INTERVAL:
            return
        stats, before = core.stats(), self._before
        queries = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        logger.info(
            "prompt %.1f, output %.1f tokens/s; running %d, waiting %d; KV cache %.1f%%, "
            "prefix hits %.1f%%%s",
            (stats.prompt_tokens - before.prompt_tokens) / seconds,
            (stats.generation_tokens - before.generation_tokens) / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * hits / queries if queries else 0.0,
            _bubble(stats, before),
        )
        self._since, self._before = now, stats


def _bubble(stats: CoreStats, before: CoreStats) -> str:
    """For the log: the share of pipeline stages' time in which they waited; nothing where there are none."""
    total = stats.pipeline_total_seconds - before.pipeline_total_seconds
    computed = stats.pipeline_stage_seconds - before.pipeline_stage_seconds
    return f"; pipeline bubble {100 * max(0.0, 1 - computed / total):.1f}%" if total else ""


def run_core(core: Core, inbox: Inbox[ToCore], deliver: Callable[[CoreOutputs], None]) -> None:
    """Serve messages and step until told to shut down. Sleeps on the inbox while there is no work.

    Args:
        core: the engine core; closed on return.
        inbox: messages from the front end.
        deliver: takes each step's news; must not block for long.

    Raises:
        EngineDeadError: the device can run no further step.
    """
    reported, owed = 0.0, False  # whether something may have changed since figures were delivered
    log = _RateLog(not core.config.disable_log_stats)
    profiling, sleeping = Profiling(core), Sleeping(core)
    if isinstance(core, EngineCore):
        core.grammars.notify = lambda: inbox.put(_GrammarsReady())  # type: ignore[arg-type]
        core.executor.watch(lambda: inbox.put(_ExecutorDied()))  # type: ignore[arg-type]
    try:
        while True:
            outputs: list[CoreOutput] = []
            wait = not core.has_work
            if wait:
                if owed:  # copies ended after the last request, say: nobody would ask for long
                    deliver(CoreOutputs([], core.stats()))
                    owed = False
                core.pulse.rest()
            messages = _receive(inbox, wait)
            core.pulse.go_round()
            for message in messages:
                if isinstance(message, Shutdown):
                    core.close()
                    return
                if isinstance(message, StartProfile | StopProfile):
                    core.pulse.chore()
                    start = isinstance(message, StartProfile)
                    status = profiling.start() if start else profiling.stop()
                    deliver(CoreOutputs([], core.stats(), status))
                elif isinstance(message, _GrammarsReady):
                    assert isinstance(core, EngineCore)
                    outputs += core.admit_compiled()
                elif isinstance(message, _ExecutorDied):
                    assert isinstance(core, EngineCore)
                    core.executor.check()
                elif isinstance(message, DescribeKV):
                    deliver(CoreOutputs([], core.stats(), kv_map=core.describe_kv(message)))
                elif isinstance(message, Sleep | WakeUp):
                    core.pulse.chore()
                    slept = (
                        sleeping.sleep(message.level) if isinstance(message, Sleep) else sleeping.wake_up()
                    )
                    deliver(CoreOutputs(outputs, core.stats(), sleep=slept))
                    outputs = []
                elif isinstance(message, AddRequests) and sleeping.level:
                    outputs += sleeping.refused(message)
                else:
                    outputs += _handle(core, message)
            if core.has_work:
                outputs += profiling.step() if profiling.running else core.step()
            now, owed = time.monotonic(), True
            if outputs or now - reported > _STATS_INTERVAL:
                deliver(CoreOutputs(outputs, core.stats()))
                reported, owed = now, False
                log.tick(now, core)
    finally:
        profiling.close()


def _receive(inbox: Inbox[ToCore], wait: bool) -> list[ToCore]:
    messages: list[ToCore] = [inbox.get()] if wait else []
    try:
        while True:
            messages.append(inbox.get_nowait())
    except queue.Empty:
        return messages


def _handle(core: Core, message: ToCore) -> list[CoreOutput]:
    if isinstance(message, AddRequests):
        outputs = []
        for request in message.requests:
            try:
                core.add(request)
            except ValueError as error:
                outputs.append(CoreOutput(request.request_id, finish_reason="error", error=str(error)))
        return outputs
    if isinstance(message, AbortRequests):
        return core.abort(message.request_ids)
    assert isinstance(message, ResetPrefixCache)
    core.reset_prefix_cache()
    return []
