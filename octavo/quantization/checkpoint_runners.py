"""The forms in which a checkpoint's quantized matrix is multiplied: one class for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from octavo.kernels import quant_ops
from octavo.kernels.cpu import quant
from octavo.kernels.cpu.products import GATES
from octavo.kernels.reference_lowbit import unpack_columns, unpack_rows
from octavo.kernels.reference_quant import BLOCK, INT8, QuantFormat, QuantizedMatrix
from octavo.quantization.linear_method import AddingNorm, GatedActivation, LinearMethod
from octavo.quantization.matrices import DenseMatrix, Int4Matrix, Matrix, Matrix8
from octavo.quantization.quantized_tensor import joined
from octavo.quantization.scheme import WeightScheme
from octavo.quantization.shard import Shard

INT4 = QuantFormat(4, 32, False, 8)
# Codes less their zero points, from -15 to 15, fit 5 bits around 16.
INT4_ASYMMETRIC = QuantFormat(5, 32, False, 16)
# Scales become float16. One that differs by more than this share of it (it is near float16's least numbers)
# would add to the error of the codes.
_SCALE_ERROR = 2.0**-8


class Unpackable(Exception):
    """Matrices have no form that the CPU's kernels multiply; the message says why."""


class Runner(ABC):
    """Multiplies with a layer's matrix.

    Attributes:
        expanded_since: why it is dequantized though the table of modes (`capability`) says otherwise.
    """

    expanded_since: str | None = None

    @abstractmethod
    def register(self, layer: nn.Module) -> None:
        """Make the memory that it holds the layer's buffers."""

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearMethod.apply`."""

    def apply_gated(self, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation) -> torch.Tensor:
        """See `LinearMethod.apply_gated`."""
        return act(self.apply(x, bias))

    def takes_gates(self, x: torch.Tensor) -> bool:
        """See `LinearMethod.takes_gates`."""
        return False

    def apply_to_gates(
        self, gates: torch.Tensor, act: GatedActivation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LinearMethod.apply_to_gates`."""
        return self.apply(act(gates), bias)

    def apply_after(
        self,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LinearMethod.apply_after`."""
        x, residual = norm.add(x, residual)
        return (self.apply(x, bias) if act is None else self.apply_gated(x, bias, act)), residual


