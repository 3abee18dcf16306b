"""RMS normalization (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, power_of_2, wait_for_previous


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, eps,
                     SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0)
        # The sum is rounded to the stream's dtype before it is normalized, as unfused layers do.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row * residual_stride + cols, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    # As in Transformers' Llama: the normalized value is rounded first, then weighted.
    normed = (wide * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


_rms_norm = Launcher(_rms_norm_kernel)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if residual is not None:
        flat = residual.view(-1, size)
    else:
        flat = rows
    if rows.shape[0]:
        block = power_of_2(size)
        _rms_norm(
            (rows.shape[0], 1, 1),
            (rows, flat, weight, out),
            (rows.stride(0), flat.stride(0), size),
            (eps,),
            (size, block, residual is not None),
            max(1, min(16, block // 512)),
        )
    return out.view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32 inside.

    Args:
        x: `[..., size]`, float32, bfloat16 or float16.
        weight: `[size]`.
        eps: added to the mean square.

    Returns:
        A new tensor of `x`'s shape and dtype.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `x` to `residual` in place, and normalizes the sum.

    Args:
        x: `[..., size]`, a sublayer's output.
        residual: same shape, the stream; overwritten with `x + residual` rounded to its dtype.
        weight: `[size]`.
        eps: added to the mean square.

    Returns:
        The normalized sum (new tensor), and `residual`.
    """
    return _launch(x, residual, weight, eps), residual
