"""Rows of activations in 8 bits, for products with weights of 8 bits: alone, or where they are made, by a
norm or a gated activation. Codes and scales are those of `octavo.kernels.reference_lowbit`, to the bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_lowbit import FP8, FP8_BLOCK
from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous
from octavo.kernels.triton.norm import add_residual, normalized

ACTS = {"silu": False, "gelu_tanh": True}

# The float32 of 1.5 * 2^23: what is added to it is rounded to an integer, to nearest even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# Whether a device's own conversions can be used, which Triton's interpreter does in another way.
_NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def quotient(x, scale):
    """`x / scale`, rounded as IEEE 754 says, where both are float32 and the quotient is no subnormal number.

    A product with the scale's reciprocal, and its remainder's (Markstein, IBM J. Res. Dev. 34, 1990): without
    the branches for numbers that are out of range.
    """
    if _NATIVE:
        inverse = tl.math.div_rn(tl.zeros_like(scale) + 1.0, scale)
        near = x * inverse
        return tl.fma(tl.fma(-near, scale, x), inverse, near)
    else:
        return tl.math.div_rn(x, scale)


@triton.jit
def round_e4m3(y):
    """The numbers of E4M3 nearest to `y` (even where two are), in float32, saturated at 448; NaN stays."""
    if _NATIVE:
        return y.to(tl.float8e4nv).to(tl.float32)
    else:
        size = tl.minimum(tl.abs(y), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of the mantissa stay
        # Below the smallest normal number, 2^-6, all are multiples of 2^-9: the last place of 2^14.
        near = tl.where(size < 0.015625, (size + 16384.0) - 16384.0, bits.to(tl.float32, bitcast=True))
        return tl.where(y != y, y, tl.where(y < 0, -near, near))


@triton.jit
def _round_int8(y, GIVEN: tl.constexpr):
    if GIVEN:  # else no number is beyond 127, nor a NaN with a scale that is none
        y = tl.where(y != y, 0.0, y)
        y = tl.minimum(tl.maximum(y, -128.0), 127.0)
    return (y + _ROUND) - _ROUND


@triton.jit
def scale_of(x, IS_FP8: tl.constexpr):
    """The scale of numbers `[n]`, float32, by the largest of them."""
    return tl.math.div_rn(_larger(tl.reduce(tl.abs(x), 0, _larger), 1e-10), 448.0 if IS_FP8 else 127.0)


@triton.jit
def given_or_scale_of(x, given_ptr, GIVEN: tl.constexpr, IS_FP8: tl.constexpr):
    """The scale at `given_ptr`, or `scale_of`."""
    if GIVEN:
        return tl.load(given_ptr).to(tl.float32)
    else:
        return scale_of(x, IS_FP8)


@triton.jit
def codes_of(x, scale, GIVEN: tl.constexpr, IS_FP8: tl.constexpr):
    """Codes (as float32) of `x` `[n]`, float32, by one scale, which was GIVEN or is `scale_of` them."""
    y = quotient(x, tl.zeros_like(x) + scale)
    if IS_FP8:
        return round_e4m3(y)
    else:
        return _round_int8(y, GIVEN)


@triton.jit
def group_codes(x, GROUP: tl.constexpr):
    """E4M3 codes (as float32) of a row's numbers `x` `[n]`, and the scales of its groups `[n / GROUP]`."""
    groups = tl.reshape(x, [x.shape[0] // GROUP, GROUP])
    scale = tl.math.div_rn(_larger(tl.reduce(tl.abs(groups), 1, _larger), 1e-10), 448.0)
    y = quotient(groups, tl.broadcast_to(scale[:, None], groups.shape))
    return tl.reshape(round_e4m3(y), x.shape), scale


@triton.jit
def _store_codes(x, codes_ptr, scale_ptr, given_ptr, row, cols, mask, SIZE: tl.constexpr,
                 GROUP: tl.constexpr, GIVEN: tl.constexpr):  # fmt: skip
    """A row's numbers `x` (of the activations' dtype, 0 where they are masked) as codes and scales."""
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    wide = x.to(tl.float32)
    if GROUP:
        codes, scale = group_codes(wide, GROUP)
        COUNT: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        group = tl.arange(0, x.shape[0] // GROUP)
        tl.store(scale_ptr + row * COUNT + group, scale, mask=group < COUNT)
    else:
        scale = given_or_scale_of(wide, given_ptr, GIVEN, dtype == tl.float8e4nv)
        codes = codes_of(wide, scale, GIVEN, dtype == tl.float8e4nv)
        tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * SIZE + cols, codes.to(dtype), mask=mask)


@triton.jit
def _quantize_kernel(x_ptr, given_ptr, codes_ptr, scale_ptr, x_stride,
                     SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GIVEN: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    _store_codes(x, codes_ptr, scale_ptr, given_ptr, row, cols, mask, SIZE, GROUP, GIVEN)


@triton.jit
def _norm_kernel(x_ptr, residual_ptr, weight_ptr, given_ptr, codes_ptr, scale_ptr, x_stride, residual_stride,
                 eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GIVEN: tl.constexpr,
                 HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = add_residual(x, residual_ptr + row * residual_stride + cols, mask)
    normed = normalized(x, weight, eps, SIZE)
    _store_codes(normed, codes_ptr, scale_ptr, given_ptr, row, cols, mask, SIZE, GROUP, GIVEN)


@triton.jit
def _gated_kernel(x_ptr, given_ptr, codes_ptr, scale_ptr, x_stride,
                  SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GIVEN: tl.constexpr,
                  GELU: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    wait_for_previous(OVERLAP)
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + cols, mask=mask, other=0.0)
    _store_codes(gated(gate, up, GELU), codes_ptr, scale_ptr, given_ptr, row, cols, mask, SIZE, GROUP, GIVEN)


_quantize = Launcher(_quantize_kernel, overlap=True)
_norm = Launcher(_norm_kernel, overlap=True)
_gated = Launcher(_gated_kernel, overlap=True)


class Rows8(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: float8_e4m3fn or int8 `[rows, size]`.
        scale: float32 `[rows]`, or `[rows, ceil(size / 128)]` of groups.
    """

    codes: torch.Tensor
    scale: torch.Tensor


class Form(NamedTuple):
    """How rows are quantized.

    Attributes:
        dtype: float8_e4m3fn or int8.
        grouped: a scale for every 128 columns (of FP8).
        given: float32 `[1]`, the scale of all rows; None: by their numbers.
    """

    dtype: torch.dtype
    grouped: bool = False
    given: torch.Tensor | None = None


FP8_ROWS = Form(FP8)
FP8_GROUPS = Form(FP8, True)
INT8_ROWS = Form(torch.int8)


def _blank(rows: int, size: int, form: Form, device: torch.device) -> tuple[Rows8, tuple[int, ...], int]:
    """Rows to be filled, the constants of a kernel that does it, and its warps."""
    shape = (rows, ceil_div(size, FP8_BLOCK)) if form.grouped else (rows,)
    out = Rows8(
        torch.empty((rows, size), dtype=form.dtype, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
    block = max(power_of_2(size), FP8_BLOCK if form.grouped else 1)
    constants = (size, block, FP8_BLOCK if form.grouped else 0, form.given is not None)
    # A row lies in registers: at most 32 numbers a thread.
    return out, constants, max(1, min(32, block // 512 if block <= 8192 else block // 1024))


def _lined(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def quantize_rows(x: torch.Tensor, form: Form) -> Rows8:
    """`quantize_rows_fp8`, `quantize_rows_int8` or `quantize_groups_fp8` of rows `[rows, size]`, float32,
    bfloat16 or float16."""
    x = _lined(x)
    rows, size = x.shape
    out, constants, warps = _blank(rows, size, form, x.device)
    if rows:
        given = out.scale if form.given is None else form.given
        _quantize((rows, 1, 1), (x, given, *out), (x.stride(0),), (), constants, warps)
    return out


def rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, form: Form
) -> Rows8:
    """`quantize_rows` of `norm.rms_norm` of `x`, or of `norm.add_rms_norm` of `x` and the stream `residual`,
    which is overwritten with the sum.

    Args:
        x: `[rows, size]`.
        residual: same shape and dtype, or None.
        weight: `[size]`, of `x`'s dtype or float32.
        eps: added to the mean square.
        form: of the result.
    """
    x = _lined(x)
    rows, size = x.shape
    out, constants, warps = _blank(rows, size, form, x.device)
    if rows:
        flat = x if residual is None else residual
        if flat.stride(1) != 1:
            raise ValueError(f"the stream's rows must be contiguous, got strides {flat.stride()}")
        given = out.scale if form.given is None else form.given
        _norm(
            (rows, 1, 1),
            (x, flat, weight, given, *out),
            (x.stride(0), flat.stride(0)),
            (eps,),
            (*constants, residual is not None),
            warps,
        )
    return out


def gated_quantize(x: torch.Tensor, act: str, form: Form) -> Rows8:
    """`quantize_rows` of `activation.silu_and_mul` ("silu") or `gelu_tanh_and_mul` ("gelu_tanh") of rows
    `[rows, 2 size]`."""
    x = _lined(x)
    rows, size = x.shape[0], x.shape[1] // 2
    out, constants, warps = _blank(rows, size, form, x.device)
    if rows:
        given = out.scale if form.given is None else form.given
        _gated((rows, 1, 1), (x, given, *out), (x.stride(0),), (), (*constants, ACTS[act]), warps)
    return out
