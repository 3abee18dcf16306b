"""Quantized matrices in plain PyTorch: what they mean, and the twin of the CPU's kernels.

A weight is `scale * (q - zero)`, or `scale * q + minimum`, with a scale (and a minimum) for every row and
group of 16 or 32 columns. A product quantizes the rows of x to 8 bits, with a scale for every 32 columns,
multiplies integers, and adds up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32  # columns that share a scale of x
_SLICE = 1 << 18  # weights that are turned into float32 at a time: 1 MiB, which stays in the cache
_TINY = 1e-30  # a block whose largest magnitude is below is taken as zeros


@dataclass(frozen=True)
class QuantFormat:
    """How the numbers of a matrix are stored.

    Attributes:
        bits: 4, 5 or 6 (q from 0 on) or 8 (q signed, from -127 on; -128 is allowed).
        group: columns that share a scale: 16 or 32.
        has_minimum: whether each group has a minimum too.
        zero: what q is of a weight of 0, without minima.
    """

    bits: int
    group: int
    has_minimum: bool
    zero: int


INT8 = QuantFormat(8, 32, False, 0)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix `[rows, columns]`.

    Attributes:
        format: what the tensors hold.
        q: uint8, or int8 for 8 bits, `[rows, columns]`, columns a multiple of 32.
        scale: float16 `[rows, columns / group]`.
        minimum: alike, or None.
    """

    format: QuantFormat
    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None


def quantize_int8(weight: torch.Tensor) -> QuantizedMatrix:
    """The nearest int8 numbers of `[rows, columns]`, any float dtype, each group of 32 scaled by its largest
    magnitude (as GGML's Q8_0); columns are padded with zeros to a multiple of 32.

    Raises:
        ValueError: values that are not finite, or beyond what float16 scales reach.
    """
    wide = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK))
    groups = wide.unflatten(1, (-1, BLOCK))
    scale = (groups.abs().amax(2) / 127).half()
    if not bool(scale.isfinite().all()):
        raise ValueError("weights that are not finite, or too large for float16 scales")
    used = torch.where(scale == 0, torch.inf, scale.float())
    q = (groups / used[:, :, None]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedMatrix(INT8, q.flatten(1), scale, None)


def dequantize(matrix: QuantizedMatrix) -> torch.Tensor:
    """The weights in float32, `[rows, columns]`."""
    groups = matrix.q.float().sub_(matrix.format.zero).unflatten(1, (-1, matrix.format.group))
    groups.mul_(matrix.scale.float()[:, :, None])
    if matrix.minimum is not None:
        groups.add_(matrix.minimum.float()[:, :, None])
    return groups.flatten(1)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `x` in 8 bits: q int8 `[rows, columns]` (padded to a multiple of 32) and float32 scales
    `[rows, columns / 32]`. A block that holds a NaN or an infinity has a NaN for its scale."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(2)
    scale = torch.where(most < _TINY, 0.0, most / 127)
    scale = torch.where(most.isfinite(), scale, torch.nan)
    inverse = torch.where(most < _TINY, 0.0, 127 / most)
    q = (blocks * inverse[:, :, None]).round_().nan_to_num_(0, 0, 0).to(torch.int8)
    return q.flatten(1), scale


def quantized_linear(
    x: torch.Tensor, parts: list[QuantizedMatrix], bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W^T + bias` of x's 8-bit form: `[rows, columns]` to `[rows, rows of all parts]`, in `x`'s dtype.

    The products are those of the integers, as one float32 product per block of columns would be: x's
    numbers and the weights' are exact in float32.
    """
    q, scale = quantize_rows(x)
    wide = (q.unflatten(1, (-1, BLOCK)).float() * scale[:, :, None]).flatten(1)
    out = torch.empty(x.shape[0], sum(part.q.shape[0] for part in parts), dtype=torch.float32)
    first = 0
    for part in parts:
        step = max(1, _SLICE // part.q.shape[1])
        for piece in range(0, part.q.shape[0], step):
            rows = slice(piece, min(piece + step, part.q.shape[0]))
            weight = dequantize(_rows_of(part, rows))
            torch.mm(wide, weight.T, out=out[:, first + rows.start : first + rows.stop])
        first += part.q.shape[0]
    return (out if bias is None else out.add_(bias.float())).to(x.dtype)


def _rows_of(matrix: QuantizedMatrix, rows: slice | torch.Tensor) -> QuantizedMatrix:
    minimum = None if matrix.minimum is None else matrix.minimum[rows]
    return QuantizedMatrix(matrix.format, matrix.q[rows], matrix.scale[rows], minimum)


class PlainMatrix:
    """One matrix of one or several parts, each some of its rows, multiplied in plain PyTorch.

    Twin of `octavo.kernels.cpu.quant.PackedMatrix`.

    Args:
        parts: in the order of their rows, with equal columns.
        columns: of x; what a part has beyond is padding.
    """

    def __init__(self, parts: list[QuantizedMatrix], columns: int):
        self.parts = parts
        self.columns = columns
        self.rows = sum(part.q.shape[0] for part in parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that holds it."""
        return [t for p in self.parts for t in (p.q, p.scale, p.minimum) if t is not None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`quantized_linear` of `x` `[any, columns]`."""
        return quantized_linear(x, self.parts, bias)

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the matrix, `ids` integer `[n]`: `[n, columns]` in `dtype`."""
        out = torch.empty(len(ids), self.columns, dtype=dtype)
        first = 0
        for part in self.parts:
            mine = (ids >= first) & (ids < first + part.q.shape[0])
            out[mine] = dequantize(_rows_of(part, ids[mine] - first))[:, : self.columns].to(dtype)
            first += part.q.shape[0]
        return out

    def equals(self, other: PlainMatrix) -> bool:
        """Whether both store the same numbers."""
        if len(self.parts) != len(other.parts):
            return False
        for a, b in zip(self.parts, other.parts, strict=True):
            if a.format != b.format or not torch.equal(a.q, b.q) or not torch.equal(a.scale, b.scale):
                return False
            if a.minimum is not None and b.minimum is not None and not torch.equal(a.minimum, b.minimum):
                return False
        return True
