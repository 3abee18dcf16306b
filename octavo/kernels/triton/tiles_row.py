"""The product of one row with 4-bit weights in tiles, whose inputs a program's warps share.

Reading the weights once is all the work; what else takes time is what comes after the row is there. So a
program takes all inputs of few outputs: its warps multiply a step of 256 columns each, and add their sums in
shared memory at the end, which no other program has to wait for. Where registers hold all that a program
multiplies, it is loaded before the kernel ahead has ended.

Tensor cores multiply at least 8 rows at a time. Here these are the 8 slabs of 32 columns of a step of the
row. A slab of codes meets all of them, and of the products the line of its own slab is kept; the lines are
added at the end. The residual addition and RMS norm before the product can be part of it, the gated
activation after it, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_tiles import BLOCK, STEP, Tiles
from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.tiles import ACTS, form_constants, form_tensors, scale_at, zero_at
from octavo.kernels.triton.unpack import unpack_affine, unpack_and_128, unpack_table


class RowConfig(NamedTuple):
    """How the matrix is cut.

    Attributes:
        outputs: rows of the matrix that a program multiplies at a time (of a gated one, half of them of each
            half), a power of 2 from 16 on.
        warps: of a program, each with a step of its own.
        tiles: how many times `outputs` a program multiplies, with the row in registers.
        stages: tiles (or, where `tiles` is 1, rounds of steps) in flight, and the one at work. 0: the one
            tile's weights go to registers before the kernel ahead has ended.
        prefetch: blocks of 128 columns of its first codes that a program sends for by then; with `stages`.
    """

    outputs: int
    warps: int
    tiles: int = 1
    stages: int = 0
    prefetch: int = 0

    @property
    def resident(self) -> bool:
        """Whether registers hold the row."""
        return self.stages == 0 or self.tiles > 1

    def chunks(self, size_in: int) -> int:
        """Steps of a round."""
        return power_of_2(ceil_div(size_in, STEP)) if self.resident else self.warps

    def serves(self, size_in: int) -> bool:
        """Whether registers hold what they should: 64 words of codes a thread."""
        if self.stages == 0 and self.tiles > 1:
            return False
        return not self.resident or self.outputs * self.chunks(size_in) <= 64 * self.warps


@triton.jit
def _load(ptr, col, size_in, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < size_in, other=0.0)


@triton.jit
def _matrix_rows(tile, size_out, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The rows of the matrix that are a tile's: of a gated one, those of the two halves by turns. Beyond the
    last output it is read again, and not stored: loads without a mask."""
    index = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), size_out - 1)
    if GATED:
        index = index // 2 + index % 2 * (size_out // 2)
    return index


