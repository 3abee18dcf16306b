"""The product of one row with 4-bit weights in tiles, where reading the weights once is all the work.

Of any form, with what comes before and after. A program is one warp or a few, which go through the inputs
together, so that there are many, each with loads of its own in flight; where outputs are few, several share
the inputs, and the last one adds their sums. `tiles_row_warps` is the other way.

Tensor cores multiply at least 8 rows at a time. Here these are the 8 slabs of 32 columns of a step of the
row, which is loaded once, in 512 bytes, for all of a step's codes. A slab of codes meets all of them, and of
the products the line of its own slab is kept; the lines are added at the end. The residual addition and RMS
norm before the product can be part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_tiles import BLOCK, STEP, Tiles
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.split_sums import end_tile
from octavo.kernels.triton.tiles import (
    ACTS,
    form_constants,
    form_tensors,
    slab_scale,
    unpack_block,
)
from octavo.kernels.triton.workspace import workspace


class RowConfig(NamedTuple):
    """How the matrix is cut: attributes as of `octavo.kernels.triton.tiles.TilesConfig`."""

    block_out: int
    stages: int
    warps: int
    splits: int = 1
    prefetch: int = 0


@triton.jit
def _load(ptr, col, size_in, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < size_in, other=0.0)


@triton.jit
def _add_block(
    total, codes, x, line, scale_ptr, zero_ptr, table_ptr, step, C: tl.constexpr, row_at, size_out,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`total [BLOCK_OUT, 8]` and a block's products with a step's row `x [32, 8]`, in their slabs' lines."""
    w0, w1, w2, w3 = unpack_block(
        codes,
        table_ptr,
        zero_ptr,
        step,
        C,
        row_at,
        size_out,
        GROUP,
        HAS_ZEROS,
        TABLE,
        LOOK_UP,
        PACKED,
        x.dtype,
    )
    none = tl.zeros([total.shape[0], 8], tl.float32)
    p0 = tl.dot(w0, x, none)
    p1 = tl.dot(w1, x, none)
    p2 = tl.dot(w2, x, none)
    p3 = tl.dot(w3, x, none)
    if GROUP == 32:
        p0 *= slab_scale(scale_ptr, step, C, 0, row_at, size_out, GROUP, SCALE)[:, None]
        p1 *= slab_scale(scale_ptr, step, C, 1, row_at, size_out, GROUP, SCALE)[:, None]
        p2 *= slab_scale(scale_ptr, step, C, 2, row_at, size_out, GROUP, SCALE)[:, None]
        p3 *= slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, None]
    # What the other lines hold is of no use, and may be anything.
    first = tl.where(line == C * 4, p0, tl.where(line == C * 4 + 1, p1, 0.0))
    second = tl.where(line == C * 4 + 2, p2, tl.where(line == C * 4 + 3, p3, 0.0))
    if GROUP == 64:
        first *= slab_scale(scale_ptr, step, C, 1, row_at, size_out, GROUP, SCALE)[:, None]
        second *= slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, None]
    if GROUP > 64:
        scale = slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, None]
        return total + (first + second) * scale
    else:
        return total + (first + second)


