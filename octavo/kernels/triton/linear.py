"""Products of few rows with a weight matrix, where reading the weights once is all the work.

What surrounds such a product in a layer can be part of its kernel: the residual addition and RMS norm
before it, the gated activation after it. Weights are read once; the rows, which all programs read, come
from the caches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous

MAX_ROWS = 4
_PIECE = 2048  # bytes of a matrix row that are sent for at a time
_GELU = {None: None, "silu": False, "gelu_tanh": True}


@triton.jit
def _matrix_row(index, OUT: tl.constexpr, GATED: tl.constexpr):
    """Which row of the matrix an output comes of: of a gated matrix, rows of the two halves by turns."""
    return index // 2 + index % 2 * (OUT // 2) if GATED else index


@triton.jit
def _load_weights(ptr, row_stride, tile, cols, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr,
                  ALL_ROWS: tl.constexpr, ALL_COLS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Columns `cols` of a tile's rows. ALL_ROWS, ALL_COLS: none of them is out of bounds."""
    index = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = _matrix_row(index, OUT, GATED)
    at = ptr + row.to(tl.int64)[:, None] * row_stride + cols[None, :]
    if ALL_ROWS and ALL_COLS:
        return tl.load(at, eviction_policy="evict_first")
    if ALL_COLS:
        return tl.load(at, mask=(index < OUT)[:, None], other=0.0, eviction_policy="evict_first")
    mask = (index < OUT)[:, None] & (cols < IN)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_stream(x_ptr, residual_ptr, stream_ptr, x_row, residual_row, row: tl.constexpr, cols,
                 IN: tl.constexpr, ALL_COLS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Columns of a row of `x + residual`, which the first program also stores."""
    mask = cols < IN
    if ALL_COLS:
        x = tl.load(x_ptr + row * x_row + cols)
    else:
        x = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        if ALL_COLS:
            residual = tl.load(residual_ptr + row * residual_row + cols)
        else:
            residual = tl.load(residual_ptr + row * residual_row + cols, mask=mask, other=0.0)
        # Rounded before it is normalized, as unfused layers do.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        # Into another tensor, as other programs may still have to read this one.
        tl.store(stream_ptr + row * IN + cols, x, mask=mask & (tl.program_id(0) == 0))
    return x.to(tl.float32)


@triton.jit
def _load_norm(ptr, cols, IN: tl.constexpr, ALL_COLS: tl.constexpr):
    if ALL_COLS:
        return tl.load(ptr + cols)
    return tl.load(ptr + cols, mask=cols < IN, other=0.0)


@triton.jit
def _sum_by(x, LANES: tl.constexpr):
    """Sums of as many neighbours, which a lane loads as one: `[..., n]` to `[..., n / LANES]`."""
    if len(x.shape) == 1:
        return tl.sum(tl.reshape(x, [x.shape[0] // LANES, LANES]), axis=1)
    else:
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES]), axis=2)


@triton.jit
def _here(OVERLAP: tl.constexpr):
    """-1, of which the compiler does not know before this place: what needs it cannot be moved ahead."""
    if OVERLAP:
        return tl.inline_asm_elementwise(
            "activemask.b32 $0; // dummy", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return -1


@triton.jit
def _products(w, x, here, DTYPE: tl.constexpr):
    """Sums over 8 neighbours of products with a row `x`, float32: `[outputs, inputs / 8]`. Weights that come
    as int32 are pairs of DTYPE. `here` is -1."""
    if w.dtype == tl.int32:
        if DTYPE == tl.bfloat16:
            even = (w << (here & 16)).to(tl.float32, bitcast=True)
            odd = (w & (here << 16)).to(tl.float32, bitcast=True)
        else:
            even = (w & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            odd = (w >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        x_even, x_odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        return _sum_by(even * x_even[None, :] + odd * x_odd[None, :], 4)
    else:
        return _sum_by(w.to(tl.float32) * x[None, :], 8)


@triton.jit
def _store_results(result, bias_ptr, out_ptr, row: tl.constexpr, tile, OUT: tl.constexpr,
                   BLOCK_OUT: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr):  # fmt: skip
    """Ends a row's sums of a tile, `[BLOCK_OUT]`: bias, activation (GELU None: there is none)."""
    dtype = out_ptr.dtype.element_ty
    GATED: tl.constexpr = GELU is not None
    index = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if HAS_BIAS:
        at = index // 2 + index % 2 * (OUT // 2) if GATED else index
        result += tl.load(bias_ptr + at, mask=index < OUT, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result.to(dtype), [BLOCK_OUT // 2, 2]))
        col = tile * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
        tl.store(out_ptr + row * (OUT // 2) + col, gated(gate, up, GELU), mask=col < OUT // 2)
    else:
        tl.store(out_ptr + row * OUT + index, result.to(dtype), mask=index < OUT)


@triton.constexpr_function
def _pieces(row_bytes: int, rows: int, piece: int, lanes: int) -> int:
    """In how many pieces a row is sent for: of about `piece` bytes, and no more than there are lanes."""
    return max(1, min(row_bytes // piece, lanes // rows))


@triton.jit
def sent_pieces(
    tile, weight_row, FIRST: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
    LANES: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Where in a matrix (in elements of SIZE bytes) each lane's piece of columns FIRST … FIRST + COLUMNS of a
    tile's rows begins, and how many bytes it has: a multiple of 16, or 0."""
    PIECES: tl.constexpr = _pieces(COLUMNS * SIZE, BLOCK_OUT, PIECE, LANES)
    BYTES: tl.constexpr = COLUMNS * SIZE // PIECES // 16 * 16
    lane = tl.arange(0, LANES)
    index = tile * BLOCK_OUT + lane % BLOCK_OUT
    piece = lane // BLOCK_OUT
    at = _matrix_row(index, OUT, GATED).to(tl.int64) * weight_row + (FIRST + piece * (BYTES // SIZE))
    return at, tl.where((piece < PIECES) & (index < OUT), BYTES, 0)


@triton.jit
def _send_ahead(
    weight_ptr, weight_row, tile, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sends for what follows a program's first weights into the L2: see `FewRowsConfig`."""
    SIZE: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    if TILES > 1:
        for step in tl.static_range(1, AHEAD + 1):
            following = tile + step * tl.num_programs(0)
            at, size = sent_pieces(following, weight_row, 0, IN, SIZE, PIECE, LANES, OUT, BLOCK_OUT, GATED)
            prefetch_l2((weight_ptr + at).to(tl.int64), size)
    elif DEPTH * BLOCK_IN < IN:
        COLUMNS: tl.constexpr = min(AHEAD * BLOCK_IN, IN - DEPTH * BLOCK_IN)
        at, size = sent_pieces(
            tile, weight_row, DEPTH * BLOCK_IN, COLUMNS, SIZE, PIECE, LANES, OUT, BLOCK_OUT, GATED
        )
        prefetch_l2((weight_ptr + at).to(tl.int64), size)


@triton.jit
def _stepping_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, stream_ptr,
    x_row, residual_row, weight_row, eps,
    ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: tile p of all rows, in steps of BLOCK_IN inputs. Sums stay per lane until the end.

    The weights of DEPTH steps have registers of their own, which are filled again as soon as they are summed.
    The loop goes through them by name, as moving what is still being loaded would wait for it. For the same
    reason they are whole registers: two weights as an int32 where that is possible.

    A norm's factor, one number a row, is applied to the sums: it is known when the last step is done.
    Each row has accumulators of its own, as a third dimension would be laid out in another way than the
    weights are loaded, and cost a pass through shared memory every step.
    """
    tile = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_IN)
    ALL_ROWS: tl.constexpr = OUT % BLOCK_OUT == 0
    ALL_COLS: tl.constexpr = IN % (DEPTH * BLOCK_IN) == 0
    GATED: tl.constexpr = GELU is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Of a matrix that comes in pairs, words.
    UNIT: tl.constexpr = 2 if weight_ptr.dtype.element_ty == tl.int32 else 1
    STEP: tl.constexpr = BLOCK_IN // UNIT
    SIZE: tl.constexpr = IN // UNIT
    words = tl.arange(0, STEP)
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    held = ()
    for slot in tl.static_range(DEPTH):
        first = _load_weights(
            weight_ptr, weight_row, tile, slot * STEP + words, SIZE, OUT, BLOCK_OUT, ALL_ROWS, ALL_COLS, GATED
        )
        held = held + (first,)  # type: ignore[assignment]
    if AHEAD > 0 and OVERLAP:
        _send_ahead(
            weight_ptr, weight_row, tile, SIZE, OUT, BLOCK_OUT, STEP, TILES, DEPTH, AHEAD, PIECE, LANES,
            GATED,
        )  # fmt: skip
    sums = (tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32),) * ROWS
    squares = (tl.zeros([BLOCK_IN // 8], tl.float32),) * ROWS
    wait_for_previous(OVERLAP)
    for step in range(0, tl.cdiv(IN, BLOCK_IN), DEPTH):
        xs = ()
        for slot in tl.static_range(DEPTH):
            cols = (step + slot) * BLOCK_IN + lanes
            if NORM:
                factor = _load_norm(norm_ptr, cols, IN, ALL_COLS).to(tl.float32)
            new_squares = ()
            for row in tl.static_range(ROWS):
                x = _load_stream(
                    x_ptr, residual_ptr, stream_ptr, x_row, residual_row, row, cols, IN, ALL_COLS,
                    HAS_RESIDUAL,
                )  # fmt: skip
                if NORM:
                    new_squares = new_squares + (squares[row] + _sum_by(x * x, 8),)  # type: ignore[assignment]
                    x = x * factor
                xs = xs + (x,)  # type: ignore[assignment]
            if NORM:
                squares = new_squares
        next_held = ()
        for slot in tl.static_range(DEPTH):
            w = held[slot]  # type: ignore[var-annotated]
            here = _here(OVERLAP)
            new_sums = ()
            for row in tl.static_range(ROWS):
                x = xs[slot * ROWS + row]
                new_sums = new_sums + (sums[row] + _products(w, x, here, DTYPE),)  # type: ignore[assignment]
            sums = new_sums
            later = step + slot + DEPTH
            # A branch, so that the compiler leaves the load here, ahead of the next slot's sums.
            if later * BLOCK_IN < IN:
                w = _load_weights(
                    weight_ptr, weight_row, tile, later * STEP + words, SIZE, OUT, BLOCK_OUT, ALL_ROWS,
                    ALL_COLS, GATED,
                )  # fmt: skip
            next_held = next_held + (w,)  # type: ignore[assignment]
        held = next_held
    for row in tl.static_range(ROWS):
        result = tl.sum(sums[row], axis=1)
        if NORM:
            result *= tl.rsqrt(tl.sum(squares[row], axis=0) / IN + eps)
        _store_results(result, bias_ptr, out_ptr, row, tile, OUT, BLOCK_OUT, HAS_BIAS, GELU)


@triton.jit
def _resident_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, stream_ptr,
    x_row, residual_row, weight_row, eps,
    ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p of n: tiles p, p + n, … (TILES of them) of all rows, which it keeps in registers.

    So the norm is paid once for several tiles. BLOCK_IN is at least IN. The next tile's weights are under
    way while one is summed.
    """
    tile = tl.program_id(0)
    cols = tl.arange(0, BLOCK_IN)
    ALL_ROWS: tl.constexpr = OUT % BLOCK_OUT == 0 and TILES == 1
    ALL_COLS: tl.constexpr = IN == BLOCK_IN
    GATED: tl.constexpr = GELU is not None
    # No kernel writes weights: the first are on their way while the kernel before this one ends.
    w = _load_weights(weight_ptr, weight_row, tile, cols, IN, OUT, BLOCK_OUT, ALL_ROWS, ALL_COLS, GATED)
    if AHEAD > 0 and OVERLAP:
        _send_ahead(
            weight_ptr, weight_row, tile, IN, OUT, BLOCK_OUT, BLOCK_IN, TILES, DEPTH, AHEAD, PIECE, LANES,
            GATED,
        )  # fmt: skip
    if NORM:
        factor = _load_norm(norm_ptr, cols, IN, ALL_COLS)
    wait_for_previous(OVERLAP)
    rows = ()
    scales = ()
    for row in tl.static_range(ROWS):
        x = _load_stream(
            x_ptr, residual_ptr, stream_ptr, x_row, residual_row, row, cols, IN, ALL_COLS, HAS_RESIDUAL
        )
        if NORM:
            scales = scales + (tl.rsqrt(tl.sum(x * x, axis=0) / IN + eps),)  # type: ignore[assignment]
            x = x * factor.to(tl.float32)
        rows = rows + (x,)  # type: ignore[assignment]
    for step in range(TILES):
        wide = w.to(tl.float32)
        if step + 1 < TILES:  # past the last tile nothing is read
            following = tile + tl.num_programs(0)
            w = _load_weights(
                weight_ptr, weight_row, following, cols, IN, OUT, BLOCK_OUT, ALL_ROWS, ALL_COLS, GATED
            )
        for row in tl.static_range(ROWS):
            result = tl.sum(wide * rows[row][None, :], axis=1)
            if NORM:
                result *= scales[row]
            _store_results(result, bias_ptr, out_ptr, row, tile, OUT, BLOCK_OUT, HAS_BIAS, GELU)
        tile += tl.num_programs(0)


_stepping = Launcher(_stepping_kernel, overlap=True)
_resident = Launcher(_resident_kernel, overlap=True)


class FewRowsConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        outputs: rows of the matrix that a program multiplies at a time (of a gated one, half of them of
            each half), a power of 2.
        inputs: columns of a step, a power of 2. At least as many as the matrix has: the program keeps the
            rows in registers, for all its tiles; else it goes through them in steps.
        warps: of a program.
        tiles: how many times `outputs` a program multiplies; above 1 only where it keeps the rows.
        depth: how many steps' weights a program has in registers or on their way there.
        ahead: how many pieces behind its first ones a program sends for, into the L2, before it waits for the
            kernel ahead: of its own steps or, if it has several, tiles. Where that kernel leaves the memory
            idle.
    """

    outputs: int
    inputs: int
    warps: int
    tiles: int = 1
    depth: int = 1
    ahead: int = 0


def few_rows_config(
    rows: int, size_in: int, size_out: int, gated: bool = False, norm: bool = False
) -> FewRowsConfig:
    """A good cut for a matrix of `size_out` rows: as measured on an H200 at one row without a norm.

    With a norm, wider tiles: each program reads the whole rows, so fewer of them should.
    """
    width = max(8, power_of_2(size_in))
    if norm and rows == 1 and width <= 4096:
        if width <= 1024:
            return FewRowsConfig(8, width, max(1, min(2 if gated else 4, width // 256)))
        return FewRowsConfig(4, width, min(8, width // 256))
    outputs = 4 if rows <= 2 and (norm or size_out >= 16384) else 2
    return FewRowsConfig(outputs, min(1024, width), 4)


def _is_aligned(weight: torch.Tensor) -> bool:
    """Whether a matrix's rows begin and end at addresses that the L2's prefetch takes."""
    size = weight.element_size()
    return all(n % 16 == 0 for n in (weight.data_ptr(), weight.stride(0) * size, weight.shape[1] * size))


def _in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """A matrix of 2-byte elements as int32, `[out, in / 2]`, if its rows can be read so; else as it is."""
    evenly = weight.data_ptr() % 4 == 0 and weight.stride(0) % 2 == 0 and weight.shape[1] % 2 == 0
    return weight.view(torch.int32) if weight.element_size() == 2 and evenly else weight


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    act: str | None,
    config: tuple[int, ...] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size_in = x.shape
    size_out = weight.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows: 1 to {MAX_ROWS} are possible")
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    cut = FewRowsConfig(
        *(config or few_rows_config(rows, size_in, size_out, act is not None, norm is not None))
    )
    resident = cut.inputs >= size_in
    if cut.tiles > 1 and not resident:
        raise ValueError(f"{cut}: several tiles need inputs >= {size_in}, to keep the rows")
    if act not in _GELU:
        raise ValueError(f"act={act!r}: one of {list(_GELU)}")
    if act is not None and cut.outputs < 2:
        raise ValueError(f"{cut}: an activation needs 2 or more outputs, a gate and its factor")
    out_columns = size_out if act is None else size_out // 2
    out = torch.empty((rows, out_columns), dtype=x.dtype, device=x.device)
    # Tensors that a variant has no use for are stood in for by others.
    stream = torch.empty((rows, size_in), dtype=x.dtype, device=x.device) if residual is not None else x
    added = x if residual is None else residual
    matrix = weight if resident else _in_pairs(weight)
    (_resident if resident else _stepping)(
        (ceil_div(size_out, cut.outputs * cut.tiles), 1, 1),
        (
            x,
            added,
            weight if norm is None else norm,
            matrix,
            weight if bias is None else bias,
            out,
            stream,
        ),
        (x.stride(0), added.stride(0), matrix.stride(0)),
        (eps,),
        (
            rows,
            size_in,
            size_out,
            cut.outputs,
            cut.inputs,
            cut.tiles,
            max(1, min(cut.depth, ceil_div(size_in, cut.inputs))),
            cut.ahead if _is_aligned(weight) else 0,
            _PIECE,
            32 * cut.warps,
            bias is not None,
            _GELU[act],
            norm is not None,
            residual is not None,
        ),
        cut.warps,
    )
    return out, stream


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: tuple[int, ...] | None = None,
    act: str | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, with float32 sums, for 1 to `MAX_ROWS` rows; if asked for, its activation.

    Args:
        x: `[rows, in]`, bfloat16 or float16 (float32 works), contiguous in the last dimension.
        weight: `[out, in]`, likewise.
        bias: `[out]` or None.
        config: a `FewRowsConfig`; None: that of `few_rows_config`.
        act: "silu" or "gelu_tanh": the first half of the outputs goes through it and multiplies the second,
            all rounded as by `activation.silu_and_mul` after an unfused product.

    Returns:
        `[rows, out]` of `x`'s dtype, with `act` `[rows, out / 2]`.
    """
    return _launch(x, None, None, 0.0, weight, bias, act, config)[0]


def rms_norm_few_rows_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: tuple[int, ...] | None = None,
    act: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`few_rows_linear` of the RMS norm of `x + residual`, without rounding between the two.

    Args:
        x: `[rows, in]`, as for `few_rows_linear`.
        residual: same shape, the stream, which stays as it is; None: `x` is the stream.
        norm_weight: `[in]`, of `x`'s dtype or float32.
        eps: added to the mean square.
        weight, bias, config, act: as for `few_rows_linear`.

    Returns:
        The product, and the new stream: `x + residual` rounded to `x`'s dtype (a new tensor), or `x`.
    """
    return _launch(x, residual, norm_weight, eps, weight, bias, act, config)
