"""The product of one row with weights of 8 bits, where reading the weights once is all the work.

The residual addition and RMS norm before it, the row's quantization, and the gated activation after it are
part of the kernel. Each program makes the row's codes itself, and keeps them in registers for its tiles; of a
long row a part of them, while `splits` programs share the inputs of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_lowbit import FP8_BLOCK
from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous
from octavo.kernels.triton.norm import normalized
from octavo.kernels.triton.rows_8bit import codes_of, given_or_scale_of, group_codes, scale_of
from octavo.kernels.triton.split_sums import add_parts
from octavo.kernels.triton.workspace import workspace

GELU = {None: None, "silu": False, "gelu_tanh": True}


class RowConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        outputs: rows of the matrix that a program multiplies at a time (of a gated one, half of them of
            each half), a power of 2.
        warps: of a program.
        tiles: how many times `outputs` a program multiplies. It sends for the weights of all of them before
            it waits for the row: what a program does beside reading weights takes some 2 µs.
        splits: programs that share the inputs of a tile, without a norm or an activation; the last of them
            to finish adds their sums in a fixed order.
    """

    outputs: int
    warps: int
    tiles: int = 1
    splits: int = 1


def row_config(size_in: int, size_out: int, alone: bool) -> RowConfig:
    """A sane cut where nothing was measured: 16 bytes a thread and output. `alone`: inputs may be shared."""
    splits = min(8, ceil_div(size_in, 4096)) if alone and size_in > 8192 else 1
    warps = max(1, min(8, power_of_2(ceil_div(size_in, splits)) // 512))
    return RowConfig(4 if size_in // splits <= 4096 else 2, warps, 4 if size_out >= 4096 else 1, splits)


def fitted(config: tuple[int, ...] | None, size_in: int, size_out: int, alone: bool) -> RowConfig:
    """A cut that was measured for a matrix of about this size, alone, as this product can have it; None: a
    default one. A thread holds 64 weights of a tile at most, where warps suffice."""
    if config is None or (RowConfig(*config).splits > 1 and not alone):
        return row_config(size_in, size_out, alone)
    cut = RowConfig(*config)
    weights = cut.outputs * power_of_2(ceil_div(size_in, cut.splits))
    while weights > 64 * 32 * cut.warps and cut.warps < 16:
        cut = cut._replace(warps=2 * cut.warps)
    return cut


@triton.jit
def matrix_rows(tile, OUT: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The rows of the matrix that are a tile's: of a gated one, those of the two halves by turns."""
    index = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    return index // 2 + index % 2 * (OUT // 2) if GATED else index


@triton.jit
def _load_tile(weight_ptr, weight_row, tile, cols, end, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
               GATED: tl.constexpr, ALL_COLS: tl.constexpr):  # fmt: skip
    # Beyond the last row it is read again, and its products not stored.
    row = tl.minimum(matrix_rows(tile, OUT, OUTPUTS, GATED), OUT - 1)
    at = weight_ptr + row.to(tl.int64)[:, None] * weight_row + cols[None, :]
    if ALL_COLS:
        return tl.load(at, eviction_policy="evict_first")
    else:
        ZERO: tl.constexpr = 0 if weight_ptr.dtype.element_ty == tl.int8 else 0.0
        return tl.load(at, mask=(cols < end)[None, :], other=ZERO, eviction_policy="evict_first")


@triton.jit
def output_scales(scale_ptr, tile, OUT: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The scales of a tile's outputs, `[OUTPUTS]`."""
    at = matrix_rows(tile, OUT, OUTPUTS, GATED)
    return tl.load(scale_ptr + at, mask=tile * OUTPUTS + tl.arange(0, OUTPUTS) < OUT, other=0.0)


@triton.jit
def store_results(result, bias_ptr, out_ptr, tile, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
                  HAS_BIAS: tl.constexpr, GELU: tl.constexpr):  # fmt: skip
    """Ends a tile's sums, `[OUTPUTS]`: bias, activation (GELU None: there is none)."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    GATED: tl.constexpr = GELU is not None
    at = matrix_rows(tile, OUT, OUTPUTS, GATED)
    inside = tile * OUTPUTS + tl.arange(0, OUTPUTS) < OUT
    if HAS_BIAS:
        result += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result.to(dtype), [OUTPUTS // 2, 2]))
        col = tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        tl.store(out_ptr + col, gated(gate, up, GELU), mask=col < OUT // 2)
    else:
        tl.store(out_ptr + at, result.to(dtype), mask=inside)


@triton.jit
def _row_kernel(
    x_ptr, residual_ptr, norm_ptr, given_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, stream_ptr,
    part_ptr, counter_ptr, weight_row, eps,
    IN: tl.constexpr, OUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_IN: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, GIVEN: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (p, s): tiles p TILES to p TILES + TILES - 1, OUTPUTS rows of the matrix each, over the s-th
    CHUNK inputs, which BLOCK_IN holds; WIDTH holds all. Sums of split programs: float32
    `[programs, SPLITS, TILES OUTPUTS]`."""
    GATED: tl.constexpr = GELU is not None
    ALL_COLS: tl.constexpr = CHUNK == BLOCK_IN and IN % CHUNK == 0
    IS_FP8: tl.constexpr = weight_ptr.dtype.element_ty == tl.float8e4nv
    begin = tl.program_id(1) * CHUNK
    end = tl.minimum(begin + CHUNK, IN)
    cols = begin + tl.arange(0, BLOCK_IN)
    first = tl.program_id(0) * TILES
    # No kernel writes weights: they are on their way while the kernel before this one ends.
    tiles = ()
    for step in tl.static_range(TILES):
        w = _load_tile(weight_ptr, weight_row, first + step, cols, end, OUT, OUTPUTS, GATED, ALL_COLS)
        tiles = tiles + (w,)  # type: ignore[assignment]
    if NORM:
        factor = tl.load(norm_ptr + cols, mask=cols < end, other=0.0)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + cols, mask=cols < end, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + cols, mask=cols < end, other=0.0)
        # Rounded before it is normalized, as unfused layers do.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        # Into another tensor, as other programs may still have to read this one.
        tl.store(stream_ptr + cols, x, mask=(cols < end) & (tl.program_id(0) == 0))
    if NORM:
        x = normalized(x, factor, eps, IN)
    if GROUP:
        row, row_scale = group_codes(x.to(tl.float32), GROUP)
    else:
        if SPLITS > 1 and not GIVEN:
            everywhere = tl.arange(0, WIDTH)
            all_x = tl.load(x_ptr + everywhere, mask=everywhere < IN, other=0.0).to(tl.float32)
            row_scale = scale_of(all_x, IS_FP8)
        else:
            row_scale = given_or_scale_of(x.to(tl.float32), given_ptr, GIVEN, IS_FP8)
        row = codes_of(x.to(tl.float32), row_scale, GIVEN, IS_FP8)
    place = tl.program_id(0).to(tl.int64)
    parts = part_ptr + place * (SPLITS * TILES * OUTPUTS)
    GROUPS: tl.constexpr = BLOCK_IN // GROUP if GROUP else 1
    COUNT: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP else 1
    for step in tl.static_range(TILES):
        tile = first + step
        wide = tiles[step].to(tl.float32)  # type: ignore[var-annotated]
        product = wide * row[None, :]
        if GROUP:
            at = matrix_rows(tile, OUT, OUTPUTS, GATED)
            group = begin // GROUP + tl.arange(0, GROUPS)
            mask = (tile * OUTPUTS + tl.arange(0, OUTPUTS) < OUT)[:, None] & (group < COUNT)[None, :]
            scale = tl.load(scale_ptr + (at // GROUP)[:, None] * COUNT + group[None, :], mask=mask, other=0.0)
            sums = tl.sum(tl.reshape(product, [OUTPUTS, GROUPS, GROUP]), axis=2)
            result = tl.sum(sums * row_scale[None, :] * scale, axis=1)
        else:
            result = tl.sum(product, axis=1) * row_scale
        if SPLITS > 1:
            tl.store(parts + (tl.program_id(1) * TILES + step) * OUTPUTS + tl.arange(0, OUTPUTS), result)
        else:
            if not GROUP:
                result *= output_scales(scale_ptr, tile, OUT, OUTPUTS, GATED)
            store_results(result, bias_ptr, out_ptr, tile, OUT, OUTPUTS, HAS_BIAS, GELU)
    if SPLITS > 1:
        # All threads' stores come before the release by the one that counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + place, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(counter_ptr + place, 0)
            for step in tl.static_range(TILES):
                sums_at = parts + step * OUTPUTS + tl.arange(0, OUTPUTS)
                result = add_parts(sums_at, TILES * OUTPUTS, tl.full([OUTPUTS], 1, tl.int1), SPLITS)
                if not GROUP:
                    result *= output_scales(scale_ptr, first + step, OUT, OUTPUTS, GATED)
                store_results(result, bias_ptr, out_ptr, first + step, OUT, OUTPUTS, HAS_BIAS, GELU)


_row = Launcher(_row_kernel, overlap=True)


def row_8bit(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    act: str | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    config: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, quantized, times a matrix of 8 bits.

    Args:
        x: `[1, in]`, float32, bfloat16 or float16.
        weight: float8_e4m3fn or int8 `[out, in]`, contiguous in the last dimension.
        scale: float32 `[out]`, or `[ceil(out / 128), ceil(in / 128)]`; then the row has a scale for every 128
            columns too.
        bias: `[out]` or None.
        given: float32 `[1]`, the row's scale; None: by its numbers.
        act: "silu" or "gelu_tanh": the first half of the outputs goes through it and multiplies the second,
            all rounded as by `activation.silu_and_mul` after an unfused product.
        norm: weight `[in]` and eps of an RMS norm before; rounded as by `norm.rms_norm`.
        residual: `[1, in]`, the stream, to which x is added before the norm; it stays as it is.
        config: a `RowConfig`; None: that of `row_config`.

    Returns:
        `[1, out]`, with `act` `[1, out / 2]`, of `x`'s dtype; and the new stream (a new tensor), or `x`.
    """
    size_in, size_out = x.shape[1], weight.shape[0]
    if x.shape[0] != 1 or act not in GELU:
        raise ValueError(f"got {x.shape[0]} rows and act={act!r}: one row, one of {list(GELU)}")
    alone = act is None and norm is None
    cut = RowConfig(*(config or row_config(size_in, size_out, alone)))
    if act is not None and cut.outputs < 2:
        raise ValueError(f"{cut}: an activation needs 2 or more outputs, a gate and its factor")
    if cut.splits > 1 and not alone:
        raise ValueError(f"{cut}: with a norm or an activation a program needs all inputs")
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    grouped = scale.dim() == 2
    columns = size_out if act is None else size_out // 2
    out = torch.empty((1, columns), dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty((1, size_in), dtype=x.dtype, device=x.device)
    norm_weight, eps = (scale, 0.0) if norm is None else norm
    chunk = size_in
    if cut.splits > 1:
        chunk = ceil_div(ceil_div(size_in, cut.splits), FP8_BLOCK) * FP8_BLOCK
    splits = ceil_div(size_in, chunk)
    programs = ceil_div(size_out, cut.outputs * cut.tiles)
    parts, counters = out, out
    if splits > 1:
        parts, counters = workspace(x.device).reserve(programs * splits * cut.tiles * cut.outputs, programs)
    least = FP8_BLOCK if grouped else 16
    _row(
        (programs, splits, 1),
        # Tensors that a variant has no use for are stood in for by others.
        (
            x, x if residual is None else residual, norm_weight, scale if given is None else given, weight,
            scale, scale if bias is None else bias, out, stream, parts, counters,
        ),
        (weight.stride(0),),
        (eps,),
        (
            size_in, size_out, chunk, max(power_of_2(chunk), least), power_of_2(size_in), cut.outputs,
            cut.tiles, splits, FP8_BLOCK if grouped else 0, given is not None,
            bias is not None, GELU[act], norm is not None, residual is not None,
        ),
        cut.warps,
    )  # fmt: skip
    return out, stream
