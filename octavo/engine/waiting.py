"""The queue of requests that have neither a slot nor blocks."""

from __future__ import annotations

import heapq

from octavo.engine.request import Request


class WaitingQueue:
    """Requests in order; those that end while they wait are passed over later, when their turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, request: Request) -> None:
        """Queue a request by its order."""
        heapq.heappush(self._heap, (request.order, request))
        self._live += 1

    def ended(self) -> None:
        """A request that waits is done."""
        self._live -= 1

    def peek(self) -> Request:
        """The first one; there must be one."""
        while self._heap[0][1].done:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> None:
        """Take out the first one, which `peek` has shown."""
        heapq.heappop(self._heap)
        self._live -= 1

    def live(self) -> list[Request]:
        """Those that wait, in no order (for tests)."""
        return [request for _, request in self._heap if not request.done]
