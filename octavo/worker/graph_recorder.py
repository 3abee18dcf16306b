"""Recording work of a device as CUDA graphs, which share their memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class GraphRecorder:
    """Owns the memory that graphs of one stream share: none runs beside another, and what one leaves for
    later is held by whoever holds its results.

    Attributes:
        num_bytes: of device memory that the graphs hold, the driver's part included.
        count: graphs that were recorded.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._works: dict[Hashable, Any] = {}
        self.num_bytes = 0
        self.count = 0

    def record(self, work: Callable[[], Result]) -> tuple[Any, Result]:
        """A graph of all that `work` launches, to be replayed, and `work`'s result, which replays write anew.
        Nothing is executed."""
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        self.count += 1
        self._pool = graph.pool()
        self.num_bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return graph, result

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do some work that reads and writes the same places each time, and leaves nothing else: eagerly the
        first time that it is met under its key, replayed after that."""
        graph = self._works.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._works[key], _ = self.record(work)
