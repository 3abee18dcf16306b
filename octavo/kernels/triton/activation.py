"""Gated activations of the feed-forward layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, x_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    wait_for_previous(OVERLAP)
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + cols, mask=mask, other=0.0)
    # SiLU is rounded before the product, as unfused layers do.
    act = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (act * up.to(tl.float32)).to(up.dtype), mask=mask)


_silu_and_mul = Launcher(_silu_and_mul_kernel)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]` (SwiGLU's gate, arXiv 2002.05202).

    Args:
        x: `[..., 2 n]`, gate half then up half.

    Returns:
        `[..., n]`, same dtype.
    """
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty((rows.shape[0], size), dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = min(1024, power_of_2(size))
        _silu_and_mul(
            (rows.shape[0], ceil_div(size, block), 1),
            (rows, out),
            (rows.stride(0), size),
            (),
            (size, block),
            4 if block > 256 else 1,
        )
    return out.view(*x.shape[:-1], size)
