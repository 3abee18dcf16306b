"""Products of up to 256 rows with a weight matrix on the tensor cores, bound by reading the weights.

A program streams BLOCK_OUT rows of the matrix through shared memory, several tiles in flight. It is
started while the kernel before it still runs, and sends for its first weights, which no kernel writes,
before it waits for the rows. Where a matrix has too few outputs to occupy the device, `splits` programs
share the inputs of a tile, and the last of them to finish adds their sums in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, prefetch_l2, wait_for_previous
from octavo.kernels.triton.split_sums import end_tile
from octavo.kernels.triton.unpack import by_ptx, unpack_bytes
from octavo.kernels.triton.workspace import workspace

MAX_ROWS = 256
_ACTS = {None: 0, "silu": 1, "gelu_tanh": 2}
BYTES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as kernels call them


class SkinnyConfig(NamedTuple):
    """How `skinny_linear` cuts its matrix.

    Attributes:
        block_out: outputs of a program (gated: columns of the result, of two matrix rows each).
        block_in: inputs of a step.
        stages: steps in flight, and the one at work.
        warps: of a program.
        splits: programs that share the inputs of one tile of outputs.
        prefetch: KiB of its weights that a program sends for before it waits for the kernel ahead.
        weights_first: multiply `W x^T`, with weights in the rows of the tensor cores' tiles; else `x W^T`.
        tile_rows: rows of a program, a power of 2; 0: all. More than there are let Hopper's instructions,
            whose tiles have 64 rows, multiply `x W^T`; fewer leave the rest to other programs, which find the
            weights in the L2.
    """

    block_out: int
    block_in: int
    stages: int
    warps: int
    splits: int = 1
    prefetch: int = 0
    weights_first: bool = True
    tile_rows: int = 0


@triton.jit
def _multiply(weights, x, acc, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
              PACKED: tl.constexpr):  # fmt: skip
    if BYTES:
        weights = unpack_bytes(weights, x.dtype, BYTES == 2, PACKED)
    if WEIGHTS_FIRST:
        return tl.dot(weights, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(weights), acc, input_precision=PRECISION)


@triton.jit
def _scaled(acc, scale_at, WEIGHTS_FIRST: tl.constexpr):
    """Sums times the scales of their outputs."""
    scale = tl.load(scale_at)
    if WEIGHTS_FIRST:
        return acc * scale[:, None]
    else:
        return acc * scale[None, :]


@triton.jit
def _add_step(acc, weights, x, scale_at, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
              BYTES: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """`acc` and a step's product, whose scales come now if GROUP."""
    if GROUP:
        none = tl.zeros([acc.shape[0], acc.shape[1]], tl.float32)
        product = _multiply(weights, x, none, WEIGHTS_FIRST, PRECISION, BYTES, PACKED)
        return acc + _scaled(product, scale_at, WEIGHTS_FIRST)
    else:
        return _multiply(weights, x, acc, WEIGHTS_FIRST, PRECISION, BYTES, PACKED)


