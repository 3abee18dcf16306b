"""An executor whose ranks are threads of this process: the engine on several ranks, started in no time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine import core as core_module
from octavo.engine.executor import Executor
from octavo.kv.groups import page_bytes
from octavo.parallel import wire
from octavo.parallel.stages import StageGroup
from octavo.step_messages import StepPlan, StepResult, TokenMasks
from octavo.worker.worker import Worker
from tests.parallel.threads import ThreadGroup, ThreadStages, grid


class _Rank:
    """A thread that does what it is told in order, and the worker that it made."""

    def __init__(self, config: EngineConfig, group: ThreadGroup, stages: StageGroup):
        self._thread = ThreadPoolExecutor(1)
        self._group, self._stages = group, stages
        self.masked: Any = None  # a step that waits for its masks
        self.loading = self.begin(lambda: Worker(config, group=group, stages=stages))

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return work()
            except PretendFailure:
                raise
            except BaseException:
                self._group.abort()
                if isinstance(self._stages, ThreadStages):
                    self._stages.abort()
                raise

        return self._thread.submit(run)

    def launch(self, frame: bytes) -> StepResult | None:
        """Run a step; one with masked requests up to where its tokens are drawn."""
        plan = wire.decode_to_rank(frame).plan
        step = self.loading.result().execute(plan)
        if plan.masked is None:
            return step.wait()
        self.masked = step
        return None

    def draw(self, masks: TokenMasks) -> StepResult:
        self.masked.sample(masks)
        return self.masked.wait()

    def close(self) -> None:
        self.begin(self.loading.result().close).result(120)
        self._thread.shutdown()


class PretendFailure(RuntimeError):
    """What a test makes a step raise, with which a rank goes on."""


def results(begun: list[Future[Any]]) -> list[Any]:
    """What was begun on all ranks; raises the error that made the others miss one."""
    errors = [error for error in (future.exception(120) for future in begun) if error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in begun]


class ThreadRanksExecutor(Executor):
    """Ranks as threads, which get plans as they pass over the wire and must draw the same tokens.

    Attributes:
        newest: the one that was made last.
        page_bytes: of the pool's pages on the rank where they are largest.
    """

    newest: ClassVar[ThreadRanksExecutor]

    def __init__(self, config: EngineConfig):
        tensor, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.ranks = [_Rank(config, *groups) for groups in grid(tensor, stages)]
        self.tellers = self.ranks[-tensor:]  # the last stage's
        workers = results([rank.loading for rank in self.ranks])
        self.facts = workers[-tensor].facts
        self.page_bytes = max(page_bytes(worker.groups) for worker in workers)
        ThreadRanksExecutor.newest = self
        for worker in workers:
            for name in ("num_blocks", "cache_root", "groups", "num_host_blocks"):
                assert getattr(worker.facts, name) == getattr(self.facts, name), name

    def execute(self, plan: StepPlan) -> _Step:
        frame = wire.encode(wire.RunStep(0, plan))
        return _Step(self, [rank.begin(partial(rank.launch, frame)) for rank in self.ranks])

    def on_all(self, work: Callable[[Worker], Any]) -> list[Any]:
        return results([rank.begin(partial(work, rank.loading.result())) for rank in self.ranks])

    def sleep(self, level: int) -> int:
        return sum(self.on_all(lambda w: w.sleep(level)))

    def wake_up(self) -> None:
        self.on_all(Worker.wake_up)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class _Step:
    def __init__(self, executor: ThreadRanksExecutor, begun: list[Future[Any]]):
        self._executor, self._begun = executor, begun

    def sample(self, masks: TokenMasks) -> None:
        self._begun = [rank.begin(partial(rank.draw, masks)) for rank in self._executor.ranks]

    def wait(self) -> StepResult:
        everyone: list[StepResult] = results(self._begun)
        told = everyone[-len(self._executor.tellers) :]
        for result in told[1:]:
            assert np.array_equal(result.tokens, told[0].tokens), "the ranks drew different tokens"
            assert np.array_equal(result.num_tokens, told[0].num_tokens)
        assert all(result.copies_done == told[0].copies_done for result in everyone)
        told[0].stage_seconds = sum(result.stage_seconds for result in everyone[:: len(told)])
        return told[0]


@pytest.fixture
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of this test have their ranks as threads, which hand each other the interpreter quickly."""
    plain = core_module.make_executor
    monkeypatch.setattr(
        core_module,
        "make_executor",
        lambda config: ThreadRanksExecutor(config) if config.num_ranks > 1 else plain(config),
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
