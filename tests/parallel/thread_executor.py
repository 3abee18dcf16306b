"""An executor whose ranks are threads of this process: the engine on several ranks, started in no time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine import core as core_module
from octavo.engine.executor import Executor
from octavo.messages import StepPlan, StepResult, TokenMasks
from octavo.parallel import wire
from octavo.worker.worker import Worker
from tests.parallel.threads import ThreadGroup


class _Rank:
    """A thread that does what it is told, and the worker that it made."""

    def __init__(self, config: EngineConfig, group: ThreadGroup):
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._group = group
        threading.Thread(target=self._run, daemon=True).start()

        def load() -> Worker:
            self.worker = Worker(config, group=group)
            return self.worker

        self.begin(load)

    def begin(self, work: Callable[[], Any] | None) -> None:
        self._work.put(work)

    def outcome(self) -> tuple[Any, BaseException | None]:
        """Of what was begun first: its result, or the error."""
        return self._results.get(timeout=120)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._results.put((work(), None))
            except BaseException as error:
                self._group.abort()
                self._results.put((None, error))


def results(ranks: list[_Rank]) -> list[Any]:
    """What was begun on all ranks; raises the error that made the others miss one."""
    outcomes = [rank.outcome() for rank in ranks]
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [result for result, _ in outcomes]


class ThreadRanksExecutor(Executor):
    """Ranks as threads, which get plans as they pass over the wire and must draw the same tokens."""

    def __init__(self, config: EngineConfig):
        size = config.tensor_parallel_size
        barrier, desk = threading.Barrier(size), [None] * size
        self.ranks = [_Rank(config, ThreadGroup(rank, size, barrier, desk)) for rank in range(size)]
        workers = results(self.ranks)
        self.facts = workers[0].facts
        for worker in workers:
            for name in ("num_blocks", "cache_root", "groups", "num_draft_blocks", "num_host_blocks"):
                assert getattr(worker.facts, name) == getattr(self.facts, name), name

    def execute(self, plan: StepPlan) -> _Step:
        frame = wire.encode(wire.RunStep(0, plan))
        return _Step(self, self.on_all(lambda w: w.execute(wire.decode_to_rank(frame).plan)))

    def on_all(self, work: Callable[[Worker], Any]) -> list[Any]:
        for rank in self.ranks:
            rank.begin(lambda worker=rank.worker: work(worker))
        return results(self.ranks)

    def sleep(self, level: int) -> int:
        return sum(self.on_all(lambda w: w.sleep(level)))

    def wake_up(self) -> None:
        self.on_all(Worker.wake_up)

    def close(self) -> None:
        self.on_all(Worker.close)
        for rank in self.ranks:
            rank.begin(None)


class _Step:
    def __init__(self, executor: ThreadRanksExecutor, steps: list[Any]):
        self._executor, self._steps = executor, steps

    def _each(self, work: Callable[[Any], Any]) -> list[Any]:
        for rank, step in zip(self._executor.ranks, self._steps, strict=True):
            rank.begin(lambda step=step: work(step))
        return results(self._executor.ranks)

    def sample(self, masks: TokenMasks) -> None:
        self._each(lambda step: step.sample(masks))

    def wait(self) -> StepResult:
        first, *others = self._each(lambda step: step.wait())
        for other in others:
            assert np.array_equal(other.tokens, first.tokens), "the ranks drew different tokens"
            assert np.array_equal(other.num_tokens, first.num_tokens)
            assert other.copies_done == first.copies_done
        return first


@pytest.fixture
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test have their ranks as threads."""
    plain = core_module.make_executor
    monkeypatch.setattr(
        core_module,
        "make_executor",
        lambda config: ThreadRanksExecutor(config) if config.tensor_parallel_size > 1 else plain(config),
    )
