"""A draft's KV blocks, in pages that the target's pool lends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kv.capacity import blocks_of
from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.kv.pool import BlockPool
from octavo.step_messages import BlockUpdate

# Of the pool: so much drafts may take from texts that are cached, and keep while requests wait for blocks.
_KEPT = 0.15


class DraftBlocks:
    """Owns the pages that drafts hold, and each slot's draft block tables in them, one per KV group.

    A page belongs to one slot. Nothing is shared between requests, and nothing outlives its request's time in
    a slot. Steps run one after another, and a draft after its step, so that a page that is given back may be
    written by the next step.

    Attributes:
        kept: pages that drafts keep where memory is short, as long as nobody is preempted for them.
        num_held: pages that they hold.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pages: DraftPages,
        pool: BlockPool,
        num_slots: int,
        next_blocks: int = 1,
    ):
        """
        Args:
            groups: the draft's.
            pages: how its blocks lie in pages of `pool`.
            next_blocks: that a running request takes from the pool at a time.
        """
        self._pages, self._pool, self._next_blocks = pages, pool, next_blocks
        self._num_groups = len(groups)
        self._size = groups[0].format.block_size
        self.kept = int(_KEPT * pool.num_blocks)
        self.num_held = 0
        self._runs: list[list[int]] = [[] for _ in range(num_slots)]  # first pages
        self._columns = [0] * num_slots  # of each slot's tables
        self._new: list[list[tuple[int, int, int]]] = [[] for _ in groups]

    def extend(self, slot: int, num_tokens: int, num_running: int) -> bool:
        """Give a slot blocks for so many tokens; False: there are too few, and nothing was given.

        Args:
            num_running: requests for whose next blocks the pool keeps room.
        """
        columns = blocks_of(num_tokens, self._size)
        begin = self._columns[slot]
        if columns <= begin:
            return True
        runs, per_run = self._runs[slot], self._pages.blocks
        if not self._borrow(
            runs, -(-columns * self._num_groups // per_run) - len(runs), num_running * self._next_blocks
        ):
            return False
        for column in range(begin, columns):
            for group, new in enumerate(self._new):
                place, number = divmod(column * self._num_groups + group, per_run)
                new.append((slot, column, self._pages.block_id(runs[place], number)))
        self._columns[slot] = columns
        return True

    def _borrow(self, runs: list[int], count: int, reserve: int) -> bool:
        """Add `count` runs of pages, or none."""
        pool, length = self._pool, self._pages.run
        if count * length > pool.num_free - reserve:
            return count <= 0
        before = len(runs)
        while len(runs) < before + count:
            page = pool.lend(length, with_keys=self.num_held + length <= self.kept)
            if page is None:
                self._give_back(runs, before)
                return False
            runs.append(page)
            self.num_held += length
        return True

    def _give_back(self, runs: list[int], keep: int) -> None:
        for page in runs[keep:]:
            self._pool.release(range(page, page + self._pages.run))
            self.num_held -= self._pages.run
        del runs[keep:]

    def held_by(self, slot: int) -> int:
        """Pages that a slot holds."""
        return len(self._runs[slot]) * self._pages.run

    def release(self, slot: int) -> None:
        """Give a slot's pages back to the pool."""
        if not self._columns[slot]:
            return
        self._give_back(self._runs[slot], 0)
        self._columns[slot] = 0
        for group, new in enumerate(self._new):
            self._new[group] = [entry for entry in new if entry[0] != slot]

    def take_updates(self) -> list[BlockUpdate]:
        """Entries of the tables that are new since the last call, by group."""
        updates = [BlockUpdate(*np.array(new, np.int32).reshape(-1, 3).T) for new in self._new]
        for new in self._new:
            new.clear()
        return updates

    def held(self) -> list[list[int]]:
        """The pages of each slot, for checks of the pool.

        Raises:
            AssertionError: they are not as many as are counted.
        """
        pages = [[p for page in runs for p in range(page, page + self._pages.run)] for runs in self._runs]
        assert sum(map(len, pages)) == self.num_held, "pages of drafts are miscounted"
        return pages