class DenseRunner(Runner):
    """Dequantized, or never quantized: a method of plain matrices has it, in a module of its own.

    Args:
        method: that method.
        matrices: the parts in their order.
        columns: of the matrix.
        dtype: of activations.
        device: where it is.
        rows: of the matrix; None: the parts'.
    """

    def __init__(
        self,
        method: LinearMethod,
        matrices: Sequence[Matrix],
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: int | None = None,
    ):
        self.method = method
        self.module = nn.Module()
        self.module.requires_grad_(False)
        rows = sum(matrix.rows for matrix in matrices) if rows is None else rows
        method.create_weights(self.module, rows, columns, dtype, device)
        target = 0
        half = method.name == "half"
        for matrix in matrices:
            if isinstance(matrix, DenseMatrix):
                weight = matrix.weight
            else:  # float16 has the more bits of a number of the two types of 16
                weight = matrix.dequantize().to(torch.float16 if half else dtype)
            shard = Shard(target, 0, matrix.rows, 0, columns)
            method.load_shard(self.module, "weight", weight, shard)
            target += matrix.rows
        method.process_after_load(self.module)

    @staticmethod
    def expand(matrix: Matrix, dtype: torch.dtype) -> DenseMatrix:
        """A matrix in the activations' dtype."""
        return DenseMatrix(matrix.dequantize().to(dtype))

    def register(self, layer: nn.Module) -> None:
        layer.dense = self.module

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.method.apply(self.module, x, bias)

    def apply_gated(self, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation) -> torch.Tensor:
        return self.method.apply_gated(self.module, x, bias, act)

    def apply_after(
        self,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.method.apply_after(self.module, norm, x, residual, bias, act)


class MatricesRunner(Runner):
    """Matrices in the forms of `octavo.kernels.lowbit_ops`; rows of several follow each other."""

    def __init__(self, matrices: Sequence[Matrix]):
        self.matrices = list(matrices)

    def register(self, layer: nn.Module) -> None:
        for i, matrix in enumerate(self.matrices):
            for name, tensor in matrix.tensors.items():
                layer.register_buffer(f"{name}_{i}", tensor, persistent=False)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(self.matrices) == 1:
            return self.matrices[0].linear(x, bias, None)
        out, first = [], 0
        for matrix in self.matrices:
            own = None if bias is None else bias[first : first + matrix.rows]
            out.append(matrix.linear(x, own, None))
            first += matrix.rows
        return torch.cat(out, 1)

    def apply_gated(self, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation) -> torch.Tensor:
        if len(self.matrices) == 1:
            return self.matrices[0].linear(x, bias, act)
        return act(self.apply(x, bias))

    def takes_gates(self, x: torch.Tensor) -> bool:
        return len(self.matrices) == 1 and self.matrices[0].takes_gates(x)

    def apply_to_gates(
        self, gates: torch.Tensor, act: GatedActivation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if len(self.matrices) == 1:
            return self.matrices[0].linear_of_gates(gates, act, bias)
        return super().apply_to_gates(gates, act, bias)

    def apply_after(
        self,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = norm.rms_weight
        if len(self.matrices) == 1 and weight is not None:
            fused = self.matrices[0].linear_after_norm(x, residual, weight, norm.eps, bias, act)
            if fused is not None:
                return fused
        return super().apply_after(norm, x, residual, bias, act)


class PackedRunner(Runner):
    """Codes of 4, 5 or 8 bits with float16 scales for every 32 columns, in the layout of the CPU's kernels.

    Args:
        packed: the parts, and what columns of x they want.
        columns: of x.
    """

    def __init__(self, packed: tuple[list[QuantizedMatrix], torch.Tensor | None], columns: int):
        parts, self.perm = packed
        # With `perm` there may be more than x has.
        self.matrix = quant_ops.make_matrix(parts, columns if self.perm is None else len(self.perm))

    @staticmethod
    def bytes_of(scheme: WeightScheme, rows: int, columns: int) -> int:
        """Bytes of so many rows of a scheme."""
        return quant_ops.matrix_bytes([(rows, packed_format(scheme))], columns)

    def register(self, layer: nn.Module) -> None:
        for i, data in enumerate(self.matrix.tensors):
            layer.register_buffer(f"packed_{i}", data, persistent=False)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype is torch.float16:
            return self.apply(x.float(), None if bias is None else bias.float()).to(x.dtype)
        return self.matrix.linear(self._columns(x), bias)

    def apply_gated(self, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation) -> torch.Tensor:
        gate = GATES.get(act)
        matrix = self.matrix
        if gate is None or not isinstance(matrix, quant.PackedMatrix) or not matrix.gates:
            return act(self.apply(x, bias))
        if x.dtype is torch.float16:
            return act(self.apply(x, bias))
        return matrix.linear(self._columns(x), bias, gate)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.perm is None else x.index_select(1, self.perm)


def packed_format(scheme: WeightScheme) -> QuantFormat:
    """The format in which the CPU's kernels have a scheme's matrices."""
    if scheme.bits == 8:
        return INT8
    return INT4 if scheme.symmetric else INT4_ASYMMETRIC


def dequantized_instead(model: nn.Module) -> Mapping[str, int]:
    """How many of a model's matrices were dequantized though the table of modes says otherwise, by why."""
    reasons: Counter[str] = Counter()
    for module in model.modules():
        for name in ("runner", "w13", "w2"):  # the latter of experts
            found = getattr(module, name, None)
            for runner in found if isinstance(found, list) else [found]:
                if isinstance(runner, Runner) and runner.expanded_since is not None:
                    reasons[runner.expanded_since] += 1
    return reasons


def packable(matrices: Sequence[Matrix]) -> tuple[list[QuantizedMatrix], torch.Tensor | None]:
    """The parts in the CPU's form, and the columns of x in their order (None: as they are).

    Raises:
        Unpackable: scales beyond float16, groups that are no multiples of 32 columns, or parts of different
            orders.
    """
    perms = [matrix.perm if isinstance(matrix, Int4Matrix) else None for matrix in matrices]
    first = perms[0]
    for perm in perms:
        alike = perm is first if perm is None or first is None else torch.equal(perm, first)
        if not alike:
            raise Unpackable("parts that are multiplied as one have columns in different orders")
    return joined([_quantized(matrix) for matrix in matrices]), None if first is None else first.long()


def _quantized(matrix: Matrix) -> QuantizedMatrix:
    if isinstance(matrix, Int4Matrix):
        codes = unpack_rows(matrix.qweight).T.contiguous()
        scale = matrix.scales.T.float()
        if matrix.zeros is not None:
            zeros = unpack_columns(matrix.zeros).T
            groups = codes.unflatten(1, (scale.shape[1], -1))
            codes = (groups + 16 - zeros[:, :, None]).flatten(1)
        return _with_scales(INT4 if matrix.zeros is None else INT4_ASYMMETRIC, codes, scale)
    if isinstance(matrix, Matrix8) and matrix.weight.dtype is torch.int8 and matrix.zeros is None:
        scale = matrix.scale if matrix.scale.dim() == 2 else matrix.scale[:, None]
        return _with_scales(INT8, matrix.weight, scale)
    raise Unpackable("parts that are multiplied as one are not all of 4 or 8 bits")


def _with_scales(fmt: QuantFormat, codes: torch.Tensor, scale: torch.Tensor) -> QuantizedMatrix:
    """The matrix of codes `[N, K]` and float32 scales `[N, groups]`."""
    columns, groups = codes.shape[1], scale.shape[1]
    if groups > 1 and (columns % groups or columns // groups % BLOCK):
        raise Unpackable(f"groups of {columns / groups:g} columns are no multiples of {BLOCK}")
    half = scale.half()
    if bool(((half.float() - scale).abs() > _SCALE_ERROR * scale.abs()).any()):
        raise Unpackable("float16, which the kernels have scales in, does not hold theirs")
    padding = -columns % BLOCK
    if padding:  # of one group only
        codes = torch.nn.functional.pad(codes, (0, padding), value=fmt.zero)
    per_group = (columns + padding) // groups // BLOCK
    return QuantizedMatrix(fmt, codes.contiguous(), half.repeat_interleave(per_group, 1).contiguous(), None)
