"""The end of a program that multiplied a tile: sums of programs that share its inputs, bias, activation."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.activation import gated


@triton.jit
def add_parts(part_ptr, stride, mask, SPLITS: tl.constexpr):
    # Written by other multiprocessors: read past the L1 (".cg").
    total = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + split * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(acc, bias_ptr, out_at, live, HAS_BIAS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
            dtype: tl.constexpr):  # fmt: skip
    """`[rows, outputs]` with the bias, rounded."""
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + out_at, mask=live, other=0.0).to(tl.float32)[None, :]
    return acc.to(dtype)


@triton.jit
def end_tile(
    acc, up, bias_ptr, out_ptr, part_ptr, counter_ptr, out_row, size_out, rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Ends program (r, p, s), whose sums are `acc` (with ACT the gate's, and `up`), if WEIGHTS_FIRST
    `[BLOCK_OUT, BLOCK_ROWS]`, else transposed: the p-th outputs of the r-th rows, over the s-th of SPLITS
    parts of the inputs. The last of these to come adds them in a fixed order.

    With ACT (1: SiLU, 2: GELU's tanh form), `size_out` is that of the result, and the bias has twice as many.
    Sums of split programs: float32 `[tiles, SPLITS, 2 with ACT, BLOCK_OUT * BLOCK_ROWS]`.
    """
    tile = tl.program_id(1)
    outputs = tl.arange(0, BLOCK_OUT)
    out_at = tile * BLOCK_OUT + outputs
    live = out_at < size_out
    row_in_tile = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0) * BLOCK_ROWS + row_in_tile
    present = row < rows
    if SPLITS > 1:
        if WEIGHTS_FIRST:
            at = outputs[:, None] * BLOCK_ROWS + row_in_tile[None, :]
            mask = live[:, None] & present[None, :]
        else:
            at = row_in_tile[:, None] * BLOCK_OUT + outputs[None, :]
            mask = present[:, None] & live[None, :]
        TILE: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
        STRIDE: tl.constexpr = TILE * (2 if ACT else 1)
        place = tile * tl.num_programs(0) + tl.program_id(0)
        parts = part_ptr + place.to(tl.int64) * (SPLITS * STRIDE) + at
        mine = parts + tl.program_id(2) * STRIDE
        tl.store(mine, acc, mask=mask)
        if ACT:
            tl.store(mine + TILE, up, mask=mask)
        # All threads' stores come before the release by the one that counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + place, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        tl.store(counter_ptr + place, 0)
        acc = add_parts(parts, STRIDE, mask, SPLITS)
        if ACT:
            up = add_parts(parts + TILE, STRIDE, mask, SPLITS)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    result = _finish(acc, bias_ptr, out_at, live, HAS_BIAS, WEIGHTS_FIRST, dtype)
    if ACT:
        wide = _finish(up, bias_ptr + size_out, out_at, live, HAS_BIAS, WEIGHTS_FIRST, dtype)
        result = gated(result, wide, ACT == 2)
    target = out_ptr + row.to(tl.int64)[:, None] * out_row + out_at[None, :]
    tl.store(target, result, mask=present[:, None] & live[None, :])
