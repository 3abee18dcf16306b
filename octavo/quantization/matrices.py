"""Quantized matrices as a device keeps them: the forms of `octavo.kernels.reference_lowbit`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.nn.functional as F

from octavo.kernels import lowbit_ops
from octavo.kernels.reference_lowbit import (
    FP8,
    FP8_BLOCK,
    Activation,
    dequantize_8bit,
    dequantize_int4,
    dequantize_nf4,
    in_order,
    pack_columns,
    unpack_columns,
)
from octavo.kernels.reference_tiles import NF4, Tiles, dequantize_tiles, make_tiles, tiles_shapes
from octavo.quantization import gpu_linear
from octavo.quantization.scheme import ActivationScheme, WeightScheme

_EIGHTS = -0x77777778  # the int32 of eight nibbles of 8
_M = TypeVar("_M", bound="Matrix")


@dataclass(frozen=True)
class Matrix(ABC):
    """A matrix `[N, K]`, or some of its rows."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """N."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it consists of, by the forms' names."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in found if isinstance(value, torch.Tensor)}

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """float32 `[N, K]`."""

    @abstractmethod
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        """`x @ W^T + bias`, or `act` of it: `[rows, K]` to `[rows, N]`, in `x`'s dtype."""

    def linear_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        act: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`linear` of the RMS norm of `x + residual`, and that sum, where kernels do that on the way;
        None: there are none."""
        return None

    def takes_gates(self, x: torch.Tensor) -> bool:
        """Whether `linear_of_gates` is to be preferred, for as many rows as `x` has, to a product before it
        that ends with the activation."""
        return False

    def linear_of_gates(
        self, gates: torch.Tensor, act: Activation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear` of `act` of rows `[rows, 2 K]`."""
        return self.linear(act(gates), bias, None)

    @abstractmethod
    def joined(self: _M, below: _M) -> _M | None:
        """One matrix of the same kind with the rows of both; None where there is no such form."""

    @abstractmethod
    def taken(self: _M, order: torch.Tensor) -> _M:
        """The rows in another order, int64 `[N]`."""

    @abstractmethod
    def padded(self: _M, rows: int) -> _M:
        """The same with so many rows of zeros below, a multiple of 8 in all."""

    def for_activations(self: _M, dtype: torch.dtype) -> _M:
        """The same with scales of the type that the kernels take beside activations of `dtype`."""
        return self

    def for_kernels(self) -> Matrix:
        """The same in the layout that kernels multiply, once nothing is joined or put in another order."""
        return self