@triton.jit(do_not_specialize=["steps", "last"])
def _row_kernel(
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scale_ptr, zero_ptr, table_ptr, bias_ptr, out_ptr, stream_ptr,
    part_ptr, counter_ptr, size_in, size_out, steps, last, eps,
    BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (0, p, s): the p-th BLOCK_OUT outputs, over the s-th `steps` of the `last` steps of 256
    columns.

    With ACT, `size_out` is that of the result, of twice as many matrix rows. NORM and HAS_RESIDUAL as in
    `octavo.kernels.triton.linear`; with a norm SPLITS is 1.
    """
    tile = tl.program_id(1)
    begin = tl.program_id(2) * steps
    end = tl.minimum(begin + steps, last)
    # Beyond the last output the last one is read again, and not stored: loads without a mask.
    row_at = tl.minimum(tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT), size_out - 1)
    matrix_rows = size_out * 2 if ACT else size_out
    block = tl.cast(matrix_rows, tl.int64) * 32  # elements
    if PREFETCH and OVERLAP:
        if tile * BLOCK_OUT + BLOCK_OUT <= size_out:
            # A tile's codes of a block lie in one piece.
            ahead = tl.minimum(begin * 2 + tl.arange(0, PREFETCH), last * 2 - 1)
            at = (codes_ptr + ahead * block + tile * (BLOCK_OUT * 32)).to(tl.int64)
            prefetch_l2(at, BLOCK_OUT * 64)
            if ACT:
                prefetch_l2(at + tl.cast(size_out, tl.int64) * 64, BLOCK_OUT * 64)
    wait_for_previous(OVERLAP)

    lanes = tl.arange(0, 32)
    line = tl.arange(0, 8)[None, :]
    inside = tl.arange(0, 8)[:, None] * 32 + lanes[None, :]
    codes_at = codes_ptr + row_at[:, None] * 32 + lanes[None, :]
    up_codes_at = codes_at + tl.cast(size_out, tl.int64) * 32
    acc = tl.zeros([BLOCK_OUT, 8], tl.float32)
    up = acc
    squares = tl.zeros([8, 32], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        col = step * 256 + inside
        x = _load(x_ptr, col, size_in, EVEN)
        if HAS_RESIDUAL:
            # Rounded before it is normalized, as unfused layers do; into another tensor, as other programs
            # may still have to read this one.
            x = (x.to(tl.float32) + _load(residual_ptr, col, size_in, EVEN).to(tl.float32)).to(x.dtype)
            tl.store(stream_ptr + col, x, mask=(col < size_in) & (tile == 0))
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * _load(norm_ptr, col, size_in, EVEN).to(tl.float32)).to(x.dtype)
        x = tl.trans(x)
        for c in tl.static_range(2):
            codes = tl.load(codes_at + (step * 2 + c) * block, eviction_policy="evict_first")
            acc = _add_block(
                acc, codes, x, line, scale_ptr, zero_ptr, table_ptr, step, c, row_at, matrix_rows,
                GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
            if ACT:
                codes = tl.load(up_codes_at + (step * 2 + c) * block, eviction_policy="evict_first")
                up = _add_block(
                    up, codes, x, line, scale_ptr, zero_ptr, table_ptr, step, c, row_at + size_out,
                    matrix_rows, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
                )  # fmt: skip
    result = tl.sum(acc, axis=1)[:, None]
    wide = tl.sum(up, axis=1)[:, None]
    if GROUP == 0:
        result *= slab_scale(scale_ptr, 0, 0, 0, row_at, matrix_rows, GROUP, SCALE)[:, None]
        if ACT:
            wide *= slab_scale(scale_ptr, 0, 0, 0, row_at + size_out, matrix_rows, GROUP, SCALE)[:, None]
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / size_in + eps)
        result *= factor
        wide *= factor
    end_tile(
        result, wide, bias_ptr, out_ptr, part_ptr, counter_ptr, 0, size_out, 1,
        1, BLOCK_OUT, SPLITS, True, HAS_BIAS, ACT,
    )  # fmt: skip


_row = Launcher(_row_kernel, overlap=True)


def tiles_row_linear(
    x: torch.Tensor,
    tiles: Tiles,
    bias: torch.Tensor | None,
    act: str | None,
    config: RowConfig,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`octavo.kernels.triton.tiles.tiles_linear` of one row, or of the RMS norm of `x + residual`.

    Args:
        x: `[1, in]`, bfloat16 or float16.
        tiles, bias, act: see there.
        config: without splits where there is a norm.
        norm_weight: `[in]`, of `x`'s dtype or float32; None: there is no norm. What it gives is rounded
            before it is divided by the root mean square, which float16 may not hold.
        eps: added to the mean square.
        residual: `[1, in]`, left as it is; None: `x` is the stream.

    Returns:
        The product, `[1, out]` or `[1, out / 2]`, and the new stream: `x + residual`, or `x`.

    Raises:
        ValueError: several rows, an activation of another name, splits beside a norm.
    """
    rows, size_in = x.shape
    if rows != 1 or act not in ACTS:
        raise ValueError(f"got {rows} rows and act={act!r}: one row, one of {list(ACTS)}")
    if norm_weight is not None and config.splits > 1:
        raise ValueError(f"{config}: beside a norm a program takes all inputs")
    x = x.contiguous()
    matrices = 2 if act else 1
    size_out = tiles.rows // matrices
    out = torch.empty((1, size_out), dtype=x.dtype, device=x.device)
    # Tensors that a variant has no use for are stood in for by others.
    stream = x if residual is None else torch.empty_like(x)
    block_out, stages, warps, splits, prefetch = config
    out_tiles = ceil_div(size_out, block_out)
    last = tiles.codes.shape[0] * BLOCK // STEP
    steps = ceil_div(last, splits)
    splits = ceil_div(last, steps)
    parts, counters = out, out
    if splits > 1:
        parts, counters = workspace(x.device).reserve(out_tiles * splits * matrices * block_out, out_tiles)
    _row(
        (1, out_tiles, splits),
        (
            x,
            x if residual is None else residual.contiguous(),
            x if norm_weight is None else norm_weight,
            *form_tensors(tiles),
            out if bias is None else bias,
            out,
            stream,
            parts,
            counters,
        ),
        (size_in, size_out),
        (steps, last, eps),
        (
            block_out, stages, splits, min(prefetch, power_of_2(2 * steps)), size_in % STEP == 0,
            bias is not None, ACTS[act],
            norm_weight is not None, residual is not None, *form_constants(tiles, x.dtype),
        ),
        warps,
    )  # fmt: skip
    return out, stream
