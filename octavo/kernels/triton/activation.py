"""Gated activations of the feed-forward layers, and the soft cap of scores and logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous


@triton.jit
def tanh(x):
    """tanh of a float32 tensor, relative error below 1e-6, by no more than `exp2`; a NaN stays one.

    Near 0 an odd polynomial (`1 - 2 / (e^2x + 1)` would cancel there), fitted for the least relative error
    on [-0.625, 0.625].
    """
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.math.exp2(size * 2.8853900817779268) + 1.0)  # an infinite power gives 1
    square = x * x
    p = square * -5.7170659e-03 + 2.0650608e-02
    p = p * square - 5.3743505e-02
    p = p * square + 1.3331491e-01
    p = p * square - 3.3333284e-01
    return tl.where(size < 0.625, x + x * square * p, tl.where(x < 0, -far, far))


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """`silu(gate) * up`, or with GELU's tanh form, of tensors of the activations' dtype, in that dtype."""
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:
        # g / 2 (1 + tanh(u)) = g sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3)
        slope = wide * (1.5957691216057308 + 0.07135481627159818 * wide * wide)
    # The gate is rounded before the product, as unfused layers do.
    act = (wide / (1.0 + tl.exp(-slope))).to(up.dtype).to(tl.float32)
    return (act * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_stride, out_stride,
                  SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
                  OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    wait_for_previous(OVERLAP)
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * out_stride + cols, gated(gate, up, GELU), mask=mask)


@triton.jit
def _softcap_kernel(x_ptr, x_stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * x_stride + cols
    x = tl.load(at, mask=cols < SIZE, other=0.0).to(tl.float32)
    tl.store(at, (cap * tanh(x / cap)).to(x_ptr.dtype.element_ty), mask=cols < SIZE)


_gated = Launcher(_gated_kernel, overlap=True)
_softcap = Launcher(_softcap_kernel)


def _launch_gated(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty((rows.shape[0], size), dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = min(1024, power_of_2(size))
        _gated(
            (rows.shape[0], ceil_div(size, block), 1),
            (rows, out),
            (rows.stride(0), size),
            (),
            (size, block, gelu),
            4 if block > 256 else 1,
        )
    return out.view(*x.shape[:-1], size)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]` (SwiGLU's gate, arXiv 2002.05202).

    Args:
        x: `[..., 2 n]`, gate half then up half.

    Returns:
        `[..., n]`, same dtype.
    """
    return _launch_gated(x, False)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :n]) * x[..., n:]` with GELU's tanh form (arXiv 1606.08415); shapes as `silu_and_mul`."""
    return _launch_gated(x, True)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)` in place, in float32 inside (Gemma 2, arXiv 2408.00118).

    Args:
        x: `[rows, size]`, contiguous in the last dimension.
        cap: above 0.

    Returns:
        `x`.
    """
    rows, size = x.shape
    if x.stride(-1) != 1:
        raise ValueError(f"rows must be contiguous, got strides {x.stride()}")
    if rows:
        block = min(1024, power_of_2(size))
        _softcap((rows, ceil_div(size, block), 1), (x,), (x.stride(0),), (cap,), (size, block), 4)
    return x
