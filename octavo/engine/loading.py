"""Requests that wait for copies: between the queue and a slot."""

from __future__ import annotations

import bisect

from octavo.engine.request import Request


class LoadingRequests:
    """Owns the requests whose beginnings are on their way, in order.

    They hold the blocks that copies fill and the ones they found, or nothing if blocks are read from disk
    into the host tier first. One that is aborted or gives way meanwhile stays until its copies are through:
    until then its blocks can't be anybody else's.

    Attributes:
        num_live: those that will go on into a slot.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_live = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        request.loading = True
        bisect.insort(self._requests, request, key=lambda r: r.order)
        self.num_live += 1

    def give_up(self, request: Request) -> None:
        """A request will not go on, whatever its copies bring."""
        if not request.gives_way:
            request.gives_way = True
            self.num_live -= 1

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
        self._requests.remove(request)
        self.num_live -= not request.gives_way
        request.loading = request.gives_way = False

    def live(self) -> list[Request]:
        """Those that will go on, in order."""
        return [request for request in self._requests if not request.gives_way]

    def ended(self) -> list[Request]:
        """Those whose copies are through and who do not go on into a slot: given up, failed, or read from
        disk so far."""
        return [
            request
            for request in self._requests
            if not request.seq.waiter
            and (request.gives_way or request.seq.waiter.failed or not request.num_found)
        ]

    def ready(self) -> list[Request]:
        """Those that can go on into a slot now, in order."""
        return [
            request
            for request in self._requests
            if request.num_found and not request.gives_way and not request.seq.waiter
        ]
