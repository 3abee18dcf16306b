"""8-bit weights as numbers of the activations' type, for products of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div
from octavo.kernels.triton.skinny_linear import BYTES, scale_shape
from octavo.kernels.triton.unpack import by_ptx, unpack_bytes

_ROWS, _COLUMNS = 32, 128


@triton.jit
def _expand_bytes_kernel(
    codes_ptr, scale_ptr, out_ptr, codes_row, scale_row, size_in, size_out,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BYTES: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Program (p, s): BLOCK_OUT rows of the matrix, BLOCK_IN columns."""
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    col = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    mask = (row < size_out)[:, None] & (col < size_in)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    codes = tl.load(codes_ptr + row.to(tl.int64)[:, None] * codes_row + col[None, :], mask=mask, other=0)
    group = col // GROUP if GROUP else col * 0
    scale = tl.load(scale_ptr + (row // TALL * scale_row)[:, None] + group[None, :], mask=mask, other=0.0)
    wide = unpack_bytes(codes, dtype, BYTES == 2, PACKED).to(tl.float32) * scale
    tl.store(out_ptr + row.to(tl.int64)[:, None] * size_in + col[None, :], wide.to(dtype), mask=mask)


_expand_bytes = Launcher(_expand_bytes_kernel)


def expand_bytes(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in full, `[out, in]` of `dtype`, each weight rounded once; `weight` and `scale` as for
    `octavo.kernels.triton.skinny_linear.skinny_linear`."""
    rows, columns = weight.shape
    tall, group = scale_shape(weight, scale)
    out = torch.empty((rows, columns), dtype=dtype, device=weight.device)
    _expand_bytes(
        (ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS), 1),
        (weight.view(torch.int8), scale, out),
        (weight.stride(0), scale.stride(0), columns, rows),
        (),
        (_ROWS, _COLUMNS, BYTES[weight.dtype], by_ptx(), group, tall),
        4,
    )
    return out
