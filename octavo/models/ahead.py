"""Tensors that are computed one by one, a few ahead of their consumer on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch

# Elements that may be computed before the consumer asks for them: enough for the threads to have work,
# and little beside any model.
_MOST_AHEAD = 1 << 22


class Job(NamedTuple):
    """A tensor to be made: its name, its elements, and the function that makes it."""

    name: str
    numel: int
    make: Callable[[], torch.Tensor]


@contextmanager
def own_threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool in which, and beside which, an operation of PyTorch runs on the one thread that calls it.

    Splitting every small operation over all threads instead makes each wait for the slowest, which on a
    busy machine costs tens of times the work.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(1,))
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        # PyTorch keeps one number for threads yet to come; the pool's setting must not outlive it.
        torch.set_num_threads(threads)


def run_ahead(jobs: Iterable[Job], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The jobs' tensors, in order.

    On the CPU, whole tensors run side by side, each on one thread. On a GPU the device is what runs
    ahead.
    """
    if device.type != "cpu":
        for job in jobs:
            yield job.name, job.make()
        return
    threads = torch.get_num_threads()
    waiting: deque[tuple[Job, Future[torch.Tensor]]] = deque()
    source = iter(jobs)
    with own_threads(threads, "octavo-load") as pool:
        ahead = 0
        following = next(source, None)
        while following is not None or waiting:
            while following is not None and (
                len(waiting) < threads or ahead + following.numel <= _MOST_AHEAD
            ):
                waiting.append((following, pool.submit(following.make)))
                ahead += following.numel
                following = next(source, None)
            done, future = waiting.popleft()
            yield done.name, future.result()
            del future
            ahead -= done.numel
