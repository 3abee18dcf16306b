"""The product of one row with weights of 8 bits, whose inputs a program's warps share.

As in `tiles_row_warps`, a program takes all inputs of few outputs, and its warps add their sums in shared
memory. Its weights are in registers before the kernel ahead has ended. The residual addition and RMS norm
before the product, and the row's quantization, are part of the kernel: each program makes the row's codes
itself. Tensor cores multiply 8 rows, which all are this one.

`row_8bit` multiplies without tensor cores: better for small matrices, whose time is not the conversion's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous
from octavo.kernels.triton.norm import weighted
from octavo.kernels.triton.row_8bit import output_scales, store_results
from octavo.kernels.triton.rows_8bit import codes_of, given_or_scale_of

# Weights of a warp that registers hold, 64 words a thread.
_RESIDENT_BYTES = 8192


class WarpsConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        outputs: rows of the matrix that a program multiplies, a power of 2 from 16 on.
        inputs: columns that a warp takes at a time.
        warps: of a program.
    """

    outputs: int
    inputs: int
    warps: int

    def serves(self, size_in: int) -> bool:
        """Whether registers hold the weights."""
        return self.outputs * power_of_2(ceil_div(size_in, self.warps)) <= _RESIDENT_BYTES


@triton.jit
def _load(ptr, col, end, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < end, other=0.0)


@triton.jit
def _load_weights(weight_ptr, weight_row, row, col, IN: tl.constexpr, EVEN: tl.constexpr):
    """`[WARPS, OUTPUTS, BLOCK_IN]`"""
    at = weight_ptr + row.to(tl.int64)[None, :, None] * weight_row + col[:, None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        ZERO: tl.constexpr = 0 if weight_ptr.dtype.element_ty == tl.int8 else 0.0
        return tl.load(at, mask=(col < IN)[:, None, :], other=ZERO, eviction_policy="evict_first")


@triton.jit
def _columns(round, WARPS: tl.constexpr, BLOCK_IN: tl.constexpr):
    """`[WARPS, BLOCK_IN]`: a round's columns."""
    return (round * WARPS + tl.arange(0, WARPS))[:, None] * BLOCK_IN + tl.arange(0, BLOCK_IN)[None, :]


@triton.jit
def _numbers(x_ptr, residual_ptr, norm_ptr, col, factor, IN: tl.constexpr, EVEN: tl.constexpr,
             NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """The row's numbers at `col`, before they are normalized if `factor` is None."""
    x = _load(x_ptr, col, IN, EVEN)
    if HAS_RESIDUAL:
        # Rounded before it is normalized, as unfused layers do.
        x = (x.to(tl.float32) + _load(residual_ptr, col, IN, EVEN).to(tl.float32)).to(x.dtype)
    if NORM and factor is not None:
        x = weighted(x, factor, _load(norm_ptr, col, IN, EVEN))
    return x


@triton.jit
def _add(acc, w, x):
    """`acc [WARPS, OUTPUTS, 8]` and the product of a round's weights and codes `[WARPS, BLOCK_IN]`."""
    rows = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], 8])
    if x.dtype == tl.int8:
        return tl.dot(w, rows, acc, out_dtype=tl.int32)
    else:
        return tl.dot(w, rows, acc)


