"""Products of few rows with a weight matrix, where reading the weights once is all the work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous

MAX_ROWS = 4


@triton.jit
def _few_rows_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_row, weight_row, out_row,
    ROWS: tl.constexpr, ROWS_P2: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: BLOCK_OUT outputs of all rows. Products stay per lane; one reduction ends the program."""
    out_at = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lanes = tl.arange(0, BLOCK_IN)
    rows = tl.arange(0, ROWS_P2)
    w_ptr = weight_ptr + out_at.to(tl.int64)[:, None] * weight_row + lanes[None, :]
    x_at = x_ptr + rows[:, None] * x_row + lanes[None, :]
    acc = tl.zeros([ROWS_P2, BLOCK_OUT, BLOCK_IN], tl.float32)
    EVEN: tl.constexpr = IN % BLOCK_IN == 0 and OUT % BLOCK_OUT == 0
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    w_mask = (out_at < OUT)[:, None] & (lanes < IN)[None, :]
    if EVEN:
        w = tl.load(w_ptr, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptr, mask=w_mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(OVERLAP)
    for start in range(0, IN, BLOCK_IN):
        if start > 0:
            if EVEN:
                w = tl.load(w_ptr + start, eviction_policy="evict_first")
            else:
                w_mask = (out_at < OUT)[:, None] & (start + lanes < IN)[None, :]
                w = tl.load(w_ptr + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if IN % BLOCK_IN == 0 and ROWS == ROWS_P2:
            x = tl.load(x_at + start)
        else:
            x = tl.load(x_at + start, mask=(rows < ROWS)[:, None] & (start + lanes < IN)[None, :], other=0.0)
        acc += w.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    result = tl.sum(acc, axis=2)
    if HAS_BIAS:
        result += tl.load(bias_ptr + out_at, mask=out_at < OUT, other=0.0).to(tl.float32)[None, :]
    mask = (rows < ROWS)[:, None] & (out_at < OUT)[None, :]
    target = out_ptr + rows[:, None] * out_row + out_at[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


_few_rows_linear = Launcher(_few_rows_linear_kernel, overlap=True)


def few_rows_config(rows: int, size_in: int, size_out: int) -> tuple[int, int, int]:
    """Outputs a program, inputs a step, warps: the fastest of those tried on an H200 at one row."""
    block_in = min(1024, power_of_2(size_in))
    block_out = 4 if size_out >= 16384 and rows <= 2 else 2
    return block_out, block_in, 4


def beats_cublas(rows: int, size_in: int, size_out: int) -> bool:
    """Whether `few_rows_linear` is the faster one, as measured on an H200.

    At one row always (by 2 to 45%, most for small matrices); at two rows for small matrices alone, where
    cuBLAS is far from the bandwidth.
    """
    return rows == 1 or (rows == 2 and size_in * size_out <= 4 << 20)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, with float32 sums, for at most `MAX_ROWS` rows.

    Args:
        x: `[rows, in]`, bfloat16 or float16 (float32 works).
        weight: `[out, in]`, contiguous in the last dimension.
        bias: `[out]` or None.
        config: see `few_rows_config`; None: that default.

    Returns:
        `[rows, out]` of `x`'s dtype.
    """
    rows, size_in = x.shape
    size_out = weight.shape[0]
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    block_out, block_in, warps = config or few_rows_config(rows, size_in, size_out)
    _few_rows_linear(
        (ceil_div(size_out, block_out), 1, 1),
        (x, weight, weight if bias is None else bias, out),
        (x.stride(0), weight.stride(0), size_out),
        (),
        (rows, power_of_2(rows), size_in, size_out, block_out, block_in, bias is not None),
        warps,
    )
    return out
