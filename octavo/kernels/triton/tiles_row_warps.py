"""The product of one row with 4-bit weights in tiles, whose inputs a program's warps share.

As `tiles_row`, for a row by itself and without an activation: where a matrix has few outputs, whose inputs
several programs would have to share there. A program takes all inputs of few outputs: its warps multiply a
step of 256 columns each, and add their sums in shared memory at the end, which no other program has to wait
for. Where registers hold all that a program multiplies, it is loaded before the kernel ahead has ended.

Tensor cores multiply at least 8 rows at a time. Here these are the 8 slabs of 32 columns of a step of the
row. A slab of codes meets all of them, and of the products the line of its own slab is kept; the lines are
added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_tiles import BLOCK, STEP, Tiles
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.tiles import form_constants, form_tensors, scale_at, zero_at
from octavo.kernels.triton.unpack import unpack_affine, unpack_and_128, unpack_table

# Words of codes that registers hold, of a thread.
_RESIDENT_WORDS = 16


class WarpsConfig(NamedTuple):
    """How the matrix is cut.

    Attributes:
        outputs: that a program multiplies, a power of 2 from 16 on.
        warps: of a program, each with a step of its own.
        stages: rounds of its warps in flight, and the one at work. 0: all codes go to registers before the
            kernel ahead has ended.
        prefetch: blocks of 128 columns of its first codes that a program sends for by then; with `stages`.
    """

    outputs: int
    warps: int
    stages: int = 0
    prefetch: int = 0

    def chunks(self, size_in: int) -> int:
        """Steps of a round."""
        return self.warps if self.stages else power_of_2(ceil_div(size_in, STEP))

    def serves(self, size_in: int) -> bool:
        """Whether registers hold what they should."""
        return self.stages > 0 or self.outputs * self.chunks(size_in) <= _RESIDENT_WORDS * self.warps


@triton.jit
def _outputs(tile, size_out, OUTPUTS: tl.constexpr):
    """`[1, 2 * OUTPUTS]`: the outputs of a tile, for its first and its second blocks. Beyond the last one it
    is read again, and not stored: loads without a mask."""
    output = tl.arange(0, 2 * OUTPUTS) % OUTPUTS
    return tl.minimum(tile * OUTPUTS + output, size_out - 1)[None, :]


@triton.jit
def _send_ahead(codes_ptr, tile, size_out, last, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
                PREFETCH: tl.constexpr):  # fmt: skip
    """Sends for the first PREFETCH blocks of a tile's codes; those of a block lie in one piece."""
    if tile * OUTPUTS + OUTPUTS <= size_out:
        lane = tl.arange(0, max(PREFETCH, LANES))
        size = tl.where((lane < PREFETCH) & (lane < last * 2), OUTPUTS * 64, 0)
        prefetch_l2((codes_ptr + (lane.to(tl.int64) * size_out + tile * OUTPUTS) * 32).to(tl.int64), size)


