"""Whole blocks between a device's KV caches and host memory: the interface, and its plain version.

A device keeps a block as pieces, one in each buffer (a layer's, or one that layers of several groups share);
the host keeps its pieces side by side, in one slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class BlockCopier(Protocol):
    """Copies between `buffers` (uint8 `[num_blocks, piece]` each, contiguous) and `host` (uint8
    `[slots, len(buffers), piece]`), in the order of the current stream, without waiting."""

    name: str

    def out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """`host[slots[i], j] = buffers[j][blocks[i]]` for all i and j; int32 `[m]`, no slot twice."""

    def into(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """`buffers[j][blocks[i]] = host[slots[i], j]` for all i and j; int32 `[m]`, no block twice."""


class PlainBlockCopier:
    """A `BlockCopier` that makes one PyTorch copy a piece: what others must agree with; a CPU's."""

    name = "plain"

    def __init__(self, buffers: Sequence[torch.Tensor], host: torch.Tensor):
        self._buffers = buffers
        self._host = host

    def out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """See `BlockCopier`."""
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            for buffer, place in zip(self._buffers, self._host[slot].unbind(), strict=True):
                place.copy_(buffer[block], non_blocking=True)

    def into(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """See `BlockCopier`."""
        for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
            for buffer, place in zip(self._buffers, self._host[slot].unbind(), strict=True):
                buffer[block].copy_(place, non_blocking=True)
