"""How a format packs a matrix: the interface, and what formats share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_lowbit import (
    FP8,
    FP8_LARGEST,
    pack_rows,
    unpack_columns,
    unpack_rows,
)
from octavo.quantization.matrices import DenseMatrix, Int4Matrix, Matrix
from octavo.quantization.shard import Shard
from octavo.quantization.stored_tensor import Axis, Dummy, StoredTensor

ROWS, COLUMNS = Axis("rows"), Axis("columns")
LEAST_GROUP = 32
"""Columns that share a scale, at least: what the kernels take."""
Pieces = Mapping[str, torch.Tensor]
_CODES_STD = 4.6  # of uniform codes from 0 to 15


def group_axis(size: int) -> Axis:
    """The dimension of what groups of so many columns have in common."""
    return Axis("columns", size, shared=True, least=math.gcd(size, LEAST_GROUP))


class Layout(ABC):
    """The tensors of a matrix in one format, and the internal form of what they say."""

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """What a checkpoint stores for a matrix of that size, by the names' ends."""

    def stored_shape(self, name: str, rows: int, columns: int) -> tuple[int, ...] | None:
        """The shape of a tensor in the file, where it is not that of its axes."""
        return None

    def arranged(self, name: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """A full tensor as it is read, in the shape of `axes`."""
        return tensor

    def kept(self, name: str, key: str, view: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """What is kept on a device of a shard's piece of the tensor `name`, whose name ends in `key`: a copy.

        Raises:
            ModelError: contents that are none.
        """
        kept = torch.empty(view.shape, dtype=view.dtype, device=device)
        return {key: kept.copy_(view)}

    @abstractmethod
    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        """The form of a shard of the matrix `name` (of `columns` columns in all) from its pieces, all on one
        device.

        Raises:
            ModelError: contents that contradict the config.
        """


class DenseLayout(Layout):
    """A matrix that is not quantized."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((ROWS, COLUMNS), dummy=lambda unit, std: unit * std)}

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        return DenseMatrix(pieces["weight"])


def int4_matrix(
    name: str,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    whole: bool = True,
) -> Int4Matrix:
    """The int4 form of natural-order tensors; columns of each group are made neighbours by `g_idx`.

    Args:
        name: of the matrix, for messages.
        qweight: int32 `[K / 8, N]`, column k of the matrix in row k / 8.
        scales: `[groups, N]`.
        zeros: int32 `[groups, N / 8]`, or None.
        g_idx: `[K]`, the group of each column, or None: groups are of neighbours.
        whole: whether all columns of each group are there. Else groups are filled up to multiples of
            `LEAST_GROUP` with columns of weight 0.

    Raises:
        ModelError: groups of unequal sizes, or numbers of groups that do not exist.
    """
    perm = None
    if zeros is not None and bool((unpack_columns(zeros) == 8).all()):
        zeros = None
    if g_idx is not None and not whole:
        return _filled_groups(name, qweight, scales, zeros, g_idx)
    if g_idx is not None:
        perm = order_of_groups(name, g_idx, scales.shape[0])
        if perm is not None:
            qweight = pack_rows(unpack_rows(qweight)[perm.long()])
    return Int4Matrix(qweight.contiguous(), scales.contiguous(), zeros, perm)


def _filled_groups(
    name: str, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor
) -> Int4Matrix:
    """The int4 form of some columns of groups that lie apart, in groups of `LEAST_GROUP`: arguments as of
    `int4_matrix`."""
    group = checked_groups(name, g_idx, scales.shape[0])
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=scales.shape[0])
    chunks = (counts + LEAST_GROUP - 1) // LEAST_GROUP
    groups = torch.arange(len(counts), device=group.device).repeat_interleave(chunks)
    # Where each column goes: its group's first place, and those of the group before it.
    before, starts = counts.cumsum(0) - counts, (chunks.cumsum(0) - chunks) * LEAST_GROUP
    places = torch.arange(len(order), device=group.device) + (starts - before)[group[order]]
    scales = scales[groups]
    zeros = None if zeros is None else zeros[groups].contiguous()
    # A code that is its zero point is the weight 0, whichever column of x it is multiplied with: one that its
    # neighbours are, so that it makes no group of x larger where those are rounded.
    points = scales.new_full(scales.shape, 8) if zeros is None else unpack_columns(zeros)
    codes = points.to(torch.uint8).repeat_interleave(LEAST_GROUP, 0)
    codes[places] = unpack_rows(qweight)[order]
    perm = order[before[groups]].int().repeat_interleave(LEAST_GROUP)
    perm[places] = order.int()
    return Int4Matrix(pack_rows(codes).contiguous(), scales.contiguous(), zeros, perm)


def checked_groups(name: str, g_idx: torch.Tensor, groups: int) -> torch.Tensor:
    """The group of each column, int64 `[K]`.

    Raises:
        ModelError: numbers of groups that do not exist.
    """
    wide = g_idx.long()
    if len(wide) and (int(wide.min()) < 0 or int(wide.max()) >= groups):
        raise ModelError(
            f"{name}: g_idx names groups {int(wide.min())} to {int(wide.max())} where there are {groups}: "
            "the checkpoint is corrupt, fetch it again"
        )
    return wide


def order_of_groups(name: str, g_idx: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The columns in the order of their groups, int32 `[K]`; None: they are so.

    Raises:
        ModelError: groups of unequal sizes, or numbers of groups that do not exist.
    """
    wide = checked_groups(name, g_idx, groups)
    size = len(wide) // groups
    if len(wide) % groups or not bool((torch.bincount(wide, minlength=groups) == size).all()):
        raise ModelError(
            f"{name}: g_idx makes groups of unequal sizes, which is not supported: use a checkpoint without "
            "act order"
        )
    perm = torch.argsort(wide, stable=True)
    return None if bool((perm[1:] > perm[:-1]).all()) else perm.int()


def codes_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Random int32 words of codes."""
    words = (unit * 5e8).to(torch.int64) * 0x9E3779B1
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


def order_dummy(group_size: int | None) -> Dummy:
    """Makes groups of neighbours."""

    def make(unit: torch.Tensor, std: float) -> torch.Tensor:
        order = torch.arange(len(unit), dtype=torch.int32, device=unit.device)
        return order // (group_size or len(unit))

    return make


def int4_scale_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Scales that give codes of 4 bits the deviation."""
    return torch.full_like(unit, std / _CODES_STD)


def fp8_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Random FP8 codes."""
    return (unit * (FP8_LARGEST / 2)).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)


def fp8_scale_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Scales that give `fp8_dummy` the deviation."""
    return torch.full_like(unit, std / (FP8_LARGEST / 2))


def int8_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Random int8 codes."""
    return (unit * 64).round().clamp(-127, 127).to(torch.int8)


def int8_scale_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """Scales that give `int8_dummy` the deviation."""
    return torch.full_like(unit, std / 64)


def ones_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    """1, for scales of activations."""
    return torch.ones_like(unit)
