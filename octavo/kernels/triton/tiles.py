"""Products with 4-bit weights in tiles, bound by reading the weights, and their expansion for many rows.

A program streams BLOCK_OUT rows of codes through shared memory, several steps of 256 columns in flight,
makes 16-bit numbers of them in the registers in which tensor cores take them, and scales the sums of each
group. Everything else is as in `skinny_linear`: it is started early and sends for its first codes before it
waits for the rows, and several programs may share a tile's inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_tiles import BLOCK, SLAB, STEP, Tiles
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.split_sums import end_tile
from octavo.kernels.triton.unpack import by_ptx, table_ptx, unpack_affine, unpack_table
from octavo.kernels.triton.workspace import workspace

MAX_ROWS = 512
ACTS = {None: 0, "silu": 1, "gelu_tanh": 2}
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class TilesConfig(NamedTuple):
    """How `tiles_linear` cuts its matrix.

    Attributes:
        block_out: outputs of a program (gated: columns of the result, of two matrix rows each).
        stages: steps in flight, and the one at work.
        warps: of a program; with 4 and 64 outputs or more by Hopper's own instructions.
        splits: programs that share the inputs of one tile of outputs.
        prefetch: blocks of its codes that a program sends for before it waits for the kernel ahead.
        tile_rows: rows of a program, a power of 2 from 8 on; 0: all.
    """

    block_out: int
    stages: int
    warps: int
    splits: int = 1
    prefetch: int = 0
    tile_rows: int = 0


@triton.jit
def scale_at(scale_ptr, word, which, row_at, size_out, SCALE: tl.constexpr):
    """float32 scales of rows; of 16-bit types the `which`-th of a word."""
    if SCALE == 0:
        return tl.load(scale_ptr + word * size_out + row_at)
    else:
        half = tl.load(scale_ptr + word * size_out + row_at) >> (which * 16)
        if SCALE == 1:
            return (half << 16).to(tl.float32, bitcast=True)
        else:
            return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zero_at(zero_ptr, group, row_at, size_out, HAS_ZEROS: tl.constexpr):
    """int32 zero points of rows."""
    if HAS_ZEROS:
        return tl.load(zero_ptr + group // 8 * size_out + row_at) >> group % 8 * 4 & 15
    else:
        return tl.full(row_at.shape, 8, tl.int32)


@triton.jit
def _group_at(step, C: tl.constexpr, SLAB: tl.constexpr, GROUP: tl.constexpr):
    """The group (of GROUP columns) in which slab SLAB of a step's block C lies."""
    if GROUP == 0:
        return step * 0
    elif GROUP > 128:
        return step // (GROUP // 256)
    else:
        return step * (256 // GROUP) + (C * 128 + SLAB * 32) // GROUP


@triton.jit
def slab_scale(scale_ptr, step, C: tl.constexpr, SLAB: tl.constexpr, row_at, size_out,
                GROUP: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """float32 scales of rows, for a slab's group."""
    if GROUP == 0:
        return scale_at(scale_ptr, 0, 0, row_at, size_out, SCALE)
    elif SCALE == 0:
        return scale_at(scale_ptr, _group_at(step, C, SLAB, GROUP), 0, row_at, size_out, SCALE)
    elif GROUP > 128:
        group = _group_at(step, C, SLAB, GROUP)
        return scale_at(scale_ptr, group // 2, group % 2, row_at, size_out, SCALE)
    else:
        # Written so that two groups of a word are seen to read the same.
        INSIDE: tl.constexpr = (C * 128 + SLAB * 32) // GROUP
        return scale_at(scale_ptr, step * (128 // GROUP) + INSIDE // 2, INSIDE % 2, row_at, size_out, SCALE)


@triton.jit
def unpack_block(codes, table_ptr, zero_ptr, step, C: tl.constexpr, row_at, size_out, GROUP: tl.constexpr,
            HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr, LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
            dtype: tl.constexpr):  # fmt: skip
    """The four slabs of a block."""
    if TABLE:
        w0, w1, w2, w3 = unpack_table(codes, table_ptr, dtype, LOOK_UP)
    else:
        zero = zero_at(zero_ptr, _group_at(step, C, 0, GROUP), row_at, size_out, HAS_ZEROS)
        w0, w1, w2, w3 = unpack_affine(codes, zero, dtype, PACKED)
        if HAS_ZEROS and GROUP == 64:
            zero = zero_at(zero_ptr, _group_at(step, C, 2, GROUP), row_at, size_out, HAS_ZEROS)
            _, _, w2, w3 = unpack_affine(codes, zero, dtype, PACKED)
        elif HAS_ZEROS and GROUP == 32:
            zero = zero_at(zero_ptr, _group_at(step, C, 1, GROUP), row_at, size_out, HAS_ZEROS)
            _, w1, _, _ = unpack_affine(codes, zero, dtype, PACKED)
            zero = zero_at(zero_ptr, _group_at(step, C, 2, GROUP), row_at, size_out, HAS_ZEROS)
            _, _, w2, _ = unpack_affine(codes, zero, dtype, PACKED)
            zero = zero_at(zero_ptr, _group_at(step, C, 3, GROUP), row_at, size_out, HAS_ZEROS)
            _, _, _, w3 = unpack_affine(codes, zero, dtype, PACKED)
    return w0, w1, w2, w3


@triton.jit
def add_block(
    total, codes, x0, x1, x2, x3, scale_ptr, zero_ptr, table_ptr, step, C: tl.constexpr, row_at, size_out,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`total [BLOCK_OUT, rows]` and a block's products with 128 columns of the rows."""
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
        x0.dtype,
    )
    if GROUP == 0:  # the scale comes at the end
        acc = tl.dot(w0, tl.trans(x0), total)
        acc = tl.dot(w1, tl.trans(x1), acc)
        acc = tl.dot(w2, tl.trans(x2), acc)
        return tl.dot(w3, tl.trans(x3), acc)
    elif GROUP > 64 and total.shape[1] <= 16:
        # Two sums at a time: a warp's own products of few rows wait for the ones that they are added to.
        none = tl.zeros([total.shape[0], total.shape[1]], tl.float32)
        acc = tl.dot(w1, tl.trans(x1), tl.dot(w0, tl.trans(x0), none))
        acc += tl.dot(w3, tl.trans(x3), tl.dot(w2, tl.trans(x2), none))
        return total + acc * slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, None]
    else:
        none = tl.zeros([total.shape[0], total.shape[1]], tl.float32)
        acc = tl.dot(w0, tl.trans(x0), none)
        if GROUP == 32:
            total += acc * slab_scale(scale_ptr, step, C, 0, row_at, size_out, GROUP, SCALE)[:, None]
            acc = none
        acc = tl.dot(w1, tl.trans(x1), acc)
        if GROUP <= 64:
            total += acc * slab_scale(scale_ptr, step, C, 1, row_at, size_out, GROUP, SCALE)[:, None]
            acc = none
        acc = tl.dot(w2, tl.trans(x2), acc)
        if GROUP == 32:
            total += acc * slab_scale(scale_ptr, step, C, 2, row_at, size_out, GROUP, SCALE)[:, None]
            acc = none
        acc = tl.dot(w3, tl.trans(x3), acc)
        return total + acc * slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, None]


@triton.jit
def _load_x(x_at, present, col, lanes, size_in, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_at + col, mask=present, other=0.0)
    return tl.load(x_at + col, mask=present & (col + lanes < size_in)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "steps", "last"])
def _tiles_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, table_ptr, bias_ptr, out_ptr, part_ptr, counter_ptr,
    x_row, out_row, size_in, size_out, rows, steps, last,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    TABLE: tl.constexpr, LOOK_UP: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (r, p, s): the p-th BLOCK_OUT outputs of the r-th BLOCK_ROWS rows, over the s-th `steps` of the
    `last` steps of 256 columns. With ACT, `size_out` is that of the result, of twice as many matrix rows.
    """
    tile = tl.program_id(1)
    begin = tl.program_id(2) * steps
    end = tl.minimum(begin + steps, last)
    out_at = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Beyond the last output the last one is read again, and not stored: loads without a mask.
    row_at = tl.minimum(out_at, size_out - 1)
    matrix_rows = size_out * 2 if ACT else size_out
    block = tl.cast(matrix_rows, tl.int64) * 32  # elements
    if PREFETCH and OVERLAP:
        if (tile * BLOCK_OUT + BLOCK_OUT <= size_out) & (tl.program_id(0) == 0):
            # A tile's codes of a block lie in one piece.
            ahead = tl.minimum(begin * 2 + tl.arange(0, PREFETCH), last * 2 - 1)
            at = (codes_ptr + ahead * block + tile * (BLOCK_OUT * 32)).to(tl.int64)
            prefetch_l2(at, BLOCK_OUT * 64)
            if ACT:
                prefetch_l2(at + tl.cast(size_out, tl.int64) * 64, BLOCK_OUT * 64)
    wait_for_previous(OVERLAP)

    lanes = tl.arange(0, 32)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    present = (row < rows)[:, None]
    x_at = x_ptr + row[:, None] * x_row + lanes[None, :]
    codes_at = codes_ptr + row_at[:, None] * 32 + lanes[None, :]
    up_codes_at = codes_at + tl.cast(size_out, tl.int64) * 32
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = acc
    for step in tl.range(begin, end, num_stages=STAGES):
        for c in tl.static_range(2):
            col = step * 256 + c * 128
            x0 = _load_x(x_at, present, col, lanes, size_in, EVEN)
            x1 = _load_x(x_at, present, col + 32, lanes, size_in, EVEN)
            x2 = _load_x(x_at, present, col + 64, lanes, size_in, EVEN)
            x3 = _load_x(x_at, present, col + 96, lanes, size_in, EVEN)
            codes = tl.load(codes_at + (step * 2 + c) * block, eviction_policy="evict_first")
            acc = add_block(
                acc, codes, x0, x1, x2, x3, scale_ptr, zero_ptr, table_ptr, step, c, row_at, matrix_rows,
                GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
            if ACT:
                codes = tl.load(up_codes_at + (step * 2 + c) * block, eviction_policy="evict_first")
                up = add_block(
                    up, codes, x0, x1, x2, x3, scale_ptr, zero_ptr, table_ptr, step, c, row_at + size_out,
                    matrix_rows, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
                )  # fmt: skip
    if GROUP == 0:
        acc *= slab_scale(scale_ptr, 0, 0, 0, row_at, matrix_rows, GROUP, SCALE)[:, None]
        if ACT:
            up *= slab_scale(scale_ptr, 0, 0, 0, row_at + size_out, matrix_rows, GROUP, SCALE)[:, None]
    end_tile(
        acc, up, bias_ptr, out_ptr, part_ptr, counter_ptr, out_row, size_out, rows,
        BLOCK_ROWS, BLOCK_OUT, SPLITS, True, HAS_BIAS, ACT,
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    codes_ptr, scale_ptr, zero_ptr, table_ptr, out_ptr, out_row, size_in, size_out,
    BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    TABLE: tl.constexpr, LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (p, s): BLOCK_OUT rows of the matrix, the s-th 256 columns."""
    step = tl.program_id(1)
    out_at = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    live = (out_at < size_out)[:, None]
    row_at = tl.minimum(out_at, size_out - 1)
    lanes = tl.arange(0, 32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers: tl.constexpr = dtype if dtype == tl.bfloat16 else tl.float16  # integers up to 15 are exact
    for c in tl.static_range(2):
        at = codes_ptr + ((step * 2 + c).to(tl.int64) * size_out + row_at)[:, None] * 32 + lanes[None, :]
        codes = tl.load(at, eviction_policy="evict_first")
        w = unpack_block(
            codes, table_ptr, zero_ptr, step, c, row_at, size_out, GROUP, HAS_ZEROS, TABLE,
            LOOK_UP, PACKED, tl.float32 if TABLE and LOOK_UP is None else numbers,
        )  # fmt: skip
        for slab in tl.static_range(4):
            scale = slab_scale(scale_ptr, step, c, slab, row_at, size_out, GROUP, SCALE)
            col = step * 256 + c * 128 + slab * 32 + lanes
            wide = w[slab].to(tl.float32) * scale[:, None]
            target = out_ptr + out_at.to(tl.int64)[:, None] * out_row + col[None, :]
            tl.store(target, wide.to(dtype), mask=live & (col < size_in)[None, :])


_tiles = Launcher(_tiles_kernel, overlap=True)
_expand = Launcher(_expand_kernel)


def _look_up(tiles: Tiles, dtype: torch.dtype) -> str | None:
    if tiles.values is None or not by_ptx() or dtype == torch.float32:
        return None
    return table_ptx(tiles.values, dtype == torch.bfloat16)


def form_tensors(tiles: Tiles) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zeros, table; one that a variant has no use for is stood in for by the codes."""
    codes = tiles.codes
    return (
        codes,
        tiles.scales,
        codes if tiles.zeros is None else tiles.zeros,
        codes if tiles.table is None else tiles.table,
    )


def form_constants(tiles: Tiles, dtype: torch.dtype) -> tuple[Any, ...]:
    """What kernels must know of a form beside rows of `dtype`: GROUP to PACKED."""
    return (
        tiles.group,
        _SCALES[tiles.scale_type],
        tiles.zeros is not None,
        tiles.table is not None,
        _look_up(tiles, dtype),
        by_ptx(),
    )


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None, act: str | None, config: TilesConfig
) -> torch.Tensor:
    """`octavo.kernels.reference_tiles.tiles_linear` for few rows.

    Args:
        x: `[rows, in]`, bfloat16 or float16, at most `MAX_ROWS` rows.
        tiles: of a matrix `[out, in]`. A table's numbers are rounded to `x`'s dtype.
        bias: `[out]` or None.
        act: None; or "silu" or "gelu_tanh", as in `skinny_linear`.
        config: see there.

    Returns:
        `[rows, out]` of `x`'s dtype, `[rows, out / 2]` with `act`.

    Raises:
        ValueError: more rows than `MAX_ROWS`, an activation of another name.
    """
    rows, size_in = x.shape
    if rows > MAX_ROWS or act not in ACTS:
        raise ValueError(f"got {rows} rows and act={act!r}: at most {MAX_ROWS}, one of {list(ACTS)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    matrices = 2 if act else 1
    size_out = tiles.rows // matrices
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block_out, stages, warps, splits, prefetch, block_rows = config
    block_rows = block_rows or max(8, power_of_2(rows))
    row_tiles, out_tiles = ceil_div(rows, block_rows), ceil_div(size_out, block_out)
    last = tiles.codes.shape[0] * BLOCK // STEP
    steps = ceil_div(last, splits)
    splits = ceil_div(last, steps)
    parts, counters = out, out
    if splits > 1:
        places = out_tiles * row_tiles
        parts, counters = workspace(x.device).reserve(
            places * splits * matrices * block_out * block_rows, places
        )
    even = size_in % STEP == 0
    _tiles(
        (row_tiles, out_tiles, splits),
        (x, *form_tensors(tiles), out if bias is None else bias, out, parts, counters),
        (x.stride(0), size_out, size_in, size_out),
        (rows, steps, last),
        (
            block_rows, block_out, stages, splits, min(prefetch, power_of_2(2 * steps)),
            *form_constants(tiles, x.dtype), even, bias is not None, ACTS[act],
        ),
        warps,
    )  # fmt: skip
    return out


def expand_tiles(tiles: Tiles, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in full: `[out, columns]` of `dtype` (bfloat16, float16 or float32), each weight rounded
    once; those of a table before the scale, too, if `dtype` has 16 bits."""
    rows = tiles.rows
    out = torch.empty((rows, columns), dtype=dtype, device=tiles.codes.device)
    block_out = 64
    _expand(
        (ceil_div(rows, block_out), ceil_div(columns, STEP), 1),
        (*form_tensors(tiles), out),
        (columns, columns, rows),
        (),
        (block_out, *form_constants(tiles, dtype)),
        4,
    )
    return out


assert SLAB * 4 == BLOCK and BLOCK * 2 == STEP  # as the kernels' constants have it
