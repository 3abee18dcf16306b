"""The block pool: which KV blocks are free, owned, or free but still findable by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from octavo.kv.residency import Residency

_LOOKED_AT = 1024  # free blocks, in search of some that lie side by side


class BlockPool:
    """Reference-counted block ids `0 .. num_blocks - 1`, shared by all KV groups.

    Invariants (see `check`): a block is in the free list exactly when its count is 0; a key maps to
    one block that carries it. Free blocks without a key are reused first; those with a key wait in
    order of release, so the least recently used goes first. Whoever may still touch a block (a
    request's table, a transfer in flight) holds a reference, which makes the count the fence before
    reuse; work queued on one device stream needs none, since later writes queue behind it.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[tuple[int, bytes] | None] = [None] * num_blocks
        self._by_key: dict[tuple[int, bytes], int] = {}
        # A doubly linked list through two arrays; index num_blocks is the sentinel (head and tail).
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self.num_free = num_blocks
        self._clock = 0
        self._used_at = [0] * num_blocks  # when each was released last
        self.evictions = 0  # keys lost to reuse, since the start
        self.residency = Residency(num_blocks)
        # What reused blocks carried, for a tier that wants to keep it; whoever sets the list empties it.
        self.evicted: list[tuple[int, tuple[int, bytes]]] | None = None

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference; reused ones lose their key.

        Raises:
            ValueError: fewer are free (callers check `num_free` first).
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        following, sentinel = self._next, self.num_blocks
        block = following[sentinel]
        for _ in range(count):
            blocks.append(block)
            self._refs[block] = 1
            entry = self._keys[block]
            if entry is not None:
                self.evictions += 1
                self.residency.evicted(block)
                self.forget(block)
                if self.evicted is not None:
                    self.evicted.append((block, entry))
            block = following[block]
        following[sentinel] = block
        self._prev[block] = sentinel
        self.num_free -= count
        self.residency.allocated(blocks)
        return blocks

    def lend(self, count: int, with_keys: bool) -> int | None:
        """Take `count` free blocks side by side, the first a multiple of that, each with one reference.

        Of those found first in the order of reuse. Keys that they carry are lost, in other tiers too unless
        a copy is there: what takes the blocks writes in them before a copy that begins now could read.

        Args:
            with_keys: whether they may carry any.

        Returns:
            The first one; None: there are none.
        """
        block = self._next[self.num_blocks]
        for _ in range(_LOOKED_AT):
            if block == self.num_blocks or (self._keys[block] is not None and not with_keys):
                return None
            first = block - block % count
            run = range(first, first + count)
            if run.stop <= self.num_blocks and not any(self._refs[b] for b in run):
                if with_keys or all(self._keys[b] is None for b in run):
                    self._lend(run)
                    return first
            block = self._next[block]
        return None

    def _lend(self, run: range) -> None:
        for block in run:
            self._unlink(block)
            self._refs[block] = 1
            if self._keys[block] is not None:
                self.evictions += 1
                self.residency.evicted(block)
                self.forget(block)
        self.residency.allocated(run)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that were found by key (or are held already)."""
        self.residency.hit(blocks)
        self.hold(blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that a copy will read: a fence, not a use."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference of each block of a table, in table order.

        The last blocks become reusable before the first ones: a chain is only found from its head.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            self._clock += 1
            self._used_at[block] = self._clock
            if self._refs[block] == 0:
                self._link(block)
        self.residency.released(blocks)

    def unhold(self, blocks: Sequence[int]) -> None:
        """Give up one reference of each block, where `hold` was called with these in the order of reuse.

        Those that nobody else holds return to their places in the order of use.
        """
        before = sentinel = self.num_blocks
        last = self._prev[sentinel]
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            used = self._used_at[block]
            if self._keys[block] is None or last == sentinel or used > self._used_at[last]:
                self._link(block)  # lost its key, or was used meanwhile
                continue
            while (after := self._next[before]) != sentinel and (
                self._keys[after] is None or self._used_at[after] < used
            ):
                before = after
            self._insert(before, block)
            before = block

    def next_reused(self, count: int) -> list[int]:
        """The next blocks that `allocate` would take, at most `count`."""
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) < count:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def used_last(self) -> Iterator[tuple[int, bytes]]:
        """Groups and keys of the free blocks that can be found, those that were used last first."""
        block = self._prev[self.num_blocks]
        while block != self.num_blocks:
            if (entry := self._keys[block]) is not None:
                yield entry
            block = self._prev[block]

    def entry_of(self, block: int) -> tuple[int, bytes] | None:
        """KV group and key that a block carries."""
        return self._keys[block]

    def find(self, group: int, key: bytes) -> int | None:
        """The block that holds `key` of a KV group, free or not."""
        return self._by_key.get((group, key))

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds."""
        return sum(self._refs[block] == 0 for block in blocks)

    def register(self, group: int, key: bytes, block: int) -> bool:
        """Make a held block findable. False if another block that is held already serves the key.

        A block that serves it and is free hands the key over: it would be reused sooner.
        """
        entry = (group, key)
        if self._keys[block] is not None:
            return False
        owner = self._by_key.get(entry)
        if owner is not None:
            if self._refs[owner]:
                return False
            self.discard(owner)
        self._by_key[entry] = block
        self._keys[block] = entry
        return True

    def forget(self, block: int) -> None:
        """Drop a block's key, if it has one."""
        entry = self._keys[block]
        if entry is not None:
            del self._by_key[entry]
            self._keys[block] = None

    def discard(self, block: int) -> None:
        """Drop a block's key; if nobody holds the block, it is reused first."""
        free = not self._refs[block]
        if free:
            self._unlink(block)
        self.forget(block)
        if free:
            self._link(block)

    def reset_cache(self) -> None:
        """Drop all keys: nothing is found any more."""
        self._by_key.clear()
        self._keys = [None] * self.num_blocks

    def holders(self) -> tuple[Sequence[int], Sequence[tuple[int, bytes] | None]]:
        """By block: how many hold it, and the (group, key) that it can be found by. Not copies."""
        return self._refs, self._keys

    def cached(self) -> list[tuple[int, tuple[int, bytes]]]:
        """Blocks that can be found, and what by."""
        return [(block, entry) for entry, block in self._by_key.items()]

    def num_cached(self) -> int:
        """Blocks that can be found by key."""
        return len(self._by_key)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int) -> None:
        sentinel = self.num_blocks
        if self._keys[block] is None:  # nobody can find it: reuse it first
            before = sentinel
        else:
            before = self._prev[sentinel]
        self._insert(before, block)

    def _insert(self, before: int, block: int) -> None:
        after = self._next[before]
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify all invariants against every block table that is held (for tests).

        Raises:
            AssertionError: naming the first violation.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from the tables that hold the blocks"
        free, block = set(), self._next[self.num_blocks]
        while block != self.num_blocks:
            assert block not in free, f"block {block} is in the free list twice"
            assert self._prev[self._next[block]] == block, f"links around block {block} are broken"
            free.add(block)
            block = self._next[block]
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, {self.num_free} counted"
        assert free == {b for b, refs in enumerate(self._refs) if refs == 0}, "free list and counts differ"
        for entry, owner in self._by_key.items():
            assert self._keys[owner] == entry, f"block {owner} does not carry its key"
        assert sum(k is not None for k in self._keys) == len(self._by_key), "a key is carried but not mapped"
