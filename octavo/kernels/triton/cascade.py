"""Attention to a beginning that all requests of a step share: its keys and values are read once for all.

Two launches do it ("cascade attention"; Hydragen, arXiv 2402.05099, ChunkAttention, arXiv 2402.15220).
`attend_shared` lets every row of the step see all of the shared positions: rows of all requests, and the
query heads of a KV head, are the lanes of one tile, and the positions are split over programs. It leaves
partial results, from which `attention.paged_decode` goes on with what follows in each request's context.

The shared length is read from the device, the grid follows from bounds: a recorded launch serves any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton import attention
from octavo.kernels.triton.attention import SharedPass
from octavo.kernels.triton.attention_steps import kv_steps, split_chunk, store_partial
from octavo.kernels.triton.attention_tiles import TileConfig
from octavo.kernels.triton.kv_codes import (
    KVCodes,
    cache_words,
    head_words,
    load_queries,
    product_dtype,
    units,
    view_cache,
)
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous

# Positions of the shortest split. A program writes `block_m` lanes of float32, which are read again: for 64
# lanes as many bytes as half of this many positions of two-byte keys and values.
MIN_CHUNK = 256


@triton.jit(do_not_specialize=["num_requests", "max_rows", "splits"])
def _attend_shared_kernel(
    q_ptr, cache_ptr, partial_ptr, query_start_ptr, shared_ptr, table_ptr, kv_scale_ptr,
    q_row, q_head, cache_block, num_requests, max_rows, splits, scale_log2, cap_scale,
    CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
    HOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile, split): a tile is BLOCK_M // GROUP rows of the step."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    k_unit, _ = units(kv_scale_ptr, kv_head, KV_HEADS, KIND, HOW)  # which no kernel writes
    if CAPPED:
        cap_scale *= k_unit
    else:
        scale_log2 *= k_unit
    wait_for_previous(OVERLAP)
    first_row = tl.program_id(1) * TILE_ROWS
    split = tl.program_id(2)
    rows = tl.load(query_start_ptr + num_requests)
    # Whole tiles need no mask; the few positions behind them are left to the decode kernel.
    shared = tl.load(shared_ptr) // BLOCK_N * BLOCK_N
    chunk = split_chunk(shared, splits, MIN_CHUNK, BLOCK_N)
    begin = split * chunk
    if (begin >= shared) | (first_row >= rows):
        return
    end = tl.minimum(begin + chunk, shared)

    m = tl.arange(0, BLOCK_M)
    row = (first_row + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    live = (m < TILE_ROWS * GROUP) & (row < rows)
    q, q_odd = load_queries(q_ptr + row * q_row + head * q_head, live, HEAD_DIM, BLOCK_W, KIND)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, acc_odd, row_max, row_sum = kv_steps(
        acc, acc_odd, row_max, row_sum, q, q_odd, begin, end, row, table_ptr,
        cache_words(cache_ptr, KIND) + kv_head * head_words(BLOCK_SIZE, HEAD_DIM, KIND), cache_block,
        scale_log2, cap_scale,
        0, CAPPED, False, HEAD_DIM, BLOCK_SIZE, KV_HEADS, BLOCK_N, BLOCK_W, STAGES, PRECISION, KIND, HOW,
    )  # fmt: skip
    every = max_rows.to(tl.int64) * HEADS
    at = split * every + row * HEADS + head
    max_ptr = partial_ptr + splits * every * HEAD_DIM
    store_partial(partial_ptr + at * HEAD_DIM, acc, acc_odd, live, HEAD_DIM, BLOCK_W, KIND)
    tl.store(max_ptr + at, row_max, mask=live)
    tl.store(max_ptr + splits * every + at, row_sum, mask=live)


_attend_shared = Launcher(_attend_shared_kernel, overlap=True)


def shared_config(
    lanes: int, group: int, head_dim: int, dtype: torch.dtype, shared_memory: int
) -> TileConfig:
    """Tile of the pass for so many lanes (rows of the step x query heads of a KV head, `group`): that of the
    prefill kernel, whose inner loop it runs, or half of it where that holds all lanes."""
    cfg = attention.prefill_config(head_dim, dtype, shared_memory)
    if cfg.block_m < 128:
        return TileConfig(max(cfg.block_m, power_of_2(group)), cfg.block_n, cfg.stages, cfg.warps)
    # Without spills, as compiled for 9.0: heads above 128 in 3 stages, and those that are padded by 8 warps.
    padded = head_dim < power_of_2(head_dim)
    if padded and head_dim > 128:
        return TileConfig(64, cfg.block_n, 3, 8)
    if lanes <= 64:  # 64 lanes and 4 warps are the least of Hopper's matrix instructions
        return TileConfig(64, cfg.block_n, 3, 4)
    return TileConfig(128, cfg.block_n, 3, 8 if padded else cfg.warps)


def shared_splits(
    rows: int, kv_heads: int, group: int, head_dim: int, bound: int, multiprocessors: int, tile: TileConfig
) -> int:
    """Into how many pieces a shared beginning of at most `bound` tokens is split, so that the programs fill
    the device: two of 4 warps run on a multiprocessor, whose registers and shared memory they fill."""
    programs = kv_heads * ceil_div(rows, tile.block_m // group)
    at_once = 2 if tile.warps == 4 and head_dim <= 128 else 1
    return attention.choose_splits(programs, bound, multiprocessors, at_once, MIN_CHUNK)


def shared_workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Elements of `SharedPass.partials`."""
    return splits * rows * heads * (head_dim + 2)


def attend_shared(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    num_requests: int,
    shared: SharedPass,
    scale: float,
    softcap: float | None = None,
    codes: KVCodes | None = None,
) -> None:
    """Partial results of all rows over the shared positions, into `shared.partials`.

    Args:
        q: `[rows, heads, head_dim]`, contiguous in the last dimension; rows from `query_start[num_requests]`
            on belong to nobody.
        cache, codes: as for `attention.paged_decode`, which must get the same.
        query_start, block_table: as in `AttentionMetadata` (int32); the first request's table names the
            shared blocks.
        shared: where to begin, how to split; its partial results are written.
        scale, softcap: as for `attention.paged_decode`.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    view = view_cache(cache, codes, query_start)
    kv_heads, dtype = view.kv_heads, product_dtype(q, codes)
    cfg = shared.config
    _attend_shared(
        (kv_heads, ceil_div(shared.rows, cfg.block_m // (heads // kv_heads)), shared.splits),
        (q, cache, shared.partials, query_start, shared.length, block_table, view.scale),
        (q.stride(0), q.stride(1), view.block),
        (num_requests, shared.rows, shared.splits, *attention.score_scales(scale, softcap)),
        (
            softcap is not None, heads, kv_heads, head_dim, view.block_size, shared.min_chunk, cfg.block_m,
            cfg.block_n, view.block_words, cfg.stages, attention.precision(dtype), view.kind, view.how,
        ),
        cfg.warps,
    )  # fmt: skip
