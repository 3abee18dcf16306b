"""Products with a weight matrix whose every row is the same bits whatever rows stand beside it.

An output element is one chain of float32 sums: over the input in order, in steps of the matrix
instruction's depth, by one program. Nothing else enters it:

* The input is never split over programs or warps, and blocks of it follow each other in order, so how
  many columns a block has does not matter (a last block's padding adds zeros).
* Every tile is multiplied by the same kind of instruction. On Hopper that takes 64 rows and a warp group
  of four warps (wgmma), so tiles have 64 or 128 rows and four or eight warps even for a single row; before
  Hopper all tiles take mma. Both compute an element of their result from its row of one operand and its
  column of the other alone. float32 is multiplied and added number by number.
* What depends on tile and alignment (how data reaches the registers) moves numbers and computes none.

So a tile may be chosen by the number of rows. That all of them agree bit by bit is tested on the device,
over `TILES`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, wait_for_previous


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_row, weight_row, rows,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: one tile of the output. Eight tiles of rows take a block of columns in turn, so that what
    runs at one time shares its inputs in the L2."""
    TILES_N: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    GROUP: tl.constexpr = 8
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m = pid // (GROUP * TILES_N) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + pid % (GROUP * TILES_N) % group
    tile_n = pid % (GROUP * TILES_N) // group
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * weight_row + k[:, None]
    live_m, live_n = (m < rows)[:, None], (n < OUT)[None, :]
    wait_for_previous(OVERLAP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        if IN % BLOCK_K == 0:
            x = tl.load(x_at + start, mask=live_m, other=0.0)
            if OUT % BLOCK_N == 0:
                weight = tl.load(weight_at + start)
            else:
                weight = tl.load(weight_at + start, mask=live_n, other=0.0)
        else:
            live_k = start + k < IN
            x = tl.load(x_at + start, mask=live_m & live_k[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=live_n & live_k[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + m.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live_m & live_n)


# Sums are those of the matrix instructions and of the bias alone; nothing may be fused with them.
_invariant_linear = Launcher(_invariant_linear_kernel, overlap=True, enable_fp_fusion=False)


@dataclass(frozen=True)
class LinearTile:
    """Rows, outputs and inputs of a program's block, pipeline stages and warps."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int

    @property
    def shared_memory(self) -> int:
        """Bytes that its two-byte operands take in flight, about."""
        return (self.block_m + self.block_n) * self.block_k * 2 * self.stages


# Every tile that `choose_tile` may take, from the narrowest on: for few rows, and for many.
TILES: dict[bool, tuple[tuple[LinearTile, ...], tuple[LinearTile, ...]]] = {
    # Two-byte types. Few rows: as much of the weights in flight as two programs a multiprocessor can hold.
    False: (
        (
            LinearTile(64, 16, 128, 5, 4),
            LinearTile(64, 32, 128, 4, 4),
            LinearTile(64, 64, 128, 3, 4),
        ),
        (
            LinearTile(128, 32, 128, 3, 8),
            LinearTile(128, 64, 128, 3, 8),
            LinearTile(128, 128, 64, 4, 8),
            LinearTile(128, 256, 64, 3, 8),
        ),
    ),
    # float32, by multiply-add.
    True: (
        (LinearTile(16, 32, 64, 2, 4),),
        (LinearTile(64, 64, 16, 2, 8),),
    ),
}
FEW_ROWS = 64  # up to which one tile of rows holds all


def all_tiles(dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """The tiles for matrices of a type, whose results are the same bits."""
    few, many = TILES[dtype == torch.float32]
    return few + many


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 132, 227 << 10  # the interpreter, and compilation without a device: as an H200
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 1024


def choose_tile(rows: int, size_out: int, dtype: torch.dtype, processors: int, memory: int) -> LinearTile:
    """The widest tile with which there are programs for all multiprocessors; if none has, the narrowest.

    Args:
        rows: of the product.
        size_out: its columns.
        dtype: of both matrices.
        processors: multiprocessors of the device.
        memory: bytes of shared memory that a program can have.
    """
    few, many = TILES[dtype == torch.float32]
    wide = 1 if rows > FEW_ROWS else 2  # programs a multiprocessor: few rows are a matter of bandwidth
    tiles = [t for t in (many if rows > FEW_ROWS else few) if t.shared_memory <= memory] or [few[1]]
    for tile in reversed(tiles):
        if ceil_div(rows, tile.block_m) * ceil_div(size_out, tile.block_n) >= wide * processors:
            return tile
    return tiles[0]


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` with float32 sums, each row independent of the others to the bit.

    Args:
        x: `[rows, in]`, bfloat16, float16 or float32 (not rounded to tf32).
        weight: `[out, in]` of the same type, contiguous in the last dimension.
        bias: `[out]` or None.
        tile: see `choose_tile`; None: its choice. The result is the same with each of `all_tiles`.

    Returns:
        `[rows, out]` of `x`'s dtype.
    """
    rows, size_in = x.shape
    size_out = weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if tile is None:
        tile = choose_tile(rows, size_out, x.dtype, *_device(x.device))
    _invariant_linear(
        (ceil_div(rows, tile.block_m) * ceil_div(size_out, tile.block_n), 1, 1),
        (x, weight, weight if bias is None else bias, out),
        (x.stride(0), weight.stride(0)),
        (rows,),
        (
            size_in, size_out, tile.block_m, tile.block_n, tile.block_k, tile.stages, bias is not None,
            "ieee" if x.dtype == torch.float32 else "tf32",
        ),
        tile.warps,
    )  # fmt: skip
    return out
