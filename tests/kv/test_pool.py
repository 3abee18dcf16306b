"""The block pool under any sequence of operations, against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from octavo.kv.pool import BlockPool

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables come and go, find and register keys; the pool's own check runs after every step."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[list[int]] = []
        self.contents: dict[int, int] = {}  # block: generation of its contents
        self.keys: dict[bytes, tuple[int, int]] = {}  # key: block and generation when it was registered
        self.generation = 0

    @rule(target=tables, count=st.integers(0, 5))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return []
        table = self.pool.allocate(count)
        for block in table:
            self.generation += 1
            self.contents[block] = self.generation
        self.held.append(table)
        return table

    @rule(target=tables, count=st.sampled_from([1, 2, 3, 4]), with_keys=st.booleans())
    def lend(self, count, with_keys):
        known = set(self.pool.cached())
        first = self.pool.lend(count, with_keys)
        if first is None:
            return []
        run = list(range(first, first + count))
        assert first % count == 0 and run[-1] < BLOCKS
        assert not set(run) & {block for table in self.held for block in table}
        assert with_keys or not set(run) & {block for block, _ in known}
        for block in run:
            self.generation += 1
            self.contents[block] = self.generation
        self.held.append(run)
        return run

    @rule(table=consumes(tables))
    def release(self, table):
        if table in self.held:
            self.held.remove(table)
            self.pool.release(table)

    @rule(table=tables, key=st.integers(0, 6))
    def register(self, table, key):
        if table and any(t is table for t in self.held):
            name = bytes([key])
            if self.pool.register(0, name, table[0]):
                self.keys[name] = (table[0], self.contents[table[0]])

    @rule(target=tables, key=st.integers(0, 6))
    def find(self, key):
        block = self.pool.find(0, bytes([key]))
        if block is None:
            return []
        assert self.keys[bytes([key])] == (block, self.contents[block]), "found a block with other contents"
        self.pool.acquire([block])
        table = [block]
        self.held.append(table)
        return table

    @rule(table=tables)
    def forget(self, table):
        if table and any(t is table for t in self.held):
            self.pool.forget(table[0])

    @rule()
    def reset(self):
        self.pool.reset_cache()
        assert self.pool.num_cached() == 0

    @invariant()
    def consistent(self):
        self.pool.check(self.held)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_cached_blocks_are_reused_last_and_oldest_first():
    pool = BlockPool(6)
    first, second, plain = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for name, block in zip(b"abcd", first + second, strict=True):
        assert pool.register(0, bytes([name]), block)
    pool.release(second)
    pool.release(plain)
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted(plain)  # nobody can find these
    # Of the findable: the table released first, its tail before its head.
    assert pool.allocate(1) == [second[1]]
    assert pool.find(0, b"d") is None
    assert pool.find(0, b"c") == second[0]
    assert pool.allocate(2) == [second[0], first[1]]
    assert pool.find(0, b"a") == first[0]


def test_a_key_moves_from_a_free_block_to_a_held_one():
    pool = BlockPool(4)
    old, new, other = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    assert pool.register(0, b"k", old[0])
    assert not pool.register(0, b"k", new[0])  # somebody holds the first
    assert pool.register(0, b"x", other[0])
    pool.release(other)
    pool.release(old)
    assert pool.register(0, b"k", new[0])
    assert pool.find(0, b"k") == new[0]
    assert pool.num_cached() == 2
    # What nobody can find any more is reused before what is cached.
    assert set(pool.allocate(2)) == {old[0], 3}
    pool.check([old, new, [3]])


def test_groups_do_not_see_each_others_keys():
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.register(0, b"k", block)
    assert pool.find(1, b"k") is None
    assert pool.find(0, b"k") == block
