"""Counters over engine cores that begin anew."""

from __future__ import annotations

import msgspec

from octavo.engine.totals import GAUGES, Totals
from octavo.messages import BucketCounts, CoreStats


def test_counters_go_on_and_gauges_do_not():
    totals = Totals()
    names = CoreStats.__struct_fields__
    plain = {n: i + 1 for i, n in enumerate(names) if isinstance(getattr(CoreStats(), n), int | float)}
    first = CoreStats(**plain)
    first.spec_accepted_per_pos = [3, 2]
    first.iteration_tokens = BucketCounts([1, 2, 3], 40.0)
    totals.take(first)
    assert totals.now == first
    totals.another_core(CoreStats(kv_blocks_total=7))
    for name, value in plain.items():
        left = 7 if name == "kv_blocks_total" else 0 if name in GAUGES else value
        assert getattr(totals.now, name) == left, name
    assert totals.now.spec_accepted_per_pos == [3, 2]
    second = CoreStats(**plain)
    second.spec_accepted_per_pos = [1, 1, 1]
    second.block_idle = BucketCounts([1, 0], 2.0)
    second.iteration_tokens = BucketCounts([1, 1, 1], 3.0)
    totals.take(second)
    totals.take(second)  # each tells all that its core has counted
    for name, value in plain.items():
        assert getattr(totals.now, name) == (value if name in GAUGES else 2 * value), name
    assert totals.now.spec_accepted_per_pos == [4, 3, 1]
    assert totals.now.iteration_tokens == BucketCounts([2, 3, 4], 43.0)
    assert totals.now.block_idle == BucketCounts([1, 0], 2.0)
    totals.another_core(CoreStats())
    totals.take(second)
    assert totals.now.num_steps == 3 * plain["num_steps"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(totals.now), type=CoreStats) == totals.now