@triton.jit
def _row_warps_kernel(
    x_ptr, residual_ptr, norm_ptr, given_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, stream_ptr,
    weight_row, eps,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_IN: tl.constexpr, GIVEN: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: the p-th OUTPUTS rows of the matrix. WIDTH holds all inputs."""
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    IS_FP8: tl.constexpr = dtype == tl.float8e4nv
    EVEN: tl.constexpr = IN % (WARPS * BLOCK_IN) == 0
    ROUNDS: tl.constexpr = (IN + WARPS * BLOCK_IN - 1) // (WARPS * BLOCK_IN)
    tile = tl.program_id(0)
    # Beyond the last row it is read again, and its products not stored.
    row = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), OUT - 1)
    # No kernel writes weights: they are on their way while the kernel before this one ends.
    weights = ()
    for round in tl.static_range(ROUNDS):
        w = _load_weights(weight_ptr, weight_row, row, _columns(round, WARPS, BLOCK_IN), IN, EVEN)
        weights = weights + (w,)  # type: ignore[assignment]
    scale = output_scales(scale_ptr, tile, OUT, OUTPUTS, False)
    everywhere = tl.arange(0, WIDTH)
    if NORM:
        norm = _load(norm_ptr, everywhere, IN, WIDTH == IN)
    wait_for_previous(OVERLAP)

    factor = None
    if not GIVEN or NORM or HAS_RESIDUAL:
        x = _numbers(
            x_ptr, residual_ptr, norm_ptr, everywhere, None, IN, WIDTH == IN, NORM, HAS_RESIDUAL
        )  # fmt: skip
        if HAS_RESIDUAL:
            # Into another tensor, as other programs may still have to read this one.
            tl.store(stream_ptr + everywhere, x, mask=(everywhere < IN) & (tile == 0))
        if NORM:
            wide = x.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / IN + eps)
            x = weighted(x, factor, norm)
        row_scale = given_or_scale_of(x.to(tl.float32), given_ptr, GIVEN, IS_FP8)
    else:
        row_scale = tl.load(given_ptr).to(tl.float32)

    acc = tl.zeros([WARPS, OUTPUTS, 8], tl.float32 if IS_FP8 else tl.int32)
    for round in tl.static_range(ROUNDS):
        col = _columns(round, WARPS, BLOCK_IN)
        part = _numbers(x_ptr, residual_ptr, norm_ptr, col, factor, IN, EVEN, NORM, HAS_RESIDUAL)
        codes = codes_of(part.to(tl.float32), row_scale, GIVEN, IS_FP8).to(dtype)
        acc = _add(acc, weights[round], codes)
    # The 8 lines are the same.
    line = tl.where(tl.arange(0, 8)[None, None, :] == 0, acc, 0)
    result = tl.sum(tl.sum(line, axis=2), axis=0).to(tl.float32) * row_scale * scale
    store_results(result, bias_ptr, out_ptr, tile, OUT, OUTPUTS, HAS_BIAS, None)


_row = Launcher(_row_warps_kernel, overlap=True)


def row_8bit_warps(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    given: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    config: WarpsConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`octavo.kernels.triton.row_8bit.row_8bit` without an activation, whose matrix has a scale for each row.

    Args:
        x, weight, scale, bias, given, norm, residual: see there; `scale` float32 `[out]`.
        config: how the work is cut.

    Returns:
        See there.

    Raises:
        ValueError: several rows, scales of blocks, a cut that does not serve so many inputs.
    """
    rows, size_in = x.shape
    size_out = weight.shape[0]
    if rows != 1 or scale.dim() != 1 or not config.serves(size_in):
        raise ValueError(
            f"got {rows} rows of {size_in} inputs and scales {list(scale.shape)}: {config} serves one row, "
            "of fewer inputs, and a scale for each row of the matrix"
        )
    outputs, block_in, warps = config
    x = x.contiguous()
    out = torch.empty((1, size_out), dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(x)
    norm_weight, eps = (scale, 0.0) if norm is None else norm
    _row(
        (ceil_div(size_out, outputs), 1, 1),
        # Tensors that a variant has no use for are stood in for by others.
        (
            x, x if residual is None else residual.contiguous(), norm_weight,
            scale if given is None else given, weight, scale, scale if bias is None else bias, out, stream,
        ),
        (weight.stride(0),),
        (eps,),
        (
            size_in, size_out, power_of_2(size_in), outputs, warps, block_in,
            given is not None, bias is not None, norm is not None, residual is not None,
        ),
        warps,
    )  # fmt: skip
    return out, stream
