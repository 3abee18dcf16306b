"""Where a draft's KV lies in pages of its target's pool. Knows no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kv.format import KVGroup
from octavo.kv.groups import layers_per_page

# Pages side by side that are lent at once: as few as waste little, and many only where fewer hold no block.
_FEW, _MOST = 8, 64
_GOOD = 0.8  # of the best use that as many pages make of their bytes


@dataclass(frozen=True)
class DraftPages:
    """Draft blocks in runs of adjacent pages.

    The target's cache is `buffers` buffers, in each of which a page is a piece of `piece` bytes. The memory
    of all of them, each padded to a multiple of `unit`, is also rows of `unit` bytes, a draft layer's block.
    A draft block is `layers` such rows: one in each of as many buffers, or, where there are fewer buffers,
    several in each. The cache of a draft's layer is the same rows, counted from its own first one.

    Attributes:
        num_pages: of the pool.
        run: pages that are lent together, the first a multiple of it.
        blocks: draft blocks that a run holds.
    """

    num_pages: int
    buffers: int
    piece: int
    layers: int
    unit: int
    run: int
    blocks: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes from one buffer to the next."""
        return -(-self.num_pages * self.piece // self.unit) * self.unit

    @property
    def num_rows(self) -> int:
        """Rows of all buffers together."""
        return self.buffers * self.buffer_bytes // self.unit

    def first_row(self, place: int) -> int:
        """Where the cache of a draft's layer begins: of the layers at `place` in their KV groups."""
        return place % self.buffers * (self.buffer_bytes // self.unit) + place // self.buffers

    def block_id(self, page: int, number: int) -> int:
        """The id of a draft block: of those in the run that begins with `page` the one of this number."""
        deep = -(-self.layers // self.buffers)  # rows of a block in one buffer
        wide = self.buffers // self.layers or 1  # blocks side by side
        row = -(-page * self.piece // self.unit) + number // wide * deep
        return number % wide * self.layers * (self.buffer_bytes // self.unit) + row

    def pages_for(self, blocks: int) -> int:
        """Pages that one request's `blocks` draft blocks take."""
        return -(-blocks // self.blocks) * self.run


def draft_pages(groups: Sequence[KVGroup], draft_groups: Sequence[KVGroup], num_pages: int) -> DraftPages:
    """How blocks of the draft's groups lie in pages of the target's.

    `DraftPages.blocks` is 0 if even the longest run of pages holds none.
    """
    piece, buffers = groups[0].format.layer_block_bytes(), layers_per_page(groups)
    unit, layers = draft_groups[0].format.layer_block_bytes(), layers_per_page(draft_groups)
    deep, wide = -(-layers // buffers), buffers // layers or 1

    def blocks_in(run: int) -> int:
        step = math.gcd(run * piece, unit)  # what runs begin behind a row is a multiple of it
        return max(0, (run * piece - unit + step) // unit) // deep * wide

    for most in (_FEW, _MOST):
        runs = range(1, min(most, num_pages) + 1)
        used = {run: blocks_in(run) * layers * unit / (run * buffers * piece) for run in runs}
        best = max(used.values(), default=0.0)
        if best:
            run = next(run for run in runs if used[run] >= _GOOD * best)
            return DraftPages(num_pages, buffers, piece, layers, unit, run, blocks_in(run))
    return DraftPages(num_pages, buffers, piece, layers, unit, 1, 0)