@triton.jit
def _rows_of_blocks(tile, size_out, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """`[1, 2 * OUTPUTS]`: the same, for first and second blocks."""
    output = tl.arange(0, 2 * OUTPUTS) % OUTPUTS
    index = tl.minimum(tile * OUTPUTS + output, size_out - 1)
    if GATED:
        index = index // 2 + index % 2 * (size_out // 2)
    return index[None, :]


@triton.jit
def _send_ahead(codes_ptr, tile, size_out, last, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
                GATED: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """Sends for the first PREFETCH blocks of a tile's codes."""
    if tile * OUTPUTS + OUTPUTS <= size_out:
        # A tile's codes of a block lie in one piece, those of a gated matrix in two.
        PIECE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
        lane = tl.arange(0, max(PREFETCH, LANES))
        size = tl.where((lane < PREFETCH) & (lane < last * 2), PIECE * 64, 0)
        at = (codes_ptr + (lane.to(tl.int64) * size_out + tile * PIECE) * 32).to(tl.int64)
        prefetch_l2(at, size)
        if GATED:
            prefetch_l2(at + tl.cast(size_out // 2, tl.int64) * 64, size)


@triton.jit
def _load_row(x_ptr, residual_ptr, stream_ptr, factor, squares, round, size_in, CHUNKS: tl.constexpr,
              EVEN: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """A round's part of the row, `[CHUNKS, 32, 8]`, and `squares` with its squares."""
    col = _columns(round, CHUNKS)
    x = _load(x_ptr, col, size_in, EVEN)
    if HAS_RESIDUAL:
        # Rounded before it is normalized, as unfused layers do; into another tensor, as other programs may
        # still have to read this one.
        x = (x.to(tl.float32) + _load(residual_ptr, col, size_in, EVEN).to(tl.float32)).to(x.dtype)
        tl.store(stream_ptr + col, x, mask=(col < size_in) & (tl.program_id(0) == 0))
    if NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        x = (wide * factor.to(tl.float32)).to(x.dtype)
    return tl.permute(x, (0, 2, 1)), squares


@triton.jit
def _columns(round, CHUNKS: tl.constexpr):
    """`[CHUNKS, 8, 32]`: the columns of a round's steps."""
    step = round * CHUNKS + tl.arange(0, CHUNKS)
    inside = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return step[:, None, None] * 256 + inside[None, :, :]


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
    total, squares, scale_ptr, bias_ptr, out_ptr, tile, size_in, size_out, eps,
    OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Ends a tile by its sums, `[CHUNKS, 2 * OUTPUTS, 8]`."""
    slab = _slabs(OUTPUTS)
    own = tl.where((slab >= 0) & (slab < 4), total, 0.0)
    of_blocks = tl.sum(tl.sum(own, axis=2), axis=0)
    result = tl.sum(tl.reshape(of_blocks, [2, OUTPUTS]), axis=0)
    row = _matrix_rows(tile, size_out, OUTPUTS, ACT > 0)
    if GROUP == 0:
        result *= scale_at(scale_ptr, 0, 0, row, size_out, SCALE)
    if NORM:
        result *= tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, axis=2), axis=1), axis=0) / size_in + eps)
    if HAS_BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ACT:
        gate, up = tl.split(tl.reshape(result.to(dtype), [OUTPUTS // 2, 2]))
        col = tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        tl.store(out_ptr + col, gated(gate, up, ACT == 2), mask=col < size_out // 2)
    else:
        col = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        tl.store(out_ptr + col, result.to(dtype), mask=col < size_out)


@triton.jit(do_not_specialize=["last"])
def _row_kernel(
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scale_ptr, zero_ptr, table_ptr, bias_ptr, out_ptr, stream_ptr,
    size_in, size_out, last, eps,
    OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, RESIDENT: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p of n: tiles p, p + n, … (TILES of them) of OUTPUTS rows of the matrix `[size_out, size_in]`,
    over all `last` steps of 256 columns, CHUNKS of them in a round.

    RESIDENT: there is one round, and the row stays in registers. LANES: threads of a program.
    """
    first_tile = tl.program_id(0)
    row_at = _rows_of_blocks(first_tile, size_out, OUTPUTS, ACT > 0)
    block = _blocks(0, CHUNKS, OUTPUTS)
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    if STAGES == 0:
        scale = _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP, SCALE)
        codes = _load_codes(codes_ptr, block, row_at, size_out, last, EVEN)
    elif PREFETCH and OVERLAP:
        _send_ahead(codes_ptr, first_tile, size_out, last, OUTPUTS, LANES, ACT > 0, PREFETCH)
    if NORM and RESIDENT:
        factor = _load(norm_ptr, _columns(0, CHUNKS), size_in, EVEN)
    else:
        factor = None
    wait_for_previous(OVERLAP)

    squares = tl.zeros([CHUNKS, 8, 32], tl.float32)
    none = tl.zeros([CHUNKS, 2 * OUTPUTS, 8], tl.float32)
    if RESIDENT:
        x, squares = _load_row(
            x_ptr, residual_ptr, stream_ptr, factor, squares, 0, size_in, CHUNKS, EVEN, NORM, HAS_RESIDUAL
        )
        if STAGES == 0:
            total = _add_round(
                none, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
                OUTPUTS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
            _store(
                total, squares, scale_ptr, bias_ptr, out_ptr, first_tile, size_in, size_out, eps,
                OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
            )  # fmt: skip
        else:
            for turn in tl.range(0, TILES, num_stages=STAGES):
                tile = first_tile + turn * tl.num_programs(0)
                row_at = _rows_of_blocks(tile, size_out, OUTPUTS, ACT > 0)
                scale = _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP, SCALE)
                codes = _load_codes(codes_ptr, block, row_at, size_out, last, EVEN)
                total = _add_round(
                    none, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
                    OUTPUTS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
                )  # fmt: skip
                _store(
                    total, squares, scale_ptr, bias_ptr, out_ptr, tile, size_in, size_out, eps,
                    OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
                )  # fmt: skip
    else:
        total = none
        for round in tl.range(0, tl.cdiv(last, CHUNKS), num_stages=STAGES):
            block = _blocks(round, CHUNKS, OUTPUTS)
            scale = _load_common_scale(scale_ptr, block, row_at, size_out, last, GROUP, SCALE)
            codes = _load_codes(codes_ptr, block, row_at, size_out, last, EVEN)
            part = _load(norm_ptr, _columns(round, CHUNKS), size_in, EVEN) if NORM else None
            x, squares = _load_row(
                x_ptr, residual_ptr, stream_ptr, part, squares, round, size_in, CHUNKS, EVEN, NORM,
                HAS_RESIDUAL,
            )  # fmt: skip
            total = _add_round(
                total, codes, scale, x, scale_ptr, zero_ptr, table_ptr, block, row_at, size_out, last,
                OUTPUTS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
        _store(
            total, squares, scale_ptr, bias_ptr, out_ptr, first_tile, size_in, size_out, eps,
            OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
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
        config: see there.
        norm_weight: `[in]`, of `x`'s dtype or float32; None: there is no norm. What it gives is rounded
            before it is divided by the root mean square, which float16 may not hold.
        eps: added to the mean square.
        residual: `[1, in]`, left as it is; None: `x` is the stream.

    Returns:
        The product, `[1, out]` or `[1, out / 2]`, and the new stream: `x + residual`, or `x`.

    Raises:
        ValueError: several rows, an activation of another name, a cut that does not serve so many inputs.
    """
    rows, size_in = x.shape
    if rows != 1 or act not in ACTS:
        raise ValueError(f"got {rows} rows and act={act!r}: one row, one of {list(ACTS)}")
    x = x.contiguous()
    size_out = tiles.rows
    outputs, warps, repeats, stages, prefetch = config
    last = tiles.codes.shape[0] * BLOCK // STEP
    chunks = config.chunks(size_in)
    if not config.serves(size_in):
        raise ValueError(f"{config}: {size_in} inputs need stages, and no tiles beside 0 of them")
    out = torch.empty((1, size_out // 2 if act else size_out), dtype=x.dtype, device=x.device)
    # Tensors that a variant has no use for are stood in for by others.
    stream = x if residual is None else torch.empty_like(x)
    _row(
        (ceil_div(size_out, outputs * repeats), 1, 1),
        (
            x,
            x if residual is None else residual.contiguous(),
            x if norm_weight is None else norm_weight,
            *form_tensors(tiles),
            out if bias is None else bias,
            out,
            stream,
        ),
        (size_in, size_out),
        (last, eps),
        (
            outputs, chunks, 32 * warps, config.resident, repeats, stages,
            min(prefetch, power_of_2(2 * last)), size_in % (STEP * chunks) == 0,
            bias is not None, ACTS[act], norm_weight is not None, residual is not None,
            *form_constants(tiles, x.dtype),
        ),
        warps,
    )  # fmt: skip
    return out, stream