def join(parts: Sequence[Matrix]) -> list[Matrix]:
    """The same rows in as few matrices as there are forms for."""
    out: list[Matrix] = []
    for part in parts:
        last = out[-1] if out else None
        both = last.joined(part) if last is not None and type(last) is type(part) else None
        if both is None:
            out.append(part)
        else:
            out[-1] = both
    return out


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _below(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows of zeros below; of types that `F.pad` does not know, too."""
    zeros = torch.zeros(rows, *tensor.shape[1:], dtype=torch.float32, device=tensor.device)
    return torch.cat((tensor, zeros.to(tensor.dtype)))


@dataclass(frozen=True)
class DenseMatrix(Matrix):
    """Not quantized: `weight [N, K]`."""

    weight: torch.Tensor

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    def dequantize(self) -> torch.Tensor:
        return self.weight.float()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        if gpu_linear.serves(x):
            return gpu_linear.linear(x, self.weight, bias, act)
        out = F.linear(x, self.weight, bias)
        return out if act is None else act(out)

    def joined(self, below: DenseMatrix) -> DenseMatrix | None:
        return DenseMatrix(torch.cat((self.weight, below.weight)))

    def padded(self, rows: int) -> DenseMatrix:
        return DenseMatrix(_below(self.weight, rows))

    def taken(self, order: torch.Tensor) -> DenseMatrix:
        return DenseMatrix(self.weight[order])

    def for_activations(self, dtype: torch.dtype) -> DenseMatrix:
        return DenseMatrix(self.weight.to(dtype))


@dataclass(frozen=True)
class Int4Matrix(Matrix):
    """int4, with `scales` in the checkpoint's type until they are for activations."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None

    @property
    def rows(self) -> int:
        return self.qweight.shape[1]

    def dequantize(self) -> torch.Tensor:
        return dequantize_int4(self.qweight, self.scales, self.zeros, self.perm)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        return self.for_kernels().linear(x, bias, act)

    def for_kernels(self) -> TilesMatrix:
        zeros = None if self.zeros is None else unpack_columns(self.zeros)
        return TilesMatrix(make_tiles(self.qweight, self.scales, zeros), 8 * self.qweight.shape[0], self.perm)

    def joined(self, below: Int4Matrix) -> Int4Matrix | None:
        if self.scales.shape[0] != below.scales.shape[0] or not _same(self.perm, below.perm):
            return None
        zeros = None
        if self.zeros is not None or below.zeros is not None:
            if self.rows % 8 or below.rows % 8:
                return None
            zeros = torch.cat((self._filled_zeros(), below._filled_zeros()), 1)
        return Int4Matrix(
            torch.cat((self.qweight, below.qweight), 1),
            torch.cat((self.scales, below.scales), 1),
            zeros,
            self.perm,
        )

    def padded(self, rows: int) -> Int4Matrix:
        zeros = None if self.zeros is None else pack_columns(F.pad(unpack_columns(self.zeros), (0, rows)))
        return Int4Matrix(F.pad(self.qweight, (0, rows)), F.pad(self.scales, (0, rows)), zeros, self.perm)

    def taken(self, order: torch.Tensor) -> Int4Matrix:
        zeros = None if self.zeros is None else pack_columns(unpack_columns(self.zeros)[:, order])
        return Int4Matrix(self.qweight[:, order], self.scales[:, order], zeros, self.perm)

    def _filled_zeros(self) -> torch.Tensor:
        if self.zeros is not None:
            return self.zeros
        return self.qweight.new_full((self.scales.shape[0], self.rows // 8), _EIGHTS)

    def for_activations(self, dtype: torch.dtype) -> Int4Matrix:
        # A type of 16 bits stays beside activations of the other one: each would round the other's numbers.
        kept = self.scales.dtype if dtype.itemsize == self.scales.element_size() else dtype
        return replace(self, scales=self.scales.to(kept))


@dataclass(frozen=True)
class Nf4Matrix(Matrix):
    """nf4: codes of a table."""

    qweight: torch.Tensor
    scales: torch.Tensor
    codebook: torch.Tensor

    @property
    def rows(self) -> int:
        return self.qweight.shape[1]

    def dequantize(self) -> torch.Tensor:
        return dequantize_nf4(self.qweight, self.scales, self.codebook)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        return self.for_kernels().linear(x, bias, act)

    def for_kernels(self) -> TilesMatrix:
        return TilesMatrix(
            make_tiles(self.qweight, self.scales, None, self.codebook), 8 * self.qweight.shape[0]
        )

    def joined(self, below: Nf4Matrix) -> Nf4Matrix | None:
        if self.scales.shape[0] != below.scales.shape[0] or not _same(self.codebook, below.codebook):
            return None
        return Nf4Matrix(
            torch.cat((self.qweight, below.qweight), 1),
            torch.cat((self.scales, below.scales), 1),
            self.codebook,
        )

    def padded(self, rows: int) -> Nf4Matrix:
        return Nf4Matrix(F.pad(self.qweight, (0, rows)), F.pad(self.scales, (0, rows)), self.codebook)

    def taken(self, order: torch.Tensor) -> Nf4Matrix:
        return Nf4Matrix(self.qweight[:, order], self.scales[:, order], self.codebook)


@dataclass(frozen=True)
class TilesMatrix(Matrix):
    """Weights of 4 bits as GPUs multiply them, and nothing is done to them any more.

    Attributes:
        columns: K.
        perm: int32 `[K]`, as of int4: columns of x in the order of the codes.
    """

    tiles: Tiles
    columns: int
    perm: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.tiles.rows

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found = {**self.tiles._asdict(), "perm": self.perm}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def dequantize(self) -> torch.Tensor:
        grouped = dequantize_tiles(self.tiles, self.columns)
        return grouped if self.perm is None else in_order(grouped, self.perm)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        if self.perm is not None:
            x = x.index_select(1, self.perm)
        return lowbit_ops.tiles_linear(x, self.tiles, bias, act)

    def linear_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        act: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.perm is not None:
            return None
        return lowbit_ops.rms_norm_tiles_linear(x, residual, norm_weight, eps, self.tiles, bias, act)

    def joined(self, below: TilesMatrix) -> TilesMatrix | None:
        return None

    def taken(self, order: torch.Tensor) -> TilesMatrix:
        raise NotImplementedError("rows change places before they are laid out in tiles")

    def padded(self, rows: int) -> TilesMatrix:
        raise NotImplementedError("rows are filled up before they are laid out in tiles")


@dataclass(frozen=True)
class Matrix8(Matrix):
    """fp8 or int8, by the type of `weight`.

    Attributes:
        activations: None: they stay as they are.
        input_scale: float32 `[1]`, where the scheme of activations is static.
        zeros: of int8, float32 in the shape of `scale`: such a matrix can only be dequantized.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    activations: ActivationScheme | None = None
    input_scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def blocks(self) -> bool:
        """Whether scales are of blocks of 128 x 128."""
        return self.scale.dim() == 2 and self.scale.shape[0] != self.rows

    def dequantize(self) -> torch.Tensor:
        if self.zeros is None:
            return dequantize_8bit(self.weight, self.scale)
        groups = self.weight.float().unflatten(1, (self.zeros.shape[1], -1))
        return ((groups - self.zeros[:, :, None]) * self.scale[:, :, None]).flatten(1)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
        if self.activations is None:
            return lowbit_ops.weight_only_linear(x, self.weight, self.scale, bias, act)
        if self.scale.dim() == 2:
            return lowbit_ops.fp8_block_linear(x, self.weight, self.scale, bias, act)
        product = lowbit_ops.int8_linear if self.weight.dtype is torch.int8 else lowbit_ops.fp8_linear
        return product(x, self.weight, self.scale, bias, self.input_scale, act)

    def linear_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        act: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.activations is None or not lowbit_ops.has_w8a8(x):
            return None
        return lowbit_ops.rms_norm_w8a8_linear(
            x, residual, norm_weight, eps, self.weight, self.scale, bias, self.input_scale, act
        )

    def takes_gates(self, x: torch.Tensor) -> bool:
        if self.activations is None or not lowbit_ops.has_w8a8(x):
            return False
        return lowbit_ops.takes_gates(x, self.weight, self.scale)

    def linear_of_gates(
        self, gates: torch.Tensor, act: Activation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.takes_gates(gates):
            return super().linear_of_gates(gates, act, bias)
        return lowbit_ops.gated_w8a8_linear(gates, act, self.weight, self.scale, bias, self.input_scale)

    def joined(self, below: Matrix8) -> Matrix8 | None:
        alike = (
            self.weight.dtype is below.weight.dtype
            and self.activations == below.activations
            and self.scale.dim() == below.scale.dim()
            and self.scale.shape[1:] == below.scale.shape[1:]
            and self.blocks == below.blocks
            and _same(self.input_scale, below.input_scale)
            and self.zeros is None
            and below.zeros is None
        )
        if not alike or (self.blocks and self.rows % FP8_BLOCK):
            return None
        return replace(
            self,
            weight=torch.cat((self.weight, below.weight)),
            scale=torch.cat((self.scale, below.scale)),
        )

    def padded(self, rows: int) -> Matrix8:
        total = self.rows + rows
        scales = (-(-total // FP8_BLOCK) if self.blocks else total) - self.scale.shape[0]
        zeros = None if self.zeros is None else _below(self.zeros, rows)
        weight, scale = _below(self.weight, rows), _below(self.scale, scales)
        return replace(self, weight=weight, scale=scale, zeros=zeros)

    def taken(self, order: torch.Tensor) -> Matrix8:
        if not self.blocks:
            zeros = None if self.zeros is None else self.zeros[order]
            return replace(self, weight=self.weight[order], scale=self.scale[order], zeros=zeros)
        # Rows of a block part, so that each has scales of its own: a form for weights alone.
        scale = self.scale.repeat_interleave(FP8_BLOCK, 0)[: self.rows][order]
        if self.weight.shape[1] % FP8_BLOCK:
            scale = scale.repeat_interleave(FP8_BLOCK, 1)[:, : self.weight.shape[1]]
        return Matrix8(self.weight[order], scale)


def blank_matrix(
    scheme: WeightScheme, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Matrix:
    """A matrix of a scheme with uninitialised tensors, beside activations of `dtype`."""

    def empty(kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
    if scheme.bits == 4:
        nf4 = scheme.kind == "nf4"
        kind = torch.float32 if nf4 else dtype
        group, codes, scales, zeros = tiles_shapes(rows, columns, groups, kind.itemsize)
        tiles = Tiles(
            empty(torch.int16, *codes),
            empty(torch.float32 if kind.itemsize == 4 else torch.int32, *scales),
            None if nf4 or scheme.symmetric else empty(torch.int32, *zeros),
            group,
            kind,
            empty(torch.float32, 16) if nf4 else None,
            NF4 if nf4 else None,
        )
        return TilesMatrix(tiles, columns, empty(torch.int32, columns) if scheme.act_order else None)
    shape: tuple[int, ...] = (rows,) if groups == 1 else (rows, groups)
    if scheme.strategy == "block":
        shape = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    static = scheme.activations is not None and not scheme.activations.dynamic
    return Matrix8(
        empty(torch.int8 if scheme.kind == "int8" else FP8, rows, columns),
        empty(torch.float32, *shape),
        scheme.activations,
        empty(torch.float32, 1) if static else None,
    )
