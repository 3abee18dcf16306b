"""Memory that the tensors of recorded work take in turn: each as long as somebody holds it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

_LINE = 64  # bytes: a line of the cache, where tensors begin
# Bytes of a chunk. The system gives it memory as it is written to, so what is never used costs addresses.
_CHUNK = 64 << 20


class StepMemory:
    """Memory that recordings share, each of which may use all of it: they never run at once, and what one
    leaves is read before the next one runs."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []  # uint8; they stay where they are, but for `clear`
        self._reached: list[int] = []  # bytes of each that were ever lent

    @property
    def num_bytes(self) -> int:
        """Bytes that were ever lent: what the largest recording takes."""
        return sum(self._reached)

    def clear(self) -> None:
        """Forget the chunks: memory that nothing reads any more goes back."""
        self.chunks, self._reached = [], []

    def chunk(self, index: int, needed: int) -> np.ndarray:
        """The bytes of a chunk; the one after the last is made, of at least `needed` bytes."""
        if index == len(self.chunks):
            self.chunks.append(torch.empty(max(_CHUNK, needed), dtype=torch.uint8))
            self._reached.append(0)
        array: np.ndarray = self.chunks[index].numpy()
        return array

    def reach(self, index: int, end: int) -> None:
        """A piece that ends there is lent."""
        self._reached[index] = max(self._reached[index], end)

    def lasting(self, x: torch.Tensor) -> torch.Tensor:
        """The same memory as a lent tensor's, but holding nothing; any other tensor as it is."""
        if not can_lend(x):
            return x  # a packed weight, say, which tells no address
        at = x.data_ptr()
        for chunk in self.chunks:
            if 0 <= (offset := at - chunk.data_ptr()) < chunk.nbytes:
                place = chunk.untyped_storage(), offset // x.itemsize
                return torch.empty(0, dtype=x.dtype).set_(*place, x.shape, x.stride())
        return x


class Lender:
    """Lends one recording's tensors their memory, from the beginning of a `StepMemory`.

    A tensor holds its piece until it and all its views are gone; the next one may then have it. So what a
    kernel writes is in nobody's way as long as kernels run in the order in which they were called.
    """

    def __init__(self, memory: StepMemory) -> None:
        self._memory = memory
        self._lent: list[tuple[int, int, int]] = []  # chunk, first byte, end

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape, of whatever numbers lie there, aligned to a line of the cache.

        Args:
            size, stride: of which none is 0 and negative, respectively.
        """
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = extent * dtype.itemsize
        index, first = self._place(nbytes)
        piece = self._memory.chunk(index, nbytes)[first : first + nbytes]
        lent = index, first, first + -(-nbytes // _LINE) * _LINE
        self._lent.append(lent)
        self._memory.reach(index, lent[2])
        # The tensor's storage holds this array, and so do its views.
        weakref.finalize(piece, self._lent.remove, lent).atexit = False
        return torch.from_numpy(piece).view(dtype).as_strided(size, stride)

    def _place(self, nbytes: int) -> tuple[int, int]:
        """Chunk and first byte of the first gap that is large enough."""
        lent = sorted(self._lent)
        for index in range(len(self._memory.chunks)):
            first, size = 0, len(self._memory.chunk(index, 0))
            for _, begin, end in [piece for piece in lent if piece[0] == index] + [(index, size, size)]:
                if begin - first >= nbytes:
                    return index, first
                first = max(first, end)
        return len(self._memory.chunks), 0


def can_lend(x: torch.Tensor) -> bool:
    """Whether a tensor like this one can lie in a `StepMemory`."""
    return x.is_cpu and x.layout is torch.strided and math.prod(x.shape) > 0
