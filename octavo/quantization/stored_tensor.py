"""What a checkpoint stores for one matrix: each tensor's shape and types, and which piece a rank takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from octavo.errors import ConfigError, ModelError
from octavo.kernels.reference_lowbit import FP8
from octavo.quantization.shard import Region, Shard

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int32, torch.int64})
Numbers = Literal["any", "finite", "magnitudes", "factors", "positive"]
"""What a tensor may hold: anything, or neither NaN nor infinity, and of the rest: nothing below 0
("magnitudes"), no 0 ("factors"), neither ("positive")."""
Dummy = Callable[[torch.Tensor, float], torch.Tensor]
"""Makes a random tensor of a random one of float32 (uniform, of mean 0 and standard deviation 1) and the
standard deviation that the weights shall have."""


class Axis(NamedTuple):
    """A dimension of a stored tensor: `per` rows or columns of the matrix for each entry.

    Attributes:
        ragged: whether the last entry may stand for fewer.
        shared: whether the entry is something that they all have (a scale), not the packing of them all: a
            rank whose border parts them gets it for each of smaller groups.
        least: the size of which smaller groups must be a multiple.
    """

    of: Literal["rows", "columns"]
    per: int = 1
    ragged: bool = False
    shared: bool = False
    least: int = 1

    def size(self, rows: int, columns: int) -> int:
        """Entries of a matrix of that size."""
        return -(-(rows if self.of == "rows" else columns) // self.per)

    def parts(self, first: int, size: int) -> bool:
        """Whether so many rows or columns from `first` on have a border within an entry."""
        return bool(first % self.per or ((first + size) % self.per and not self.ragged))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a matrix.

    Attributes:
        axes: its dimensions; a plain number is one that all ranks take whole.
        dtypes: the types that it may be stored in.
        optional: whether it may be missing.
        numbers: what it may hold. "any" is for what is not used, for codes of which all are numbers, and for
            weights that are not quantized.
        dummy: see `Dummy`; None: it is left out of random weights.
        other_shapes: shapes of fewer or more dimensions in which the same numbers may come.
        any_size: whether it may have any shape; it is then passed on as it is.
    """

    axes: tuple[Axis | int, ...]
    dtypes: frozenset[torch.dtype] = FLOATS
    optional: bool = False
    numbers: Numbers = "any"
    dummy: Dummy | None = None
    other_shapes: tuple[tuple[int, ...], ...] = ()
    any_size: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Its full shape for a matrix of that size."""
        return tuple(axis if isinstance(axis, int) else axis.size(rows, columns) for axis in self.axes)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Its shape, where all axes are plain numbers."""
        return self.shape(0, 0)

    def region(self, name: str, rows: int, columns: int, shard: Shard) -> Region | None:
        """What `cut` takes for a shard of a matrix of that size; None: all.

        Raises:
            ConfigError: as `cut`, before anything is read.
        """
        if self.any_size:
            return None
        boxes = []
        for axis in self.axes:
            if isinstance(axis, int):
                boxes.append((axis, 0, axis))
                continue
            first, size = (shard.row, shard.rows) if axis.of == "rows" else (shard.col, shard.cols)
            if size and axis.parts(first, size):
                self._parted(name, axis, first, size)
            before = first // axis.per
            boxes.append((axis.size(rows, columns), before, -(-(first + size) // axis.per) - before))
        shape, first_of, size_of = zip(*boxes, strict=True) if boxes else ((), (), ())
        return Region(shape, first_of, size_of)

    def check(self, name: str, rows: int, columns: int) -> None:
        """See that the matrix has entries for it.

        Raises:
            ModelError: its sizes are no multiples of what an entry stands for.
        """
        for axis in self.axes:
            if isinstance(axis, int) or axis.ragged:
                continue
            size = rows if axis.of == "rows" else columns
            if size % axis.per:
                raise ModelError(
                    f"{name}: the matrix has {size} {axis.of}, and {axis.per} share an entry: use a "
                    f"checkpoint whose group size divides {size}"
                )

    def cut(self, name: str, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
        """The part of the full tensor that belongs to a shard of the matrix: a view, or a copy where entries
        are repeated for smaller groups (`Axis.shared`).

        Raises:
            ConfigError: the shard's borders lie within an entry that cannot be parted.
        """
        if self.any_size:
            return tensor
        for dim, axis in enumerate(self.axes):
            if isinstance(axis, int):
                continue
            first, size = (shard.row, shard.rows) if axis.of == "rows" else (shard.col, shard.cols)
            per, last = axis.per, first + size
            entries = -(-last // per) - first // per if size else 0
            piece = tensor.narrow(dim, first // per if size else 0, entries)
            if size and axis.parts(first, size):
                fine = self._parted(name, axis, first, size)
                before = (first - first // per * per) // fine
                piece = piece.repeat_interleave(per // fine, dim).narrow(dim, before, size // fine)
            tensor = piece
        return tensor

    def _parted(self, name: str, axis: Axis, first: int, size: int) -> int:
        """The size of smaller groups, of which each has its borders outside."""
        fine = math.gcd(axis.per, first, size)
        if axis.shared and fine % axis.least == 0:
            return fine
        needed = math.gcd(axis.per, axis.least) if axis.shared else axis.per
        raise ConfigError(
            f"{name}: {axis.of} {first} to {first + size} of the matrix are one rank's, and {axis.per} share "
            f"an entry: use a tensor_parallel_size that gives each rank a multiple of {needed} {axis.of}"
        )

    def check_numbers(self, name: str, tensor: torch.Tensor) -> None:
        """See that the tensor holds `numbers`, on the device where it is.

        Raises:
            ModelError: it does not.
        """
        if self.numbers == "any" or not tensor.numel():
            return
        if tensor.dtype is FP8:
            # NaN, which is all that E4M3FN has beside numbers, is the largest int8 (0x7F) and, with the sign,
            # the largest uint8 (0xFF): two maxima need no second tensor of this size.
            positive, negative = tensor.view(torch.int8).amax(), tensor.view(torch.uint8).amax()
            bad = torch.nan if bool((positive == 0x7F) | (negative == 0xFF)) else None
        else:
            bad = self._bad_number(tensor.float())
        if bad is not None:
            what = "number" if self.numbers == "finite" else "scale"
            raise ModelError(
                f"{name} holds {bad:g}, which is no {what}: the checkpoint is corrupt, fetch it again or "
                "quantize the model anew"
            )

    def _bad_number(self, wide: torch.Tensor) -> float | None:
        bad = ~torch.isfinite(wide)
        if self.numbers in ("factors", "positive"):
            bad |= wide == 0
        if self.numbers in ("magnitudes", "positive"):
            bad |= wide < 0
        return float(wide[bad][0]) if bool(bad.any()) else None
