"""Experts' feed-forwards for the rows that chose them, without waiting for the host.

Few pairs (row, one of its experts) each go alone through products that read a matrix once. More are sorted
by expert on the device; tiles of up to BLOCK_M pairs of one expert then share its matrices. Grids follow
from shapes alone: the number of tiles is bounded, and programs beyond the last tile end at once. Each pair
has a row of its own in the result, and those of a row are added in the order of its experts, so that
results are the same bits every time. A pair of an expert that is not here (its number is that of the experts)
is in no tile, and adds nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.reference_moe import Linear
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2
from octavo.kernels.triton.moe_route import route as route


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Rounded where unfused layers round: gate and up, SiLU, the product."""
    gate = gate.to(dtype).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return act * up.to(dtype).to(tl.float32)


@triton.jit
def _pair_gate_up_kernel(
    x_ptr, w13_ptr, chosen_ptr, inner_ptr, x_row,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Program (p, b): BLOCK_OUT inner values of pair p."""
    pair = tl.program_id(0)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    if expert == EXPERTS:
        return
    out_at = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lanes = tl.arange(0, BLOCK_IN)
    gate_at = w13_ptr + (expert * (2 * INNER) + out_at)[:, None] * HIDDEN + lanes[None, :]
    x_at = x_ptr + (pair // TOP_K).to(tl.int64) * x_row + lanes
    gate = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in range(0, HIDDEN, BLOCK_IN):
        inside = start + lanes < HIDDEN
        mask = (out_at < INNER)[:, None] & inside[None, :]
        x = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_at + start, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(gate_at + INNER * HIDDEN + start, mask=mask, other=0.0).to(tl.float32) * x
    dtype = inner_ptr.dtype.element_ty
    value = _silu_and_mul(tl.sum(gate, axis=1), tl.sum(up, axis=1), dtype)
    tl.store(inner_ptr + pair.to(tl.int64) * INNER + out_at, value.to(dtype), mask=out_at < INNER)


@triton.jit
def _row_down_kernel(
    inner_ptr, w2_ptr, weights_ptr, chosen_ptr, out_ptr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Program (r, b): BLOCK_OUT results of row r, all its experts added; one reduction ends the program."""
    row = tl.program_id(0).to(tl.int64)
    out_at = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lanes = tl.arange(0, BLOCK_IN)
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for k in range(TOP_K):
        pair = row * TOP_K + k
        expert = tl.load(chosen_ptr + pair).to(tl.int64)
        present = expert < EXPERTS
        weight = tl.load(weights_ptr + pair)
        w_at = w2_ptr + (expert * HIDDEN + out_at)[:, None] * INNER + lanes[None, :]
        for start in range(0, INNER, BLOCK_IN):
            inside = (start + lanes < INNER) & present
            mask = (out_at < HIDDEN)[:, None] & inside[None, :]
            x = tl.load(inner_ptr + pair * INNER + start + lanes, mask=inside, other=0.0)
            w = tl.load(w_at + start, mask=mask, other=0.0)
            total += w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]
    result = tl.sum(total, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HIDDEN + out_at, result, mask=out_at < HIDDEN)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_kernel(
    chosen_ptr, order_ptr, tiles_ptr, num_pairs, max_tiles,
    EXPERTS: tl.constexpr, EXPERTS_P2: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e: the places of expert e's pairs in the order, and its tiles.

    tiles: int32 [max_tiles, 4]: expert (-1: no tile), first place, the one after the expert's last, unused.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    bins = tl.arange(0, EXPERTS_P2)  # there is one at least beyond the experts: for lanes without a pair
    counts = tl.zeros([EXPERTS_P2], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(chosen_ptr + start + lanes, mask=start + lanes < num_pairs, other=EXPERTS)
        counts += tl.histogram(ids, EXPERTS_P2)
    counts = tl.where(bins < EXPERTS, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    if mine > 0:
        at = first
        for start in range(0, num_pairs, CHUNK):
            ids = tl.load(chosen_ptr + start + lanes, mask=start + lanes < num_pairs, other=EXPERTS)
            match = (ids == expert).to(tl.int32)
            place = at + tl.cumsum(match, axis=0) - 1
            tl.store(order_ptr + place, start + lanes, mask=match > 0)
            at += tl.sum(match, axis=0)
        for i in range(0, (mine + BLOCK_M - 1) // BLOCK_M):
            entry = tiles_ptr + (tile + i) * 4
            tl.store(entry, expert)
            tl.store(entry + 1, first + i * BLOCK_M)
            tl.store(entry + 2, first + mine)
    if expert == EXPERTS - 1:
        for i in range(tl.sum(tiles, axis=0), max_tiles):
            tl.store(tiles_ptr + i * 4, -1)


@triton.jit
def _tile_gate_up_kernel(
    x_ptr, w13_ptr, order_ptr, tiles_ptr, inner_ptr, x_row,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (t, b): BLOCK_N inner values of tile t's pairs, written in sorted order."""
    entry = tiles_ptr + tl.program_id(0) * 4
    expert = tl.load(entry).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
    present = places < tl.load(entry + 2)
    rows = tl.load(order_ptr + places, mask=present, other=0) // TOP_K
    out_at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_row + lanes[None, :]
    gate_at = w13_ptr + (expert * (2 * INNER) + out_at)[None, :] * HIDDEN + lanes[:, None]
    up_at = gate_at + INNER * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        if HIDDEN % BLOCK_K == 0 and INNER % BLOCK_N == 0:
            x = tl.load(x_at + start, mask=present[:, None], other=0.0)
            w_gate = tl.load(gate_at + start)
            w_up = tl.load(up_at + start)
        else:
            inside = start + lanes < HIDDEN
            mask = inside[:, None] & (out_at < INNER)[None, :]
            x = tl.load(x_at + start, mask=present[:, None] & inside[None, :], other=0.0)
            w_gate = tl.load(gate_at + start, mask=mask, other=0.0)
            w_up = tl.load(up_at + start, mask=mask, other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
        up = tl.dot(x, w_up, up, input_precision=PRECISION)
    dtype = inner_ptr.dtype.element_ty
    value = _silu_and_mul(gate, up, dtype).to(dtype)
    target = inner_ptr + places.to(tl.int64)[:, None] * INNER + out_at[None, :]
    tl.store(target, value, mask=present[:, None] & (out_at < INNER)[None, :])


@triton.jit
def _tile_down_kernel(
    inner_ptr, w2_ptr, weights_ptr, order_ptr, tiles_ptr, parts_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (t, b): BLOCK_N weighted results of tile t's pairs, each written at its pair's number."""
    entry = tiles_ptr + tl.program_id(0) * 4
    expert = tl.load(entry).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
    present = places < tl.load(entry + 2)
    pairs = tl.load(order_ptr + places, mask=present, other=0)
    out_at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    x_at = inner_ptr + places.to(tl.int64)[:, None] * INNER + lanes[None, :]
    w_at = w2_ptr + (expert * HIDDEN + out_at)[None, :] * INNER + lanes[:, None]
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        if INNER % BLOCK_K == 0 and HIDDEN % BLOCK_N == 0:
            x = tl.load(x_at + start, mask=present[:, None], other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = start + lanes < INNER
            x = tl.load(x_at + start, mask=present[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None] & (out_at < HIDDEN)[None, :], other=0.0)
        result = tl.dot(x, w, result, input_precision=PRECISION)
    result *= tl.load(weights_ptr + pairs, mask=present, other=0.0)[:, None]
    target = parts_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + out_at[None, :]
    tl.store(
        target, result.to(parts_ptr.dtype.element_ty), mask=present[:, None] & (out_at < HIDDEN)[None, :]
    )


@triton.jit
def _add_parts_kernel(
    parts_ptr, chosen_ptr, out_ptr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        mask = (cols < HIDDEN) & (tl.load(chosen_ptr + pair) < EXPERTS)
        part = tl.load(parts_ptr + pair * HIDDEN + cols, mask=mask, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + cols, total.to(out_ptr.dtype.element_ty), mask=cols < HIDDEN)


_pair_gate_up = Launcher(_pair_gate_up_kernel)
_row_down = Launcher(_row_down_kernel)
_sort = Launcher(_sort_kernel)
_tile_gate_up = Launcher(_tile_gate_up_kernel)
_tile_down = Launcher(_tile_down_kernel)
_add_parts = Launcher(_add_parts_kernel)


class Block(NamedTuple):
    """Columns of a tile, inner elements of a step, warps, stages of loads in flight."""

    n: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Pairs of a tile, and how each product cuts its matrices."""

    m: int
    gate_up: Block
    down: Block


# By pairs of an expert, on average, up to which the tiles are used. `gate_up` holds two matrices.
_TILES_16: tuple[tuple[float, Tiles], ...] = (
    (8, Tiles(16, Block(32, 128, 4, 4), Block(64, 128, 4, 4))),
    (24, Tiles(32, Block(64, 64, 4, 4), Block(64, 128, 4, 4))),
    (96, Tiles(64, Block(64, 64, 4, 4), Block(128, 64, 4, 4))),
    (float("inf"), Tiles(128, Block(64, 64, 8, 4), Block(128, 64, 8, 4))),
)
# Without tensor cores ("ieee"), for parity rather than speed.
_TILES_32: tuple[tuple[float, Tiles], ...] = (
    (8, Tiles(16, Block(32, 32, 4, 2), Block(32, 32, 4, 2))),
    (float("inf"), Tiles(32, Block(32, 32, 4, 2), Block(64, 32, 4, 2))),
)


@functools.cache
def _shared_memory(device: int) -> int:
    """Bytes of shared memory that a program can have; without a device (the interpreter) as on an H100."""
    if device < 0:
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - 1024


def _fit(block: Block, m: int, matrices: int, itemsize: int, limit: int) -> Block:
    """The block with as many stages as fit into shared memory, some of which conversions of layout take."""
    stage = (m + matrices * block.n) * block.k * itemsize
    return block._replace(stages=max(1, min(block.stages, limit // stage)))


@functools.cache
def tiles_for(pairs: int, num_experts: int, itemsize: int, device: int) -> Tiles:
    """The tiles for so many pairs (a power of 2, to keep the number of variants small)."""
    table = _TILES_32 if itemsize == 4 else _TILES_16
    m, gate_up, down = next(tiles for most, tiles in table if pairs <= most * num_experts)
    limit = _shared_memory(device)
    return Tiles(m, _fit(gate_up, m, 2, itemsize, limit), _fit(down, m, 1, itemsize, limit))


def most_tiles(pairs: int, num_experts: int, m: int) -> int:
    """How many tiles of `m` pairs there are at most, however the experts are chosen."""
    hit = min(pairs, num_experts)
    return hit + (pairs - hit) // m


def goes_alone(rows: int, top_k: int, num_experts: int) -> bool:
    """Whether pairs hardly share experts, so that sorting them would only cost time."""
    return rows == 1 or rows * top_k * 8 <= num_experts


def sort_pairs(chosen: torch.Tensor, num_experts: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert, those of one in their own order, and the tiles of up to `m` that they make.

    Args:
        chosen: int32 `[rows, top_k]`, contiguous.

    Returns:
        order int32 `[pairs]`; tiles int32 `[most_tiles, 4]`: expert (-1: no tile), place in the order of its
        first pair, place after the expert's last pair, unused.
    """
    pairs = chosen.numel()
    bound = most_tiles(pairs, num_experts, m)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    table = torch.empty((bound, 4), dtype=torch.int32, device=chosen.device)
    _sort(
        (num_experts, 1, 1),
        (chosen, order, table),
        (),
        (pairs, bound),
        (num_experts, power_of_2(num_experts + 1), m, 256 if pairs <= 256 else 1024),
        4,
    )
    return order, table


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    linear: Linear | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`reference_moe.experts`, whose arguments these are, for float32, bfloat16 and float16.

    Args:
        linear: not used.
        tiles: sort the pairs and cut them so; None: what was found best.
    """
    rows, hidden = x.shape
    num_experts, _, inner_size = w2.shape
    top_k = chosen.shape[1]
    pairs = rows * top_k
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    inner = torch.empty((pairs, inner_size), dtype=x.dtype, device=x.device)
    if tiles is None and goes_alone(rows, top_k, num_experts):
        block, warps = _lanes(hidden), 4
        _pair_gate_up(
            (pairs, ceil_div(inner_size, 2), 1),
            (x, w13, chosen, inner),
            (x.stride(0),),
            (),
            (num_experts, hidden, inner_size, top_k, 2, block),
            warps,
        )
        _row_down(
            (rows, ceil_div(hidden, 2), 1),
            (inner, w2, weights, chosen, out),
            (),
            (),
            (num_experts, hidden, inner_size, top_k, 2, _lanes(inner_size)),
            warps,
        )
        return out
    tiles = tiles or tiles_for(power_of_2(pairs), num_experts, x.element_size(), x.get_device())
    order, table = sort_pairs(chosen, num_experts, tiles.m)
    bound = len(table)
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    n, k, warps, stages = tiles.gate_up
    _tile_gate_up(
        (bound, ceil_div(inner_size, n), 1),
        (x, w13, order, table, inner),
        (x.stride(0),),
        (),
        (hidden, inner_size, top_k, precision, tiles.m, n, k, stages),
        warps,
    )
    parts = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    n, k, warps, stages = tiles.down
    _tile_down(
        (bound, ceil_div(hidden, n), 1),
        (inner, w2, weights, order, table, parts),
        (),
        (),
        (hidden, inner_size, precision, tiles.m, n, k, stages),
        warps,
    )
    block = min(1024, power_of_2(hidden))
    _add_parts(
        (rows, ceil_div(hidden, block), 1),
        (parts, chosen, out),
        (),
        (),
        (num_experts, hidden, top_k, block),
        4 if block > 256 else 1,
    )
    return out


def _lanes(size: int) -> int:
    """Elements of a step: the largest power of 2 up to 1024 that divides `size`, if it is not too small."""
    power = min(1024, size & -size)
    return power if power >= 128 else min(1024, power_of_2(size))
