"""A rank's piece of a matrix, and of the tensors that a checkpoint stores for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Which piece of a checkpoint's `[out, in]` matrix goes where in a layer's own matrix.

    The piece is rows `row .. row + rows` and columns `col .. col + cols` of the checkpoint's matrix;
    it becomes rows `target .. target + rows` (all columns) of the layer's.
    """

    target: int
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Region:
    """A box in a checkpoint's tensor: what a rank reads of it.

    Attributes:
        shape: the tensor's, or another one of the same elements.
        first, size: of the box, for each dimension.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    size: tuple[int, ...]

    def of_stack(self, count: int, first: int, size: int) -> Region:
        """The same box in each of `size` tensors from `first` on, in a stack of `count`."""
        return Region((count, *self.shape), (first, *self.first), (size, *self.size))

    def ranges(self, itemsize: int, least: int) -> list[tuple[int, int]]:
        """Offset and number of bytes of each run of a tensor.

        Args:
            itemsize: bytes of an element.
            least: bytes; where runs are shorter, they are joined with what lies between them.
        """
        if not math.prod(self.size):
            return []
        sizes, firsts = list(self.size), list(self.first)
        while True:
            parted = [dim for dim, size in enumerate(sizes) if size != self.shape[dim]]
            if not parted:
                return [(0, math.prod(self.shape) * itemsize)]
            last = parted[-1]
            inner = math.prod(self.shape[last + 1 :]) * itemsize
            if sizes[last] * inner >= least or last == 0:
                break
            sizes[last], firsts[last] = self.shape[last], 0
        starts = [0]
        for dim in range(last):
            stride = math.prod(self.shape[dim + 1 :]) * itemsize
            starts = [at + (firsts[dim] + i) * stride for at in starts for i in range(sizes[dim])]
        return [(at + firsts[last] * inner, sizes[last] * inner) for at in starts]


def byte_ranges(regions: Sequence[Region], numel: int, itemsize: int, least: int) -> list[tuple[int, int]]:
    """Offset and number of bytes of what is read for several regions of a tensor, in order and joined where
    they touch: all of it, where it has not as many elements as the regions say. `itemsize` and `least` as of
    `Region.ranges`."""
    found: list[tuple[int, int]] = []
    for region in regions:
        if math.prod(region.shape) != numel:
            return [(0, numel * itemsize)]
        found += region.ranges(itemsize, least)
    out: list[tuple[int, int]] = []
    for offset, size in sorted(found):
        if out and offset <= sum(out[-1]):
            first = out[-1][0]
            out[-1] = (first, max(sum(out[-1]), offset + size) - first)
        else:
            out.append((offset, size))
    return out
