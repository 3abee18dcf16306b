"""RMS normalization (Zhang and Sennrich, arXiv 1910.07467) and layer normalization (Ba et al., arXiv
1607.06450), alone and fused with the residual add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, power_of_2, wait_for_previous


@triton.jit
def add_residual(x, residual_ptr, mask):
    """The sum of a sublayer's output and the stream, which is stored; rounded to the stream's dtype before
    it is normalized, as unfused layers do."""
    residual = tl.load(residual_ptr, mask=mask, other=0.0)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptr, x, mask=mask)
    return x


@triton.jit
def normalized(x, weight, eps, SIZE: tl.constexpr):
    """The RMS norm of a row `x` `[n]` (0 beyond SIZE) times `weight`, in `x`'s dtype."""
    wide = x.to(tl.float32)
    return weighted(x, tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps), weight)


@triton.jit
def weighted(x, factor, weight):
    """Numbers of a row times its norm's factor, times `weight`, in `x`'s dtype."""
    normed = x.to(tl.float32) * factor
    if weight.dtype == x.dtype:
        # As in Transformers' Llama: the normalized value is rounded first, then weighted. A float32 weight
        # (Gemma's) meets it as it is.
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, eps,
                     SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = add_residual(x, residual_ptr + row * residual_stride + cols, mask)
    tl.store(out_ptr + row * out_stride + cols, normalized(x, weight, eps, SIZE), mask=mask)


@triton.jit
def _layer_norm_kernel(x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, residual_stride,
                       out_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                       HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = add_residual(x, residual_ptr + row * residual_stride + cols, mask)
    wide = x.to(tl.float32)
    centred = tl.where(mask, wide - tl.sum(wide, axis=0) / SIZE, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / SIZE + eps)
    normed *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, normed.to(out_ptr.dtype.element_ty), mask=mask)


_rms_norm = Launcher(_rms_norm_kernel, overlap=True)
_layer_norm = Launcher(_layer_norm_kernel)


def _launch(
    launcher: Launcher,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    eps: float,
    constants: tuple[bool, ...] = (),
) -> torch.Tensor:
    """Launches a norm, one program a row; without a residual the rows stand in for it."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    flat = rows if residual is None else residual.view(-1, size)
    if rows.shape[0]:
        block = power_of_2(size)
        launcher(
            (rows.shape[0], 1, 1),
            (rows, flat, *weights, out),
            (rows.stride(0), flat.stride(0), size),
            (eps,),
            (size, block, residual is not None, *constants),
            max(1, min(16, block // 512)),
        )
    return out.view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32 inside.

    Args:
        x: `[..., size]`, float32, bfloat16 or float16.
        weight: `[size]`; of `x`'s dtype, it multiplies the rounded norm; float32, the exact one.
        eps: added to the mean square.

    Returns:
        A new tensor of `x`'s shape and dtype.
    """
    return _launch(_rms_norm, x, None, (weight,), eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `x` to `residual` in place, and normalizes the sum.

    Args:
        x: `[..., size]`, a sublayer's output.
        residual: same shape, the stream; overwritten with `x + residual` rounded to its dtype.
        weight: `[size]`, as for `rms_norm`.
        eps: added to the mean square.

    Returns:
        The normalized sum (new tensor), and `residual`.
    """
    return _launch(_rms_norm, x, residual, (weight,), eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, in float32 inside.

    Args:
        x: `[..., size]`, float32, bfloat16 or float16.
        weight: `[size]`, of any of these dtypes.
        bias: `[size]`, likewise; None: 0.
        eps: added to the variance.

    Returns:
        A new tensor of `x`'s shape and dtype.
    """
    return _launch(_layer_norm, x, None, _with_bias(weight, bias), eps, (bias is not None,))


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `x` to `residual` in place, and layer-normalizes the sum; arguments as for `add_rms_norm`."""
    return _launch(_layer_norm, x, residual, _with_bias(weight, bias), eps, (bias is not None,)), residual


def _with_bias(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return weight, weight if bias is None else bias  # the kernel's constant says that there is none
