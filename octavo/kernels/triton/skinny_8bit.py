"""Products of rows and weights of 8 bits on the tensor cores: codes are multiplied, scales come after.

As `skinny_linear`, which explains the cut: made for few rows, where reading the weights is the work, and for
any number of rows with larger tiles. FP8's sums leave the tensor cores, which keep 14 bits of them, after
every step of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_lowbit import FP8_BLOCK
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.rows_8bit import Rows8
from octavo.kernels.triton.skinny_linear import SkinnyConfig, prefetch_size
from octavo.kernels.triton.split_sums import end_tile
from octavo.kernels.triton.workspace import workspace


@triton.jit
def _multiply(weights, x, acc, WEIGHTS_FIRST: tl.constexpr):
    """`acc` and the product of codes: `[outputs, rows]` or `[rows, outputs]`, float32 or (int8's) int32."""
    if x.dtype == tl.int8:
        if WEIGHTS_FIRST:
            return tl.dot(weights, tl.trans(x), acc, out_dtype=tl.int32)
        else:
            return tl.dot(x, tl.trans(weights), acc, out_dtype=tl.int32)
    else:
        if WEIGHTS_FIRST:
            return tl.dot(weights, tl.trans(x), acc, max_num_imprecise_acc=x.shape[1])
        else:
            return tl.dot(x, tl.trans(weights), acc, max_num_imprecise_acc=x.shape[1])


@triton.jit
def _scaled(acc, of_rows, of_outputs, WEIGHTS_FIRST: tl.constexpr):
    """Sums times the scales of their rows and outputs (or one of all outputs)."""
    if WEIGHTS_FIRST:
        return acc.to(tl.float32) * of_rows[None, :] * of_outputs
    else:
        return acc.to(tl.float32) * of_rows[:, None] * of_outputs


@triton.jit(do_not_specialize=["rows", "steps", "prefetch"])
def _skinny_8bit_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, counter_ptr,
    weight_row, size_in, size_out, rows, steps, prefetch,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, PIECES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (r, p, s): the p-th BLOCK_OUT outputs of the r-th BLOCK_ROWS rows, over the s-th `steps` times
    BLOCK_IN inputs; EVEN, `prefetch` and PIECES as in `skinny_linear`.

    GROUP: 0, or the side of the blocks that have a scale; then BLOCK_IN is that, and a multiple of BLOCK_OUT.
    """
    ZERO: tl.constexpr = 0 if weight_ptr.dtype.element_ty == tl.int8 else 0.0
    IS_INT: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    tile = tl.program_id(1)
    begin = tl.program_id(2) * steps * BLOCK_IN
    end = tl.minimum(begin + steps * BLOCK_IN, size_in)
    out_at = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Beyond the last output and the last row these are read again, and not stored: loads without a mask.
    weight_at = weight_ptr + tl.minimum(out_at, size_out - 1).to(tl.int64) * weight_row
    if OVERLAP:
        if (prefetch > 0) & (tl.program_id(0) == 0):
            lane = tl.arange(0, BLOCK_OUT * PIECES)
            first = tl.minimum(tile * BLOCK_OUT + lane % BLOCK_OUT, size_out - 1).to(tl.int64) * weight_row
            at = (weight_ptr + first + begin).to(tl.int64) + lane // BLOCK_OUT * prefetch
            prefetch_l2(at, prefetch)
    wait_for_previous(OVERLAP)

    lanes = tl.arange(0, BLOCK_IN)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_at = tl.minimum(row, rows - 1).to(tl.int64)
    x_at = x_ptr + row_at[:, None] * size_in + lanes[None, :]
    weight_at = weight_at[:, None] + lanes[None, :]
    SHAPE_0: tl.constexpr = BLOCK_OUT if WEIGHTS_FIRST else BLOCK_ROWS
    SHAPE_1: tl.constexpr = BLOCK_ROWS if WEIGHTS_FIRST else BLOCK_OUT
    acc = tl.zeros([SHAPE_0, SHAPE_1], tl.int32 if IS_INT else tl.float32)
    if GROUP:
        groups = tl.cdiv(size_in, GROUP)
        x_scale_at = x_scale_ptr + row_at * groups
        scale_at = scale_ptr + (tile * BLOCK_OUT // GROUP).to(tl.int64) * groups
    for start in tl.range(begin, end, BLOCK_IN, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + start)
            w = tl.load(weight_at + start, eviction_policy="evict_first")
        else:
            inside = (start + lanes < end)[None, :]
            x = tl.load(x_at + start, mask=inside, other=ZERO)
            w = tl.load(weight_at + start, mask=inside, other=ZERO, eviction_policy="evict_first")
        if GROUP:
            of_rows = tl.load(x_scale_at + start // GROUP)
            of_outputs = tl.load(scale_at + start // GROUP)
            part = _multiply(w, x, tl.zeros([SHAPE_0, SHAPE_1], tl.float32), WEIGHTS_FIRST)
            acc += _scaled(part, of_rows, of_outputs, WEIGHTS_FIRST)
        else:
            acc = _multiply(w, x, acc, WEIGHTS_FIRST)

    if not GROUP:
        scale = tl.load(scale_ptr + tl.minimum(out_at, size_out - 1))
        scale = scale[:, None] if WEIGHTS_FIRST else scale[None, :]
        acc = _scaled(acc, tl.load(x_scale_ptr + row_at), scale, WEIGHTS_FIRST)
    end_tile(
        acc, acc, bias_ptr, out_ptr, part_ptr, counter_ptr, size_out, size_out, rows,
        BLOCK_ROWS, BLOCK_OUT, SPLITS, WEIGHTS_FIRST, HAS_BIAS, 0,
    )  # fmt: skip


_skinny_8bit = Launcher(_skinny_8bit_kernel, overlap=True)


def skinny_8bit(
    rows: Rows8,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: SkinnyConfig,
) -> torch.Tensor:
    """`rows @ weight.T`, scaled, with a bias.

    Args:
        rows: `[M, in]`; grouped scales where the weight's are of blocks.
        weight: float8_e4m3fn or int8 `[out, in]`, as the rows' codes, contiguous in the last dimension.
        scale: float32 `[out]`, or `[ceil(out / 128), ceil(in / 128)]` of blocks.
        bias: `[out]` or None.
        dtype: of the result.
        config: of blocks, `block_in` is 128, and `block_out` 128 or a part of it.

    Returns:
        `[M, out]`.

    Raises:
        ValueError: a cut that parts blocks.
    """
    count, size_in = rows.codes.shape
    size_out = weight.shape[0]
    out = torch.empty((count, size_out), dtype=dtype, device=weight.device)
    if not count:
        return out
    block_out, block_in, stages, warps, splits, kib, weights_first, block_rows = config
    grouped = scale.dim() == 2
    if grouped and (block_in != FP8_BLOCK or FP8_BLOCK % block_out):
        raise ValueError(f"{config}: blocks of {FP8_BLOCK} x {FP8_BLOCK} would be parted")
    block_rows = block_rows or max(16, power_of_2(count))
    row_tiles = ceil_div(count, block_rows)
    tiles = ceil_div(size_out, block_out)
    steps = ceil_div(ceil_div(size_in, block_in), splits)
    splits = ceil_div(size_in, steps * block_in)
    parts, counters = out, out
    if splits > 1:
        places = tiles * row_tiles
        parts, counters = workspace(out.device).reserve(places * splits * block_out * block_rows, places)
    pieces = max(1, 32 * warps // block_out)
    _skinny_8bit(
        (row_tiles, tiles, splits),
        (*rows, weight, scale, out if bias is None else bias, out, parts, counters),
        (weight.stride(0), size_in, size_out),
        (count, steps, prefetch_size(weight, block_out, steps * block_in, kib, pieces)),
        (
            block_rows, block_out, block_in, stages, splits, pieces, weights_first, size_in % block_in == 0,
            bias is not None, FP8_BLOCK if grouped else 0,
        ),
        warps,
    )  # fmt: skip
    return out
