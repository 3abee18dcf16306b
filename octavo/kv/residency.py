"""How long blocks stay cached, lie idle, and are used again: times of a sample of blocks. Knows no tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from octavo.messages import BucketCounts

# Upper bounds of the buckets, seconds (those of vLLM's metrics of the same names).
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)  # fmt: skip  # noqa: E501
_SAMPLED = 256  # blocks whose times are taken: enough for a histogram, too few to cost a step anything


class Residency:
    """Owns the times of every n-th block: when it was allocated, and when it was used last.

    The pool hands out its blocks in turn, so a fixed sample sees what all see. A use is a hit by key, or
    the end of a request that held the block.

    Attributes:
        lifetime: allocation to eviction; idle: last use to eviction; reuse_gap: last use to a hit.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic):
        self._every = max(1, num_blocks // _SAMPLED)
        self._clock = clock
        self._allocated: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.lifetime, self.idle, self.reuse_gap = BucketCounts(), BucketCounts(), BucketCounts()

    def allocated(self, blocks: Iterable[int]) -> None:
        """Blocks begin a new life."""
        for block in blocks:
            if not block % self._every:
                self._allocated[block] = self._used[block] = self._clock()

    def hit(self, blocks: Iterable[int]) -> None:
        """Blocks were found by key."""
        for block in blocks:
            if not block % self._every and block in self._used:
                now = self._clock()
                self.reuse_gap.add(BOUNDS, now - self._used[block])
                self._used[block] = now

    def released(self, blocks: Iterable[int]) -> None:
        """Blocks that a request gave up."""
        for block in blocks:
            if not block % self._every and block in self._used:
                self._used[block] = self._clock()

    def evicted(self, block: int) -> None:
        """A block that could be found by key is about to be reused."""
        if not block % self._every and block in self._used:
            now = self._clock()
            self.lifetime.add(BOUNDS, now - self._allocated.pop(block))
            self.idle.add(BOUNDS, now - self._used.pop(block))