@triton.jit(do_not_specialize=["rows", "steps", "prefetch"])
def _skinny_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, counter_ptr,
    x_row, weight_row, scale_row, out_row, size_in, size_out, rows, steps, prefetch,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, PIECES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (r, p, s): the p-th BLOCK_OUT outputs of the r-th BLOCK_ROWS rows, over the s-th `steps` times
    BLOCK_IN inputs.

    With ACT, `size_out` is that of the result: its column i comes of the matrix's rows i and size_out + i.
    EVEN promises that no step reaches beyond `size_in`. Sums of split programs: float32
    `[tiles, SPLITS, 2 with ACT, BLOCK_OUT * BLOCK_ROWS]`. `prefetch` bytes are sent for at each of PIECES
    places of a matrix row, one after the other.

    BYTES: the matrix is of int8 (1) or E4M3 (2). Its scales are for rows alone (GROUP 0), or for TALL rows
    and GROUP columns, a multiple of BLOCK_IN.
    """
    tile = tl.program_id(1)
    begin = tl.program_id(2) * steps * BLOCK_IN
    end = tl.minimum(begin + steps * BLOCK_IN, size_in)
    out_at = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Beyond the last output the last one is read again, and not stored: loads without a mask.
    row_at = tl.minimum(out_at, size_out - 1)
    weight_at = weight_ptr + row_at.to(tl.int64) * weight_row
    scale_at = scale_ptr + row_at // TALL * scale_row
    up_scale_at = scale_ptr + (row_at + size_out) // TALL * scale_row
    up_offset = tl.cast(size_out, tl.int64) * weight_row  # may be the constant 1
    if OVERLAP:
        if (prefetch > 0) & (tl.program_id(0) == 0):
            lane = tl.arange(0, BLOCK_OUT * PIECES)
            first = tl.minimum(tile * BLOCK_OUT + lane % BLOCK_OUT, size_out - 1).to(tl.int64) * weight_row
            at = (weight_ptr + first + begin).to(tl.int64) + lane // BLOCK_OUT * prefetch
            prefetch_l2(at, prefetch)
            if ACT:
                prefetch_l2(at + up_offset * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8), prefetch)
    wait_for_previous(OVERLAP)

    lanes = tl.arange(0, BLOCK_IN)
    row_in_tile = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0) * BLOCK_ROWS + row_in_tile
    present = row < rows
    x_at = x_ptr + row[:, None] * x_row + lanes[None, :]
    weight_at = weight_at[:, None] + lanes[None, :]
    if WEIGHTS_FIRST:
        acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    else:
        acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = acc
    for start in tl.range(begin, end, BLOCK_IN, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + start, mask=present[:, None], other=0.0)
            w = tl.load(weight_at + start, eviction_policy="evict_first")
        else:
            inside = (start + lanes < end)[None, :]
            x = tl.load(x_at + start, mask=present[:, None] & inside, other=0.0)
            w = tl.load(weight_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
        group = start // GROUP if GROUP else 0
        acc = _add_step(acc, w, x, scale_at + group, WEIGHTS_FIRST, PRECISION, BYTES, PACKED, GROUP)
        if ACT:
            if EVEN:
                w_up = tl.load(weight_at + up_offset + start, eviction_policy="evict_first")
            else:
                w_up = tl.load(
                    weight_at + up_offset + start, mask=inside, other=0.0, eviction_policy="evict_first"
                )
            up = _add_step(up, w_up, x, up_scale_at + group, WEIGHTS_FIRST, PRECISION, BYTES, PACKED, GROUP)

    if BYTES and not GROUP:
        acc = _scaled(acc, scale_at, WEIGHTS_FIRST)
        if ACT:
            up = _scaled(up, up_scale_at, WEIGHTS_FIRST)
    end_tile(
        acc, up, bias_ptr, out_ptr, part_ptr, counter_ptr, out_row, size_out, rows,
        BLOCK_ROWS, BLOCK_OUT, SPLITS, WEIGHTS_FIRST, HAS_BIAS, ACT,
    )  # fmt: skip


_skinny_linear = Launcher(_skinny_linear_kernel, overlap=True)


def prefetch_size(weight: torch.Tensor, rows: int, chunk: int, kib: int, pieces: int) -> int:
    """Bytes to send for at each of `pieces` places of a matrix row, when a program has `rows` such rows;
    0 where addresses or sizes are not multiples of 16."""
    size = weight.element_size()
    if weight.data_ptr() % 16 or weight.stride(0) * size % 16 or chunk * size % 16:
        return 0
    # The last chunk of a row may be shorter than the others.
    last = weight.shape[1] % chunk or chunk
    return min((kib << 10) // rows, last * size) // (16 * pieces) * 16


def scale_shape(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, int]:
    """Rows and columns that share one of a matrix's scales; 0 columns: all."""
    if scale is None or scale.dim() == 1:
        return 1, 0
    if scale.shape[0] == weight.shape[0]:
        return 1, 0 if scale.shape[1] == 1 else weight.shape[1] // scale.shape[1]
    return 128, 128


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    act: str | None,
    config: SkinnyConfig,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, with float32 sums, or a gated activation of it, for at most `MAX_ROWS` rows.

    Args:
        x: `[rows, in]`, bfloat16 or float16 (float32 works, without the tensor cores).
        weight: `[out, in]` of `x`'s dtype, int8 or float8_e4m3fn (finite numbers), contiguous in the last
            dimension.
        bias: `[out]` or None.
        act: None; or "silu" or "gelu_tanh": with `gate, up = halves of the product`, the result is
            `act(gate) * up`, each rounded to `x`'s dtype in between (`octavo.kernels.triton.activation`).
        config: `octavo.kernels.triton.linear_choice` knows good ones.
        scale: of a matrix of 8 bits, float32: `[out]`, `[out, in / group]`, or (with fewer rows than the
            matrix) of blocks of 128 x 128, in groups that are multiples of `block_in`.

    Returns:
        `[rows, out]` of `x`'s dtype, `[rows, out / 2]` with `act`.

    Raises:
        ValueError: more rows than `MAX_ROWS`, an activation of another name.
    """
    rows, size_in = x.shape
    tall, group = scale_shape(weight, scale)
    if group % config.block_in:
        raise ValueError(f"{config}: a step's inputs must share a scale, which {group} have")
    if rows > MAX_ROWS or act not in _ACTS:
        raise ValueError(f"got {rows} rows and act={act!r}: at most {MAX_ROWS}, one of {list(_ACTS)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    matrices = 2 if act else 1
    size_out = weight.shape[0] // matrices
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block_out, block_in, stages, warps, splits, kib, weights_first, block_rows = config
    block_rows = block_rows or max(16, power_of_2(rows))
    row_tiles = ceil_div(rows, block_rows)
    tiles = ceil_div(size_out, block_out)
    steps = ceil_div(ceil_div(size_in, block_in), splits)
    splits = ceil_div(size_in, steps * block_in)
    parts, counters = out, out
    if splits > 1:
        places = tiles * row_tiles
        size = places * splits * matrices * block_out * block_rows
        parts, counters = workspace(x.device).reserve(size, places)
    pieces = max(1, 32 * warps // block_out)
    _skinny_linear(
        (row_tiles, tiles, splits),
        (
            x,
            weight if scale is None else weight.view(torch.int8),
            out if scale is None else scale,
            out if bias is None else bias,
            out,
            parts,
            counters,
        ),
        (x.stride(0), weight.stride(0), 0 if scale is None else scale.stride(0), size_out, size_in, size_out),
        (rows, steps, prefetch_size(weight, matrices * block_out, steps * block_in, kib, pieces)),
        (
            block_rows, block_out, block_in, stages, splits, pieces, weights_first, size_in % block_in == 0,
            bias is not None, _ACTS[act], "ieee" if x.dtype == torch.float32 else "tf32",
            BYTES[weight.dtype] if scale is not None else 0, by_ptx(), group, tall,
        ),
        warps,
    )  # fmt: skip
    return out
