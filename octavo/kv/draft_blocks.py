"""The draft's own KV blocks: a request has some from its first draft until it leaves its slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kv.format import KVGroup
from octavo.messages import BlockUpdate


class DraftBlocks:
    """Owns a pool of blocks beside the target's and each slot's block tables in it, one per KV group.

    Nothing is shared between requests, and nothing outlives its request's time in a slot.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, num_slots: int):
        self.num_blocks = num_blocks
        self._num_groups = len(groups)
        self._size = groups[0].format.block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_slots)]
        self._new: list[list[tuple[int, int, int]]] = [[] for _ in groups]

    @property
    def num_free(self) -> int:
        """Blocks that no slot holds."""
        return len(self._free)

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Give a slot blocks for so many tokens; False: there are too few, and nothing was given."""
        tables = self._tables[slot]
        missing = max(0, -(-num_tokens // self._size) - len(tables[0]))
        if missing * self._num_groups > len(self._free):
            return False
        for group, table in enumerate(tables):
            for _ in range(missing):
                block = self._free.pop()
                self._new[group].append((slot, len(table), block))
                table.append(block)
        return True

    def release(self, slot: int) -> None:
        """Take back a slot's blocks."""
        for group, table in enumerate(self._tables[slot]):
            self._free.extend(reversed(table))
            table.clear()
            self._new[group] = [entry for entry in self._new[group] if entry[0] != slot]

    def take_updates(self) -> list[BlockUpdate]:
        """Entries of the tables that are new since the last call, by group."""
        updates = [BlockUpdate(*np.array(new, np.int32).reshape(-1, 3).T) for new in self._new]
        for new in self._new:
            new.clear()
        return updates
