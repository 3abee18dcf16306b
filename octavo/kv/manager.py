"""Block tables and prefix cache of the requests of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.kv.format import KVGroup
from octavo.kv.keys import BlockHasher, ExtraKeys
from octavo.kv.pool import BlockPool


@dataclass
class Sequence:
    """KV side of one request: its block table per KV group and its chain of keys.

    `keys` covers full blocks whose tokens are known; the first `num_registered` of them have been
    offered to the pool.
    """

    extras: ExtraKeys
    tables: list[list[int]]
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0


class KVManager:
    """Owns the pool and the tables of running requests; finds, extends, registers and frees them.

    Invariant: a key is registered only for a block that is complete, or will be by a step that has
    been scheduled before any step that could read it.
    """

    def __init__(self, groups: list[KVGroup], num_blocks: int, hasher: BlockHasher | None):
        self.groups = groups
        self.block_size = groups[0].format.block_size
        self.pool = BlockPool(num_blocks)
        self.hasher = hasher
        self._recent: list[tuple[int, int]] = []  # (step, block) registered by steps not yet completed

    def new_sequence(self, extras: ExtraKeys) -> Sequence:
        """An empty table."""
        return Sequence(extras, [[] for _ in self.groups])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` need in one group."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence, token_ids: np.ndarray) -> list[list[int]]:
        """Blocks per group that hold the longest known beginning of `token_ids`.

        At least the last token is left to compute, since its logits are needed.
        """
        found: list[list[int]] = [[] for _ in self.groups]
        if self.hasher is None:
            return found
        most = (len(token_ids) - 1) // self.block_size
        for i in range(most):
            self.hasher.extend(seq.keys, token_ids, i + 1, seq.extras)  # no further than the hits reach
            blocks = [self.pool.find(g, seq.keys[i]) for g in range(len(self.groups))]
            if None in blocks:
                break
            for table, block in zip(found, blocks, strict=True):
                table.append(block)  # type: ignore[arg-type]
        return found

    def num_free_after(self, found: list[list[int]]) -> int:
        """Free blocks left once the `found` ones are taken (some of them are free, but cached)."""
        return self.pool.num_free - sum(self.pool.count_free(table) for table in found)

    def adopt(self, seq: Sequence, found: list[list[int]]) -> None:
        """Put blocks found by key at the head of an empty table."""
        for table, blocks in zip(seq.tables, found, strict=True):
            self.pool.acquire(blocks)
            table.extend(blocks)
        seq.num_registered = len(seq.tables[0])

    def grow(self, seq: Sequence, num_tokens: int) -> list[list[int]] | None:
        """Extend the tables to hold `num_tokens`; new blocks per group, or None if too few are free."""
        missing = self.blocks_for(num_tokens) - len(seq.tables[0])
        if missing <= 0:
            return [[] for _ in self.groups]
        if missing * len(self.groups) > self.pool.num_free:
            return None
        new = [self.pool.allocate(missing) for _ in self.groups]
        for table, blocks in zip(seq.tables, new, strict=True):
            table.extend(blocks)
        return new

    def register(self, seq: Sequence, token_ids: np.ndarray, num_tokens: int, step: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        The caller guarantees that these tokens are known and that their rows are scheduled, the
        last of them by step `step`.
        """
        full = num_tokens // self.block_size
        if self.hasher is None or full <= seq.num_registered:
            return
        self.hasher.extend(seq.keys, token_ids, full, seq.extras)
        for group, table in enumerate(seq.tables):
            for i in range(seq.num_registered, full):
                if self.pool.register(group, seq.keys[i], table[i]):
                    self._recent.append((step, table[i]))
        seq.num_registered = full

    def complete(self, step: int) -> None:
        """A step has run: what it registered is final."""
        if self._recent:
            self._recent = [entry for entry in self._recent if entry[0] > step]

    def roll_back(self, step: int) -> None:
        """A step has failed: whatever it or a later one registered holds no valid KV."""
        for registered, block in self._recent:
            if registered >= step:
                self.pool.forget(block)
        self._recent = [entry for entry in self._recent if entry[0] < step]

    def free(self, seq: Sequence) -> None:
        """Release all blocks of a request; its keys stay, for when it is scheduled again."""
        for table in seq.tables:
            self.pool.release(table)
            table.clear()
        seq.num_registered = 0
