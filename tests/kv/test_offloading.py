"""When blocks are copied out, and that it leaves the order of use as it was."""

from __future__ import annotations

import random

from octavo.kv.offloading import Offloading, TierRates, Waiter
from octavo.kv.pool import BlockPool
from octavo.messages import CoreStats


def cached(pool: BlockPool, numbers: range) -> dict[int, int]:
    """Free blocks that carry keys, used in the order of `numbers`; the block of each."""
    held = {n: pool.allocate(1)[0] for n in numbers}
    for n, block in held.items():
        pool.register(0, bytes([n]), block)
    for block in held.values():
        pool.release([block])
    return held


def key_of(pool: BlockPool, block: int) -> int | None:
    entry = pool.entry_of(block)
    return None if entry is None else entry[1][0]


def make(num_blocks: int, num_slots: int) -> tuple[BlockPool, Offloading, CoreStats]:
    pool = BlockPool(num_blocks)
    return pool, Offloading(pool, num_slots, TierRates(100)), CoreStats()


def test_what_is_reused_soon_is_copied_out_ahead_and_held_meanwhile():
    pool, offloading, stats = make(20, 50)
    blocks = cached(pool, range(20))
    [copies] = offloading.plan(0, clean=True)
    assert not copies.urgent
    ahead = [blocks[n] for n in range(10)]  # at most half of what is free is held
    assert copies.out_blocks.tolist() == ahead
    assert pool.num_free == 10 and offloading.num_held() == 10
    assert offloading.tier.find((0, bytes([0]))) is None  # not there yet
    pool.check(offloading.held_blocks())
    offloading.check()
    offloading.ended(copies.number, True, stats)
    assert [key_of(pool, b) for b in pool.next_reused(20)] == list(range(20))
    assert offloading.tier.find((0, bytes([3]))) == copies.out_slots[3]
    assert (stats.host_blocks_out, stats.host_bytes_out) == (10, 1000)
    pool.allocate(10)
    assert offloading.plan(1, clean=False) == []  # what was copied out goes without another copy


def test_what_was_not_copied_in_time_is_copied_before_the_step():
    pool, offloading, stats = make(4, 50)
    blocks = cached(pool, range(4))
    assert pool.allocate(3) == [blocks[n] for n in range(3)]
    [copies] = offloading.plan(5, clean=False)
    assert copies.urgent and copies.out_blocks.tolist() == [blocks[n] for n in range(3)]
    assert offloading.num_held() == 0
    offloading.ended(copies.number, True, stats)
    assert all(offloading.tier.find((0, bytes([n]))) is not None for n in range(3))


def test_contents_of_a_failed_step_are_dropped_with_their_copies():
    pool, offloading, stats = make(4, 50)
    cached(pool, range(4))
    pool.allocate(1)
    [early] = offloading.plan(5, clean=False)
    pool.allocate(1)
    [late] = offloading.plan(7, clean=False)
    offloading.roll_back(6)
    for copies in (early, late):
        offloading.ended(copies.number, True, stats)
    assert offloading.tier.find((0, bytes([0]))) is not None
    assert offloading.tier.find((0, bytes([1]))) is None
    offloading.check()


def test_a_copy_that_ends_before_a_step_that_it_rests_on_is_not_found_until_that_has_run():
    """With three steps under way, step 3 tells of a copy that went with step 5, and step 4 may still fail."""
    for fails in (False, True):
        pool, offloading, stats = make(4, 50)
        cached(pool, range(4))
        pool.allocate(3)
        [copies] = offloading.plan(5, clean=False)
        offloading.step_ended(3, [copies.number], [], stats)
        offloading.check()
        entry = (0, bytes([1]))
        assert offloading.tier.find(entry) is None and offloading.copying
        if fails:
            offloading.roll_back(4)
        offloading.step_ended(6 if fails else 4, [], [], stats)
        offloading.check()
        assert not offloading.copying
        assert (offloading.tier.find(entry) is None) == fails
        assert offloading.tier.num_used == (0 if fails else 3)


def test_copies_that_fail_leave_nothing_behind():
    pool, offloading, stats = make(4, 2)
    blocks = cached(pool, range(4))
    [out] = offloading.plan(0, clean=True)
    offloading.ended(out.number, False, stats)
    assert offloading.tier.num_used == 0 and stats.host_blocks_out == 0
    assert pool.next_reused(4) == list(blocks.values())
    [out] = offloading.plan(1, clean=True)  # they are tried again
    offloading.ended(out.number, True, stats)
    [target] = pool.allocate(1)
    offloading.plan(2, clean=False)
    waiter, entry = Waiter(), (0, bytes([0]))
    offloading.load(waiter, [entry], [offloading.tier.find(entry)], [target])
    assert offloading.find(*entry) == target  # others may wait for it too
    [into] = offloading.plan(3, clean=False)
    assert into.into_blocks.tolist() == [target] and not into.urgent_into
    offloading.ended(into.number, False, stats)
    assert waiter.failed and not waiter
    assert pool.find(*entry) is None and offloading.find(*entry) is None
    offloading.check()


def test_the_order_of_use_survives_copies_that_end_in_any_order():
    for seed in range(30):
        draw = random.Random(seed)
        pool, offloading, stats = make(24, 200)
        held: dict[int, int] = {}
        released: list[int] = []
        under_way: list[int] = []
        for n in range(150):
            if len(held) < 6 and pool.num_free > 8:
                [held[n]] = pool.allocate(1)
                pool.register(0, bytes([n]), held[n])
            if held and draw.random() < 0.7:
                released.append(draw.choice(list(held)))
                pool.release([held.pop(released[-1])])
            under_way += [copies.number for copies in offloading.plan(n, clean=draw.random() < 0.5)]
            draw.shuffle(under_way)
            while under_way and draw.random() < 0.5:
                offloading.ended(under_way.pop(), True, stats)
            offloading.check()
            pool.check([[block] for block in held.values()] + offloading.held_blocks())
        while under_way:
            offloading.ended(under_way.pop(), True, stats)
        order = [key for block in pool.next_reused(24) if (key := key_of(pool, block)) is not None]
        assert order == [n for n in released if n in order]
        assert stats.host_blocks_out > 20 and len(order) > 8


def test_the_cost_model_counts_what_is_queued_before():
    pool, offloading, _ = make(8, 20)
    offloading._rates = TierRates(1000, host_copy_rate=1e6, prefill_rate=1000.0)
    # A block takes 1 ms to copy, 0.5 ms are lost in any case; 16 tokens take 16 ms to compute.
    assert offloading.worth(15, 16, busy=False) and not offloading.worth(16, 16, busy=False)
    assert offloading.worth(31, 16, busy=True) and not offloading.worth(32, 16, busy=True)
    slots = [offloading.tier.reserve((0, bytes([n]))) for n in range(4)]
    for slot in slots:
        offloading.tier.filled(slot)
    offloading.load(Waiter(), [(0, bytes([n])) for n in range(4)], slots, pool.allocate(4))
    assert not offloading.worth(12, 16, busy=False) and offloading.worth(11, 16, busy=False)
    offloading._rates = TierRates(1000)  # rates that nobody has measured
    assert offloading.worth(10_000, 1, busy=False)
