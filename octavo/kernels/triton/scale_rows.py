"""Sums of integer codes to numbers: by the scales of their rows and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous


@triton.jit
def _scale_rows_kernel(sums_ptr, of_rows_ptr, of_columns_ptr, bias_ptr, out_ptr,
                       SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
                       OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    scale = tl.load(of_columns_ptr + cols, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    sums = tl.load(sums_ptr + row * SIZE + cols, mask=mask, other=0)
    out = sums.to(tl.float32) * tl.load(of_rows_ptr + row) * scale
    if HAS_BIAS:
        out += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


_scale_rows = Launcher(_scale_rows_kernel, overlap=True)


def scale_rows(
    sums: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`sums * of_rows[:, None] * of_columns + bias`.

    Args:
        sums: int32 `[rows, columns]`, contiguous.
        of_rows, of_columns: float32 `[rows]` and `[columns]`.
        bias: `[columns]` or None.
        dtype: of the result.
    """
    rows, columns = sums.shape
    out = torch.empty((rows, columns), dtype=dtype, device=sums.device)
    if rows:
        block = min(2048, power_of_2(columns))
        _scale_rows(
            (rows, ceil_div(columns, block), 1),
            (sums, of_rows, of_columns, of_columns if bias is None else bias, out),
            (),
            (),
            (columns, block, bias is not None),
            4,
        )
    return out
