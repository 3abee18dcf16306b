"""Tensor-parallel ranks as threads of one process, for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from octavo.parallel.stages import StageGroup
from octavo.parallel.state import TensorParallelGroup

T = TypeVar("T")
Desk = dict[int, dict[int, tuple[int, torch.Tensor]]]


def new_desk() -> Desk:
    """What the threads of one group share."""
    return {0: {}, 1: {}}


class ThreadGroup(TensorParallelGroup):
    """One rank of several threads that meet at a barrier.

    They lay what they have on two desks by turns: nobody comes back to one before all have left it.
    """

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, desk: Desk):
        super().__init__(rank, size)
        self._barrier = barrier
        self._desk = desk
        self._turn = 0

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._turn += 1
        desk = self._desk[self._turn % 2]
        desk[self.rank] = self._turn, x.clone()
        self._barrier.wait(120)
        assert [desk[rank][0] for rank in range(self.size)] == [self._turn] * self.size
        return [desk[rank][1] for rank in range(self.size)]

    def abort(self) -> None:
        """Let nobody wait for this rank any more."""
        self._barrier.abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def minimum(self, value: int) -> int:
        return min(int(x) for x in self._exchange(torch.tensor(value)))


class ThreadStages(StageGroup):
    """One pipeline stage of several threads, which put what they send on each other's shelves."""

    def __init__(self, stage: int, size: int, meeting: ThreadGroup, shelves: list[queue.SimpleQueue]):
        """`meeting`: of the stages; `shelves`: one for rows and one for tokens of each."""
        super().__init__(stage, size)
        self._meeting = meeting
        self._rows, self._tokens = shelves[::2], shelves[1::2]

    def send(self, x: torch.Tensor) -> None:
        self._rows[self.stage + 1].put(x.clone())

    def receive(self, into: torch.Tensor) -> None:
        self._take(self._rows[self.stage], into)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        for shelf in self._tokens[:-1]:
            shelf.put(tokens.clone())

    def receive_tokens(self, into: torch.Tensor) -> None:
        self._take(self._tokens[self.stage], into)

    def minimum(self, value: int) -> int:
        return self._meeting.minimum(value)

    def abort(self) -> None:
        """Let nobody wait for this stage any more."""
        self._meeting.abort()
        for shelf in (*self._rows, *self._tokens):
            shelf.put(None)

    def _take(self, shelf: queue.SimpleQueue, into: torch.Tensor) -> None:
        x = shelf.get(timeout=60)
        if x is None:
            raise threading.BrokenBarrierError("another stage has ended")
        assert x.shape == into.shape and x.dtype == into.dtype, (x.shape, into.shape)
        into.copy_(x)


def grid(tensor: int, pipeline: int) -> list[tuple[ThreadGroup, StageGroup]]:
    """The groups of every rank of `tensor` to a stage, in order."""
    ranks: list[tuple[ThreadGroup, StageGroup]] = []
    meetings = [(threading.Barrier(pipeline), new_desk()) for _ in range(tensor)]
    shelves: list[list[queue.SimpleQueue]] = [
        [queue.SimpleQueue() for _ in range(2 * pipeline)] for _ in range(tensor)
    ]
    for stage in range(pipeline):
        barrier, desk = threading.Barrier(tensor), new_desk()
        for rank in range(tensor):
            stages = StageGroup()
            if pipeline > 1:
                meeting = ThreadGroup(stage, pipeline, *meetings[rank])
                stages = ThreadStages(stage, pipeline, meeting, shelves[rank])
            ranks.append((ThreadGroup(rank, tensor, barrier, desk), stages))
    return ranks


def on_ranks(size: int, work: Callable[[TensorParallelGroup], T]) -> list[T]:
    """Run `work(group)` on `size` ranks; their results in order. The first error is raised."""
    barrier, desk = threading.Barrier(size), new_desk()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, barrier, desk))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
