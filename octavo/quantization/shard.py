"""A rank's piece of a matrix."""

from __future__ import annotations

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
