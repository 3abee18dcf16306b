"""Counters that go on when another engine core begins to count from 0."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.messages import BucketCounts, CoreStats

GAUGES = frozenset(
    (
        "num_running",
        "num_waiting",
        "kv_blocks_total",
        "kv_blocks_used",
        "kv_cache_usage",
        "draft_blocks",
        "host_blocks_total",
        "host_blocks_used",
        "graph_bytes",
    )
)
"""Fields of `CoreStats` that tell of the moment; all others count."""


class Totals:
    """Owns what one engine core after another has told.

    Invariant: what `now` counts never falls, whichever core is asked.
    """

    def __init__(self) -> None:
        self.now = CoreStats()
        self._before: CoreStats | None = None  # of the cores that have ended

    def take(self, stats: CoreStats) -> None:
        """The core's latest figures."""
        self.now = stats if self._before is None else _added(self._before, stats)

    def another_core(self, stats: CoreStats) -> None:
        """Another core has begun to count; `stats` are its first figures."""
        self._before = self.now
        self.take(stats)


def _added(before: CoreStats, now: CoreStats) -> CoreStats:
    values = {
        name: getattr(now, name) if name in GAUGES else _sum(getattr(before, name), getattr(now, name))
        for name in CoreStats.__struct_fields__
    }
    return msgspec.structs.replace(now, **values)


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, BucketCounts):
        return BucketCounts(_sum(a.counts, b.counts), a.total + b.total)
    if isinstance(a, list):
        size = max(len(a), len(b))
        return [x + y for x, y in zip(_padded(a, size), _padded(b, size), strict=True)]
    return a + b


def _padded(counts: list[int], size: int) -> list[int]:
    return counts + [0] * (size - len(counts))
