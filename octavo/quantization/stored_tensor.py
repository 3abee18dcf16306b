"""What a checkpoint stores for one matrix: each tensor's shape and types, and which piece a rank takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from octavo.errors import ConfigError, ModelError
from octavo.quantization.shard import Shard

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int32, torch.int64})
Dummy = Callable[[torch.Tensor, float], torch.Tensor]
"""Makes a random tensor of a random one of float32 (uniform, of mean 0 and standard deviation 1) and the
standard deviation that the weights shall have."""


class Axis(NamedTuple):
    """A dimension of a stored tensor: `per` rows or columns of the matrix for each entry.

    Attributes:
        ragged: whether the last entry may stand for fewer.
    """

    of: Literal["rows", "columns"]
    per: int = 1
    ragged: bool = False

    def size(self, rows: int, columns: int) -> int:
        """Entries of a matrix of that size."""
        return -(-(rows if self.of == "rows" else columns) // self.per)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a matrix.

    Attributes:
        axes: its dimensions; a plain number is one that all ranks take whole.
        dtypes: the types that it may be stored in.
        optional: whether it may be missing.
        scale: whether its numbers are factors, of which none may be 0 or NaN.
        dummy: see `Dummy`; None: it is left out of random weights.
        other_shapes: shapes of fewer or more dimensions in which the same numbers may come.
        any_size: whether it may have any shape; it is then passed on as it is.
    """

    axes: tuple[Axis | int, ...]
    dtypes: frozenset[torch.dtype] = FLOATS
    optional: bool = False
    scale: bool = False
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
        """The part of the full tensor that belongs to a shard of the matrix; a view.

        Raises:
            ConfigError: the shard's borders lie within an entry.
        """
        if self.any_size:
            return tensor
        for dim, axis in enumerate(self.axes):
            if isinstance(axis, int):
                continue
            by_rows = axis.of == "rows"
            first, size = (shard.row, shard.rows) if by_rows else (shard.col, shard.cols)
            whole = tensor.shape[dim] * axis.per
            if first % axis.per or ((first + size) % axis.per and first + size < whole - axis.per + 1):
                raise ConfigError(
                    f"{name}: {axis.of} {first} to {first + size} of the matrix end within a group of "
                    f"{axis.per}: use another tensor_parallel_size"
                )
            tensor = tensor.narrow(dim, first // axis.per, -(-size // axis.per))
        return tensor

    def check_numbers(self, name: str, tensor: torch.Tensor) -> None:
        """See that scales are such.

        Raises:
            ModelError: one is 0, NaN or infinite.
        """
        if not self.scale:
            return
        wide = tensor.float()
        bad = ~torch.isfinite(wide) | (wide == 0)
        if bool(bad.any()):
            raise ModelError(
                f"{name} holds {float(wide[bad][0]):g}, which is no scale: the checkpoint is corrupt, fetch "
                "it again or quantize the model anew"
            )
