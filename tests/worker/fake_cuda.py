"""Streams and events without a device: each stream runs what it was given in order, streams at random.

What a stream was given runs only when `advance` says so, and then only what events allow, so that a copy
that relies on an order that nobody asked for meets another one sooner or later.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Event:
    """Fires when the stream that recorded it gets there."""

    def __init__(self) -> None:
        self.fired = False
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        stream.give(lambda: setattr(self, "fired", True))

    def query(self) -> bool:
        assert self.recorded
        return self.fired


class Stream:
    """Work in order; a wait holds up what follows."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.work: deque[Callable[[], Any] | Event] = deque()

    def give(self, work: Callable[[], Any] | Event) -> None:
        with self._cuda.lock:
            self.work.append(work)

    def wait_event(self, event: Event) -> None:
        assert event.recorded
        self.give(event)

    def synchronize(self) -> None:
        while self.work:
            self._cuda.advance()


class FakeCuda:
    """What `octavo.worker.copy_queue` uses of `torch.cuda`."""

    Event = Event

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._local = threading.local()
        self.compute = self.Stream(None)

    def Stream(self, device: Any) -> Stream:  # noqa: N802 (torch's name)
        self._streams.append(Stream(self))
        return self._streams[-1]

    def set_device(self, device: Any) -> None:
        pass

    def current_stream(self, device: Any) -> Stream:
        return getattr(self._local, "stream", self.compute)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        try:
            yield
        finally:
            del self._local.stream

    def advance(self) -> bool:
        """Run the next work of a random stream that can go on; whether there was one."""
        with self.lock:
            ready = [s for s in self._streams if s.work and not _held(s.work[0])]
            if not ready:
                return False
            work = self._random.choice(ready).work.popleft()
            if not isinstance(work, Event):
                work()
            return True


def _held(work: Callable[[], Any] | Event) -> bool:
    return isinstance(work, Event) and not work.fired
