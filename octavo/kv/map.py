"""The pool as a map of blocks, of bounded size whatever the pool's. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.kv.pool import BlockPool
from octavo.messages import KVMap

# In the order of use: free with nothing to find, free and findable by key, held by one request (or a copy
# under way), held by several.
STATES = ("free", "cached", "owned", "shared")
FREE, CACHED, OWNED, SHARED = range(len(STATES))


class HostSlots(Protocol):
    """What is asked of a host tier."""

    num_slots: int

    def contains(self, group: int, key: bytes) -> bool:
        """Whether a block's contents are in host memory."""

    def used_slots(self) -> Sequence[int]:
        """The slots that hold a block."""


def describe_kv(
    pool: BlockPool, groups: Sequence[KVGroup], most_cells: int, host: HostSlots | None = None
) -> KVMap:
    """What every block is now, in at most `most_cells` cells of equally many blocks.

    Args:
        most_cells: at least 1; of the pool, and again of the host tier.
        host: the host tier, if there is one.
    """
    refs, keys = pool.holders()
    held = np.asarray(refs)
    states = np.minimum(held, 2).astype(np.uint8) + np.uint8(OWNED - 1)
    findable = np.fromiter((key is not None for key in keys), bool, len(keys))
    states[held == 0] = FREE
    states[(held == 0) & findable] = CACHED
    per_cell = -(-pool.num_blocks // max(1, most_cells))
    counts = np.bincount(states, minlength=len(STATES))
    out = KVMap(
        cells=_cells(states, per_cell, len(STATES)),
        blocks_per_cell=per_cell,
        num_blocks=pool.num_blocks,
        block_tokens=groups[0].format.block_size,
        block_bytes=page_bytes(groups),
        counts={name: int(counts[state]) for state, name in enumerate(STATES)},
    )
    if host is not None:
        out.host_copies = sum(key is not None and host.contains(*key) for key in keys)
        used = np.zeros(host.num_slots, np.uint8)
        used[list(host.used_slots())] = 1
        out.host_blocks, out.host_blocks_per_cell = len(used), -(-len(used) // max(1, most_cells))
        out.host_cells = _cells(used, out.host_blocks_per_cell, 2)
    return out


def _cells(states: np.ndarray, per_cell: int, num_states: int) -> bytes:
    """Of each `per_cell` states the most frequent; of equally frequent ones the last."""
    if per_cell <= 1:
        return states.tobytes()
    padding = -len(states) % per_cell
    rows = np.pad(states.astype(np.int64), (0, padding), constant_values=num_states).reshape(-1, per_cell)
    counts = np.stack([(rows == state).sum(1) for state in range(num_states)], 1)
    return (num_states - 1 - counts[:, ::-1].argmax(1)).astype(np.uint8).tobytes()
