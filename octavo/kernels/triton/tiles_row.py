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
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2_where, wait_for_previous
from octavo.kernels.triton.tiles import ACTS, form_constants, form_tensors, slab_scale, unpack_block
from octavo.kernels.triton.unpack import unpack_and_128


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

    def serves(self, size_in: int) -> bool:
        """Whether registers hold what they should: of 16 outputs 16 words of codes in each round, or the row
        beside tiles that pass."""
        rounds = ceil_div(size_in, STEP * self.warps)
        if self.stages == 0:
            return self.tiles == 1 and rounds * self.outputs <= 64
        return not self.resident or rounds <= 4


@triton.jit
def _load(ptr, col, size_in, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < size_in, other=0.0)


@triton.jit
def _matrix_rows(tile, size_out, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The rows of the matrix that are a tile's, `[1, OUTPUTS]`: of a gated one, those of the two halves by
    turns. Beyond the last output it is read again, and not stored: loads without a mask."""
    index = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), size_out - 1)
    if GATED:
        index = index // 2 + index % 2 * (size_out // 2)
    return index[None, :]


@triton.jit
def _send_ahead(codes_ptr, tile, size_out, last, OUTPUTS: tl.constexpr, WARPS: tl.constexpr,
                GATED: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """Sends for the first PREFETCH blocks of a tile's codes."""
    if tile * OUTPUTS + OUTPUTS <= size_out:
        # A tile's codes of a block lie in one piece, those of a gated matrix in two.
        PIECE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
        lane = tl.arange(0, max(PREFETCH, 32 * WARPS))
        live = ((lane < PREFETCH) & (lane < last * 2)).to(tl.int32)
        at = (codes_ptr + (lane.to(tl.int64) * size_out + tile * PIECE) * 32).to(tl.int64)
        prefetch_l2_where(at, PIECE * 64, live)
        if GATED:
            prefetch_l2_where(at + tl.cast(size_out // 2, tl.int64) * 64, PIECE * 64, live)


@triton.jit
def _load_row(x_ptr, residual_ptr, stream_ptr, factor, squares, round, size_in, WARPS: tl.constexpr,
              EVEN: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """A round's part of the row, `[WARPS, 32, 8]`, and `squares` with its squares."""
    col = _columns(round, WARPS)
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
def _columns(round, WARPS: tl.constexpr):
    """`[WARPS, 8, 32]`: the columns of a round's steps."""
    step = round * WARPS + tl.arange(0, WARPS)
    inside = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return step[:, None, None] * 256 + inside[None, :, :]


@triton.jit
def _steps(round, last, WARPS: tl.constexpr):
    """`[WARPS, 1]`: a round's steps; beyond the last one, which meets zeros, it once more."""
    return tl.minimum(round * WARPS + tl.arange(0, WARPS), last - 1)[:, None]


@triton.jit
def _load_codes(codes_ptr, step, C: tl.constexpr, row_at, size_out):
    """`[WARPS, OUTPUTS, 32]`"""
    at = ((step * 2 + C).to(tl.int64) * size_out + row_at)[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    return tl.load(codes_ptr + at, eviction_policy="evict_first")


def _moves(count: int) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX of registers that go through unchanged, and its constraints."""
    moves = " ".join(f"mov.b32 ${i}, ${count + i};" for i in range(count))
    return tl.constexpr(moves), tl.constexpr(",".join(["=&r"] * count + ["r"] * count))


_MOVES_2, _OF_2 = _moves(2)
_MOVES_4, _OF_4 = _moves(4)
_MOVES_8, _OF_8 = _moves(8)


@triton.jit
def _all_loaded(codes, COUNT: tl.constexpr):
    """The tensors that were loaded, none of which is put to use before the last has been sent for: else each
    is brought into order in shared memory while the next ones wait."""
    if COUNT == 2:
        return tl.inline_asm_elementwise(
            _MOVES_2, _OF_2, [codes[0], codes[1]], dtype=(tl.int16, tl.int16), is_pure=False, pack=2
        )
    elif COUNT == 4:
        return tl.inline_asm_elementwise(
            _MOVES_4, _OF_4, [codes[0], codes[1], codes[2], codes[3]], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=False,
            pack=2,
        )  # fmt: skip
    elif COUNT == 8:
        return tl.inline_asm_elementwise(
            _MOVES_8, _OF_8,
            [codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], codes[6], codes[7]],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16), is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return codes


@triton.jit
def _load_scale(scale_ptr, step, C: tl.constexpr, row_at, size_out, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """The scale of all of a block's columns, `[WARPS, OUTPUTS]`, where they share one."""
    if GROUP > 64:
        return slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)
    else:
        return tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def _add_block(
    total, codes, scale, x, scale_ptr, zero_ptr, table_ptr, step, C: tl.constexpr, row_at, size_out,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`total [WARPS, OUTPUTS, 8]` and block C's products with a step's row, `x [WARPS, 32, 8]`, in the lines
    of their slabs, C * 4 to C * 4 + 3; the others are of no use, and may hold anything."""
    below = tl.zeros([total.shape[0], total.shape[1], 8], tl.float32)
    if not TABLE and not HAS_ZEROS and (x.dtype == tl.bfloat16 or not PACKED):
        # Symmetric codes are multiplied 136 too high, by sums that begin as much below.
        below = tl.dot(tl.full([total.shape[0], total.shape[1], 32], -136.0, x.dtype), x, below)
        w0, w1, w2, w3 = unpack_and_128(codes, x.dtype, PACKED)
    else:
        w0, w1, w2, w3 = unpack_block(
            codes, table_ptr, zero_ptr, step, C, row_at, size_out, GROUP, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            x.dtype,
        )  # fmt: skip
    line = tl.arange(0, 8)[None, None, :]
    p0 = tl.dot(w0, x, below)
    p1 = tl.dot(w1, x, below)
    p2 = tl.dot(w2, x, below)
    p3 = tl.dot(w3, x, below)
    if GROUP == 32:
        p0 *= slab_scale(scale_ptr, step, C, 0, row_at, size_out, GROUP, SCALE)[:, :, None]
        p1 *= slab_scale(scale_ptr, step, C, 1, row_at, size_out, GROUP, SCALE)[:, :, None]
        p2 *= slab_scale(scale_ptr, step, C, 2, row_at, size_out, GROUP, SCALE)[:, :, None]
        p3 *= slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, :, None]
    first = tl.where(line == C * 4, p0, p1)
    second = tl.where(line == C * 4 + 2, p2, p3)
    if GROUP == 64:
        first *= slab_scale(scale_ptr, step, C, 1, row_at, size_out, GROUP, SCALE)[:, :, None]
        second *= slab_scale(scale_ptr, step, C, 3, row_at, size_out, GROUP, SCALE)[:, :, None]
    products = tl.where(line < C * 4 + 2, first, second)
    if GROUP > 64:
        products *= scale[:, :, None]
    return total + products


@triton.jit
def _store(
    first, second, squares, scale_ptr, bias_ptr, out_ptr, tile, row_at, size_in, size_out, eps,
    OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Ends a tile, by the sums of steps' first and second blocks, `[WARPS, OUTPUTS, 8]`."""
    lines = tl.where(tl.arange(0, 8)[None, None, :] < 4, first, second)
    result = tl.sum(tl.sum(lines, axis=2), axis=0)
    own_row = tl.reshape(row_at, [OUTPUTS])
    if GROUP == 0:
        result *= slab_scale(scale_ptr, 0, 0, 0, own_row, size_out, GROUP, SCALE)
    if NORM:
        result *= tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, axis=2), axis=1), axis=0) / size_in + eps)
    if HAS_BIAS:
        result += tl.load(bias_ptr + own_row).to(tl.float32)
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
    OUTPUTS: tl.constexpr, WARPS: tl.constexpr, ROUNDS: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, TABLE: tl.constexpr,
    LOOK_UP: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p of n: tiles p, p + n, … (TILES of them) of OUTPUTS rows of the matrix `[size_out, size_in]`,
    over all `last` steps of 256 columns, WARPS of them in a round.

    ROUNDS: how many, and the row stays in registers; or 0, and a loop takes both by rounds.
    """
    first_tile = tl.program_id(0)
    row_at = _matrix_rows(first_tile, size_out, OUTPUTS, ACT > 0)
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    codes = ()
    scales = ()
    if STAGES == 0:
        for round in tl.static_range(ROUNDS):
            step = _steps(round, last, WARPS)
            for c in tl.static_range(2):
                codes = codes + (_load_codes(codes_ptr, step, c, row_at, size_out),)  # type: ignore[assignment]
                scale = _load_scale(scale_ptr, step, c, row_at, size_out, GROUP, SCALE)
                scales = scales + (scale,)  # type: ignore[assignment]
        if PACKED:
            codes = _all_loaded(codes, 2 * ROUNDS)
    elif PREFETCH and OVERLAP:
        _send_ahead(codes_ptr, first_tile, size_out, last, OUTPUTS, WARPS, ACT > 0, PREFETCH)
    factors = ()
    if NORM:
        for round in tl.static_range(ROUNDS):
            factor = _load(norm_ptr, _columns(round, WARPS), size_in, EVEN)
            factors = factors + (factor,)  # type: ignore[assignment]
    wait_for_previous(OVERLAP)

    squares = tl.zeros([WARPS, 8, 32], tl.float32)
    none = tl.zeros([WARPS, OUTPUTS, 8], tl.float32)
    if ROUNDS:
        rows = ()
        for round in tl.static_range(ROUNDS):
            x, squares = _load_row(
                x_ptr, residual_ptr, stream_ptr, factors[round] if NORM else None, squares, round, size_in,
                WARPS, EVEN, NORM, HAS_RESIDUAL,
            )  # fmt: skip
            rows = rows + (x,)  # type: ignore[assignment]
        if STAGES == 0:
            first = none
            second = none
            for round in tl.static_range(ROUNDS):
                step = _steps(round, last, WARPS)
                first = _add_block(
                    first, codes[2 * round], scales[2 * round], rows[round], scale_ptr,
                    zero_ptr, table_ptr, step, 0, row_at, size_out, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP,
                    PACKED,
                )  # fmt: skip
                second = _add_block(
                    second, codes[2 * round + 1], scales[2 * round + 1], rows[round],
                    scale_ptr, zero_ptr, table_ptr, step, 1, row_at, size_out, GROUP, SCALE, HAS_ZEROS,
                    TABLE, LOOK_UP, PACKED,
                )  # fmt: skip
            _store(
                first, second, squares, scale_ptr, bias_ptr, out_ptr, first_tile, row_at, size_in, size_out,
                eps, OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
            )  # fmt: skip
        else:
            for turn in tl.range(0, TILES, num_stages=STAGES):
                tile = first_tile + turn * tl.num_programs(0)
                row_at = _matrix_rows(tile, size_out, OUTPUTS, ACT > 0)
                first = none
                second = none
                for round in tl.static_range(ROUNDS):
                    first, second = _add_round(
                        first, second, rows[round], codes_ptr, scale_ptr, zero_ptr,
                        table_ptr, round, last, row_at, size_out, WARPS, GROUP, SCALE, HAS_ZEROS, TABLE,
                        LOOK_UP, PACKED,
                    )  # fmt: skip
                _store(
                    first, second, squares, scale_ptr, bias_ptr, out_ptr, tile, row_at, size_in, size_out,
                    eps, OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
                )  # fmt: skip
    else:
        first = none
        second = none
        for round in tl.range(0, tl.cdiv(last, WARPS), num_stages=STAGES):
            factor = _load(norm_ptr, _columns(round, WARPS), size_in, EVEN) if NORM else None
            x, squares = _load_row(
                x_ptr, residual_ptr, stream_ptr, factor, squares, round, size_in, WARPS, EVEN, NORM,
                HAS_RESIDUAL,
            )  # fmt: skip
            first, second = _add_round(
                first, second, x, codes_ptr, scale_ptr, zero_ptr, table_ptr, round, last, row_at,
                size_out, WARPS, GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
            )  # fmt: skip
        _store(
            first, second, squares, scale_ptr, bias_ptr, out_ptr, first_tile, row_at, size_in, size_out, eps,
            OUTPUTS, HAS_BIAS, ACT, NORM, GROUP, SCALE,
        )  # fmt: skip


@triton.jit
def _add_round(
    first, second, x, codes_ptr, scale_ptr, zero_ptr, table_ptr, round, last, row_at, size_out,
    WARPS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    TABLE: tl.constexpr, LOOK_UP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The sums of steps' first and second blocks, and those of a round's with `x`."""
    step = _steps(round, last, WARPS)
    codes = _load_codes(codes_ptr, step, 0, row_at, size_out)
    codes_1 = _load_codes(codes_ptr, step, 1, row_at, size_out)
    scale = _load_scale(scale_ptr, step, 0, row_at, size_out, GROUP, SCALE)
    scale_1 = _load_scale(scale_ptr, step, 1, row_at, size_out, GROUP, SCALE)
    first = _add_block(
        first, codes, scale, x, scale_ptr, zero_ptr, table_ptr, step, 0, row_at, size_out,
        GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
    )  # fmt: skip
    second = _add_block(
        second, codes_1, scale_1, x, scale_ptr, zero_ptr, table_ptr, step, 1, row_at, size_out,
        GROUP, SCALE, HAS_ZEROS, TABLE, LOOK_UP, PACKED,
    )  # fmt: skip
    return first, second


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
    rounds = ceil_div(last, warps)
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
            outputs, warps, rounds if config.resident else 0, repeats, stages,
            min(prefetch, power_of_2(2 * last)), size_in % (STEP * warps) == 0,
            bias is not None, ACTS[act], norm_weight is not None, residual is not None,
            *form_constants(tiles, x.dtype),
        ),
        warps,
    )  # fmt: skip
    return out, stream