@triton.jit
def _load_row(x_ptr, round, size_in, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """A round's part of the row, `[CHUNKS, 32, 8]`."""
    step = round * CHUNKS + tl.arange(0, CHUNKS)
    inside = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    col = step[:, None, None] * 256 + inside[None, :, :]
    if EVEN:
        x = tl.load(x_ptr + col)
    else:
        x = tl.load(x_ptr + col, mask=col < size_in, other=0.0)
    return tl.permute(x, (0, 2, 1))


@triton.jit
def _blocks(round, CHUNKS: tl.constexpr, OUTPUTS: tl.constexpr):
    """`[CHUNKS, 2 * OUTPUTS]`: the blocks of 128 columns of a round's steps, the first ones of all outputs,
    then the second ones."""
    step = round * CHUNKS + tl.arange(0, CHUNKS)
    return step[:, None] * 2 + (tl.arange(0, 2 * OUTPUTS) // OUTPUTS)[None, :]


@triton.jit
def _load_codes(codes_ptr, block, row_at, size_out, last, EVEN: tl.constexpr):
    """`[CHUNKS, 2 * OUTPUTS, 32]`; 0 beyond the last step, where the row is 0, too."""
    at = (block.to(tl.int64) * size_out + row_at)[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    if EVEN:
        return tl.load(codes_ptr + at, eviction_policy="evict_first")
    else:
        inside = (block < last * 2)[:, :, None]
        return tl.load(codes_ptr + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _group(block, SLAB: tl.constexpr, GROUP: tl.constexpr):
    """The groups in which a slab of blocks lies."""
    if GROUP == 0:
        return block * 0
    elif GROUP > 64:
        return block // (GROUP // 128)
    else:
        return block * (128 // GROUP) + SLAB * 32 // GROUP


@triton.jit
def _load_scale(scale_ptr, block, SLAB: tl.constexpr, row_at, size_out, last, GROUP: tl.constexpr,
                SCALE: tl.constexpr):  # fmt: skip
    """float32 scales of a slab of blocks; beyond the last step those of the last one."""
    group = _group(tl.minimum(block, last * 2 - 1), SLAB, GROUP)
    if SCALE == 0:
        return scale_at(scale_ptr, group, 0, row_at, size_out, SCALE)
    else:
        return scale_at(scale_ptr, group // 2, group % 2, row_at, size_out, SCALE)


@triton.jit
def _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """The scales of blocks whose slabs share one."""
    if GROUP > 64:
        return _load_scale(scale_ptr, block, 0, row_at, size_out, last, GROUP, SCALE)
    else:
        return tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def _load_zero(zero_ptr, block, SLAB: tl.constexpr, row_at, size_out, last, GROUP: tl.constexpr,
               HAS_ZEROS: tl.constexpr):  # fmt: skip
    if HAS_ZEROS:
        group = _group(tl.minimum(block, last * 2 - 1), SLAB, GROUP)
        return zero_at(zero_ptr, group, row_at, size_out, HAS_ZEROS)
    else:
        return tl.full([1, 1], 8, tl.int32)


@triton.jit
def _add_round(
    total, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    TABLE: tl.constexpr, LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`total [CHUNKS, 2 * OUTPUTS, 8]` and the products of a round's blocks with the row `[CHUNKS, 32, 8]`,
    in the lines of their slabs; the others are of no use, and may hold anything."""
    none = tl.zeros([total.shape[0], total.shape[1], 8], tl.float32)
    if TABLE:
        w0, w1, w2, w3 = unpack_table(codes, table_ptr, x.dtype, LOOK_UP)
    elif not HAS_ZEROS and (x.dtype == tl.bfloat16 or not PACKED):
        # Symmetric codes are multiplied 136 too high, by sums that begin as much below.
        none = tl.dot(tl.full([total.shape[0], total.shape[1], 32], -136.0, x.dtype), x, none)
        w0, w1, w2, w3 = unpack_and_128(codes, x.dtype, PACKED)
    else:
        zero = _load_zero(zero_ptr, block, 0, row_at, size_out, last, GROUP, HAS_ZEROS)
        w0, w1, w2, w3 = unpack_affine(codes, zero, x.dtype, PACKED)
        if HAS_ZEROS and GROUP == 32:
            zero = _load_zero(zero_ptr, block, 1, row_at, size_out, last, GROUP, HAS_ZEROS)
            _, w1, _, _ = unpack_affine(codes, zero, x.dtype, PACKED)
        if HAS_ZEROS and (GROUP == 32 or GROUP == 64):
            zero = _load_zero(zero_ptr, block, 2, row_at, size_out, last, GROUP, HAS_ZEROS)
            _, _, w2, w3 = unpack_affine(codes, zero, x.dtype, PACKED)
        if HAS_ZEROS and GROUP == 32:
            zero = _load_zero(zero_ptr, block, 3, row_at, size_out, last, GROUP, HAS_ZEROS)
            _, _, _, w3 = unpack_affine(codes, zero, x.dtype, PACKED)
    p0 = tl.dot(w0, x, none)
    p1 = tl.dot(w1, x, none)
    p2 = tl.dot(w2, x, none)
    p3 = tl.dot(w3, x, none)
    if GROUP == 32:
        p0 *= _load_scale(scale_ptr, block, 0, row_at, size_out, last, GROUP, SCALE)[:, :, None]
        p1 *= _load_scale(scale_ptr, block, 1, row_at, size_out, last, GROUP, SCALE)[:, :, None]
        p2 *= _load_scale(scale_ptr, block, 2, row_at, size_out, last, GROUP, SCALE)[:, :, None]
        p3 *= _load_scale(scale_ptr, block, 3, row_at, size_out, last, GROUP, SCALE)[:, :, None]
    slab = _slabs(OUTPUTS)
    first = tl.where(slab == 0, p0, p1)
    second = tl.where(slab == 2, p2, p3)
    if GROUP == 64:
        first *= _load_scale(scale_ptr, block, 0, row_at, size_out, last, GROUP, SCALE)[:, :, None]
        second *= _load_scale(scale_ptr, block, 2, row_at, size_out, last, GROUP, SCALE)[:, :, None]
    products = tl.where(slab < 2, first, second)
    if GROUP > 64:
        products *= scale[:, :, None]
    return total + products


@triton.jit
def _slabs(OUTPUTS: tl.constexpr):
    """`[1, 2 * OUTPUTS, 8]`: the slab of a block that a line holds, if it is one of 0 to 3."""
    return tl.arange(0, 8)[None, None, :] - (tl.arange(0, 2 * OUTPUTS) // OUTPUTS * 4)[None, :, None]


@triton.jit
def _store(
    total, scale_ptr, bias_ptr, out_ptr, tile, size_out,
    OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Ends a tile by its sums, `[CHUNKS, 2 * OUTPUTS, 8]`."""
    slab = _slabs(OUTPUTS)
    own = tl.where((slab >= 0) & (slab < 4), total, 0.0)
    of_blocks = tl.sum(tl.sum(own, axis=2), axis=0)
    result = tl.sum(tl.reshape(of_blocks, [2, OUTPUTS]), axis=0)
    col = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(col, size_out - 1)
    if GROUP == 0:
        result *= scale_at(scale_ptr, 0, 0, row, size_out, SCALE)
    if HAS_BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(out_ptr + col, result.to(out_ptr.dtype.element_ty), mask=col < size_out)


@triton.jit(do_not_specialize=["last"])
def _row_warps_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, table_ptr, bias_ptr, out_ptr, size_in, size_out, last,
    OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: the p-th OUTPUTS outputs, over all `last` steps of 256 columns, CHUNKS of them in a round.

    STAGES 0: there is one round. LANES: threads of a program.
    """
    tile = tl.program_id(0)
    row_at = _outputs(tile, size_out, OUTPUTS)
    none = tl.zeros([CHUNKS, 2 * OUTPUTS, 8], tl.float32)
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    if STAGES == 0:
        block = _blocks(0, CHUNKS, OUTPUTS)
        scale = _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP, SCALE)
        codes = _load_codes(codes_ptr, block, row_at, size_out, last, EVEN)
        wait_for_previous(OVERLAP)
        x = _load_row(x_ptr, 0, size_in, CHUNKS, EVEN)
        total = _add_round(
            none, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
            OUTPUTS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
        )  # fmt: skip
    else:
        if PREFETCH and OVERLAP:
            _send_ahead(codes_ptr, tile, size_out, last, OUTPUTS, LANES, PREFETCH)
        wait_for_previous(OVERLAP)
        total = none
        for round in tl.range(0, tl.cdiv(last, CHUNKS), num_stages=STAGES):
            block = _blocks(round, CHUNKS, OUTPUTS)
            scale = _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP, SCALE)
            codes = _load_codes(codes_ptr, block, row_at, size_out, last, EVEN)
            x = _load_row(x_ptr, round, size_in, CHUNKS, EVEN)
            total = _add_round(
                total, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
                OUTPUTS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
    _store(total, scale_ptr, bias_ptr, out_ptr, tile, size_out, OUTPUTS, HAS_BIAS, GROUP, SCALE)


_row = Launcher(_row_warps_kernel, overlap=True)


def tiles_row_warps_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None, config: WarpsConfig
) -> torch.Tensor:
    """`octavo.kernels.triton.tiles.tiles_linear` of one row, without an activation.

    Args:
        x: `[1, in]`, bfloat16 or float16.
        tiles, bias: see there.
        config: how the matrix is cut.

    Returns:
        The product, `[1, out]`.

    Raises:
        ValueError: several rows, a cut that does not serve so many inputs.
    """
    rows, size_in = x.shape
    if rows != 1 or not config.serves(size_in):
        raise ValueError(f"got {rows} rows of {size_in} inputs: {config} serves one row, of fewer inputs")
    outputs, warps, stages, prefetch = config
    last = tiles.codes.shape[0] * BLOCK // STEP
    chunks = config.chunks(size_in)
    out = torch.empty((1, tiles.rows), dtype=x.dtype, device=x.device)
    _row(
        (ceil_div(tiles.rows, outputs), 1, 1),
        # A tensor that a variant has no use for is stood in for by another.
        (x.contiguous(), *form_tensors(tiles), out if bias is None else bias, out),
        (size_in, tiles.rows),
        (last,),
        (
            outputs, chunks, 32 * warps, stages, min(prefetch, power_of_2(2 * last)),
            size_in % (STEP * chunks) == 0, bias is not None, *form_constants(tiles, x.dtype),
        ),
        warps,
    )  # fmt: skip
    return out
