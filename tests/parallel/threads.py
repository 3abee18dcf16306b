"""Tensor-parallel ranks as threads of one process, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from octavo.parallel.state import TensorParallelGroup

T = TypeVar("T")


class ThreadGroup(TensorParallelGroup):
    """One rank of several threads that meet at a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, desk: list[torch.Tensor | None]):
        super().__init__(rank, size)
        self._barrier = barrier
        self._desk = desk

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._desk[self.rank] = x.clone()
        self._barrier.wait(60)
        everyone = [y for y in self._desk if y is not None]
        self._barrier.wait(60)
        assert len(everyone) == self.size
        return everyone

    def abort(self) -> None:
        """Let nobody wait for this rank any more."""
        self._barrier.abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def minimum(self, value: int) -> int:
        return min(int(x) for x in self._exchange(torch.tensor(value)))


def on_ranks(size: int, work: Callable[[TensorParallelGroup], T]) -> list[T]:
    """Run `work(group)` on `size` ranks; their results in order. The first error is raised."""
    barrier, desk = threading.Barrier(size), [None] * size
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
