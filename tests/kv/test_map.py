"""The map of the pool, and the times of its blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.map import CACHED, FREE, OWNED, SHARED, STATES, describe_kv
from octavo.kv.pool import BlockPool
from octavo.kv.residency import BOUNDS, Residency

GROUPS = [KVGroup("full", (0, 1), KVFormat("bfloat16", 16, 2, 8))]


class FakeHost:
    def __init__(self, keys: set[tuple[int, bytes]], num_slots: int, used: list[int]):
        self.keys, self.num_slots, self.used = keys, num_slots, used

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self.keys

    def used_slots(self) -> list[int]:
        return self.used


def filled() -> BlockPool:
    """Of 10 blocks 0 and 1 are shared, 2 is owned, 3 and 4 are cached, the rest free."""
    pool = BlockPool(10)
    blocks = pool.allocate(5)
    assert blocks == [0, 1, 2, 3, 4]
    for block in blocks[3:]:
        assert pool.register(0, bytes([block]), block)
    pool.acquire(blocks[:2])
    pool.release(blocks[3:])
    return pool


def test_each_block_has_its_state():
    told = describe_kv(filled(), GROUPS, 100)
    assert list(told.cells) == [SHARED, SHARED, OWNED, CACHED, CACHED] + [FREE] * 5
    assert told.counts == {"shared": 2, "owned": 1, "cached": 2, "free": 5}
    assert (told.blocks_per_cell, told.num_blocks) == (1, 10)
    assert (told.block_tokens, told.block_bytes) == (16, 2 * 2 * 2 * 16 * 8 * 2)
    assert (told.host_blocks, told.host_cells) == (0, b"")


def test_cells_are_bounded_and_show_what_most_blocks_are():
    told = describe_kv(filled(), GROUPS, 4)
    assert told.blocks_per_cell == 3
    # Blocks 3 to 5 are cached, cached, free; the last cell has one block.
    assert list(told.cells) == [SHARED, CACHED, FREE, FREE]
    assert sum(told.counts.values()) == 10


def test_the_host_tier_is_told():
    host = FakeHost({(0, b"\x03"), (0, b"gone")}, 6, [0, 1, 5])
    told = describe_kv(filled(), GROUPS, 3, host)
    assert told.host_copies == 1
    assert (told.host_blocks, told.host_blocks_per_cell) == (6, 2)
    assert list(told.host_cells) == [1, 0, 1]


@pytest.mark.parametrize("num_blocks,cells", [(1, 1), (4097, 4096), (100_000, 4096)])
def test_any_pool_gives_as_many_cells_as_were_asked_for_at_most(num_blocks, cells):
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks // 2)
    told = describe_kv(pool, GROUPS, cells)
    assert len(told.cells) <= cells
    assert len(told.cells) * told.blocks_per_cell >= num_blocks
    assert told.counts["owned"] == num_blocks // 2
    assert set(told.cells) <= set(range(len(STATES)))


def test_cells_agree_with_counting_by_hand():
    rng = random.Random(7)
    pool = BlockPool(53)
    for block in pool.allocate(40):
        if rng.random() < 0.5:
            pool.register(0, bytes([block]), block)
        if rng.random() < 0.3:
            pool.acquire([block])
        elif rng.random() < 0.5:
            pool.release([block])
    fine = np.frombuffer(describe_kv(pool, GROUPS, 53).cells, np.uint8)
    coarse = describe_kv(pool, GROUPS, 8)
    for i, state in enumerate(coarse.cells):
        counts = np.bincount(fine[i * 7 : i * 7 + 7], minlength=4)
        assert counts[state] == counts.max()


def test_times_of_blocks_are_counted_when_they_are_evicted():
    now = 0.0
    pool = BlockPool(2)
    pool.residency = Residency(2, lambda: now)
    (block,) = pool.allocate(1)
    pool.register(0, b"a", block)
    now = 4.0
    pool.release([block])
    now = 4.3
    pool.acquire([block])
    pool.release([block])
    now = 100.0
    taken = pool.allocate(2)  # the free one first, then the cached one
    assert block in taken and pool.evictions == 1
    times = pool.residency
    assert sum(times.lifetime.counts) == sum(times.idle.counts) == sum(times.reuse_gap.counts) == 1
    assert times.lifetime.total == pytest.approx(100.0)
    assert times.idle.total == pytest.approx(95.7)
    assert times.reuse_gap.total == pytest.approx(0.3)
    assert times.lifetime.counts[BOUNDS.index(120.0)] == 1
    assert times.reuse_gap.counts[BOUNDS.index(0.5)] == 1


def test_blocks_without_a_key_are_not_evicted():
    pool = BlockPool(4)
    for _ in range(3):
        pool.release(pool.allocate(4))
    assert pool.evictions == 0
    assert not any(pool.residency.lifetime.counts)


def test_large_pools_are_sampled():
    pool = BlockPool(100_000)
    blocks = pool.allocate(100_000)
    for block in blocks:
        pool.register(0, block.to_bytes(4, "big"), block)
    pool.release(blocks)
    pool.allocate(100_000)
    assert pool.evictions == 100_000
    assert 200 <= sum(pool.residency.lifetime.counts) <= 300
