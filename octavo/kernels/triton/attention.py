"""Causal attention over the paged KV cache, for ragged batches.

Two kernels read one cache and one metadata. `paged_decode` is for requests with few rows: it
splits each context over programs (flash-decoding) and the last program to finish a head combines
the splits, so that a step is one launch. `paged_prefill` is for requests with many rows: tiles of
rows, FlashAttention-like (arXiv 2205.14135, 2307.08691). Both put all query heads of a KV head in
one tile, so that K and V are read once per group.

Grids come from what the host knows (shapes and upper bounds), never from device data; programs
without work leave early. A launch recorded in a CUDA graph therefore serves any lengths below the
bounds it was recorded with.

Under a sliding window both start at the block of the first position that any row of theirs sees:
earlier blocks may belong to another request by now, and neither they nor their table entries are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.attention_splits import Pieces, combine
from octavo.kernels.triton.attention_steps import (
    combine_splits,
    kv_steps,
    merge_partials,
    pieces_of,
    send_for_blocks,
    split_chunk,
    store_partial,
)
from octavo.kernels.triton.attention_tiles import (
    TileConfig,
    decode_config,
    prefill_config,
    quantized_decode_config,
    shared_memory,
)
from octavo.kernels.triton.kv_codes import (
    AS_IS,
    KVCodes,
    cache_words,
    head_words,
    load_queries,
    product_dtype,
    store_heads,
    units,
    view_cache,
    words_of,
)
from octavo.kernels.triton.launch import (
    Launcher,
    await_previous,
    ceil_div,
    let_next_start,
    power_of_2,
    wait_for_previous,
)
from octavo.kernels.triton.rotary_row import (
    Unrotated,
    load_rotated_queries,
    load_rotated_row,
    store_one_head,
)

LOG2E = 1.4426950408889634


# Arguments that change from step to step must not select another compiled variant.
@triton.jit(do_not_specialize=["first_request", "splits", "table_row", "shared_rows", "shared_splits"])
def _paged_decode_kernel(
    q_ptr, cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr, partial_ptr, counter_ptr,
    shared_ptr, shared_partial_ptr, kv_scale_ptr,
    k_ptr, v_ptr, angles_ptr, slot_ptr, q_weight_ptr, k_weight_ptr, kv_centre_ptr,
    q_row, q_head, out_row, cache_block, k_head, v_head,
    first_request, splits, table_row, shared_rows, shared_splits, scale_log2, cap_scale, eps,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, SPLIT: tl.constexpr,
    MIN_CHUNK: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, SENT: tl.constexpr, LANES: tl.constexpr,
    ROT_DIM: tl.constexpr, HAS_NORM: tl.constexpr, CENTRED: tl.constexpr, APART: tl.constexpr,
    SHARED_TILE: tl.constexpr, SHARED_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (kv head, request - first_request, split); SPLIT False promises that `splits` is 1.

    Partial results: accumulators `[requests, kv_heads, splits, TILE, HEAD_DIM]`, then their maxima
    and then their sums, `[requests, kv_heads, splits, TILE]` each.

    With SHARED_TILE each context begins behind the positions that `octavo.kernels.triton.cascade` has
    attended to; the first split goes on from those results, so that what follows knows no difference.

    With EARLY lengths, starts and block tables are read before the wait (`paged_decode` says when that is
    safe), and the first SENT positions of a program are sent for. Not more than that: queries, and keys and
    values of other requests' rows in blocks that are shared, are written by the kernel before.
    LANES: threads of a program.
    APART: partial results are left for `_combine_kernel`; else the last program of a head adds them up.

    With ROT_DIM there is one request of one row, which `rotary_kv` has not been at: queries are rotated as
    they are read, and the program whose positions end with the row's own stores its key and value.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE: tl.constexpr = MAX_ROWS * GROUP
    WORDS: tl.constexpr = words_of(HEAD_DIM, KIND)
    kv_head = tl.program_id(0)
    k_unit, v_unit = units(kv_scale_ptr, kv_head, KV_HEADS, KIND, HOW)  # which no kernel writes
    if CAPPED:
        cap_scale *= k_unit
    else:
        scale_log2 *= k_unit
    let_next_start(OVERLAP)
    if not EARLY:
        await_previous(OVERLAP)
    slot = tl.program_id(1)
    request = first_request + slot
    split = tl.program_id(2)
    # Past the L1, which may hold what was there before, until the wait.
    context = tl.load(seq_len_ptr + request, cache_modifier=".cg")
    first_row = tl.load(query_start_ptr + request, cache_modifier=".cg").to(tl.int64)
    rows = (tl.load(query_start_ptr + request + 1, cache_modifier=".cg") - first_row).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context - rows - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    if SHARED_TILE > 0:
        low = tl.load(shared_ptr, cache_modifier=".cg") // SHARED_TILE * SHARED_TILE
    chunk, used = pieces_of(context - low, splits, SPLIT, WHOLE, MIN_CHUNK, BLOCK_N)
    # Without a wait: the first split's programs do wait, and so this kernel ends behind the one before.
    if split >= used:
        return
    begin = low + split * chunk
    end = tl.where(rows > 0, tl.minimum(begin + chunk, context), 0)
    table = table_ptr + request.to(tl.int64) * table_row
    head_ptr = cache_words(cache_ptr, KIND) + kv_head * head_words(BLOCK_SIZE, HEAD_DIM, KIND)
    blocks = None
    if EARLY:
        pos = begin + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + pos // BLOCK_SIZE, mask=pos < end, other=0, cache_modifier=".cg")
        if SENT > 0 and OVERLAP:
            send_for_blocks(
                table, head_ptr, cache_block, begin, tl.minimum(end, begin + SENT), HEAD_DIM, BLOCK_SIZE,
                KV_HEADS, KIND, LANES,
            )  # fmt: skip
        await_previous(OVERLAP)
    if (rows <= 0) | (context <= 0):
        return

    m = tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = m < rows * GROUP
    if ROT_DIM > 0:
        # All that is read comes before what waits for it, as no load is moved up over a branch or a store.
        slot_of_row = tl.load(slot_ptr)
        k, v = load_rotated_row(
            k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, angles_ptr, k_weight_ptr, eps,
            HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM,
        )  # fmt: skip
        q, q_odd = load_rotated_queries(
            q_ptr + head * q_head, live, angles_ptr, q_weight_ptr, eps,
            HEAD_DIM, ROT_DIM, BLOCK_D, BLOCK_W, HAS_NORM, KIND,
        )  # fmt: skip
        if end == context:
            store_one_head(
                k, v, cache_ptr, cache_block * (1 if KIND == AS_IS else 2), slot_of_row, kv_scale_ptr,
                kv_centre_ptr, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KIND, CENTRED,
            )  # fmt: skip
            tl.debug_barrier()  # other threads of the program read it
    else:
        q, q_odd = load_queries(
            q_ptr + (first_row + row) * q_row + head * q_head, live, HEAD_DIM, BLOCK_W, KIND
        )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SHARED_TILE > 0:
        parts = tl.cdiv(low, split_chunk(low, shared_splits, SHARED_CHUNK, SHARED_TILE))
        parts = tl.where(split == 0, parts, 0)
        every = shared_rows.to(tl.int64) * HEADS
        shared_max_ptr = shared_partial_ptr + shared_splits * every * HEAD_DIM
        shared_sum_ptr = shared_max_ptr + shared_splits * every
        tile = tl.arange(0, BLOCK_T)
        tile_live = tile < rows * GROUP
        at_tile = (first_row + tile // GROUP) * HEADS + kv_head * GROUP + tile % GROUP
        begun, begun_max, begun_sum = merge_partials(
            shared_partial_ptr, shared_max_ptr, shared_sum_ptr, at_tile, every, parts, tile_live,
            HEAD_DIM, WORDS, BLOCK_W, BLOCK_T, BLOCK_S,
        )  # fmt: skip
        # Lanes beyond the tile repeat it: they are written nowhere.
        COPIES: tl.constexpr = BLOCK_M // BLOCK_T
        acc = tl.broadcast_to(begun[None, :, :], [COPIES, BLOCK_T, BLOCK_W]).reshape(BLOCK_M, BLOCK_W)
        row_max = tl.broadcast_to(begun_max[None, :], [COPIES, BLOCK_T]).reshape(BLOCK_M)
        row_sum = tl.broadcast_to(begun_sum[None, :], [COPIES, BLOCK_T]).reshape(BLOCK_M)
        if KIND != AS_IS:
            begun, _, _ = merge_partials(
                shared_partial_ptr + WORDS, shared_max_ptr, shared_sum_ptr, at_tile, every, parts, tile_live,
                HEAD_DIM, WORDS, BLOCK_W, BLOCK_T, BLOCK_S,
            )  # fmt: skip
            acc_odd = tl.broadcast_to(begun[None, :, :], [COPIES, BLOCK_T, BLOCK_W]).reshape(BLOCK_M, BLOCK_W)
    acc, acc_odd, row_max, row_sum = kv_steps(
        acc, acc_odd, row_max, row_sum, q, q_odd, begin, end, context - rows + row, table, head_ptr,
        cache_block, scale_log2, cap_scale,
        WINDOW, CAPPED, True, HEAD_DIM, BLOCK_SIZE, KV_HEADS, BLOCK_N, BLOCK_W, STAGES, PRECISION, KIND, HOW,
        blocks,
    )  # fmt: skip
    if used == 1:
        factor = (v_unit / row_sum)[:, None]
        target = out_ptr + (first_row + row) * out_row + head * HEAD_DIM
        store_heads(target, acc * factor, acc_odd * factor, live, HEAD_DIM, BLOCK_W, KIND)
    else:
        if SPLIT:
            base = (slot * KV_HEADS + kv_head).to(tl.int64) * splits
            max_ptr = partial_ptr + tl.num_programs(1).to(tl.int64) * splits * (KV_HEADS * TILE * HEAD_DIM)
            sum_ptr = max_ptr + tl.num_programs(1).to(tl.int64) * splits * (KV_HEADS * TILE)
            at = (base + split) * TILE + m
            tl.store(max_ptr + at, row_max, mask=m < TILE)
            tl.store(sum_ptr + at, row_sum, mask=m < TILE)
            store_partial(partial_ptr + at * HEAD_DIM, acc, acc_odd, m < TILE, HEAD_DIM, BLOCK_W, KIND)
            if not APART:
                # All threads' stores come before the release by the one that counts.
                tl.debug_barrier()
                counter = counter_ptr + slot * KV_HEADS + kv_head
                arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                if arrived == used - 1:
                    combine_splits(
                        out_ptr, out_row, first_row, rows, kv_head, 0, partial_ptr, max_ptr, sum_ptr, base,
                        used, v_unit, GROUP, HEAD_DIM, BLOCK_D, TILE, BLOCK_T, BLOCK_S, KIND != AS_IS,
                    )  # fmt: skip
                    tl.store(counter, 0)


@triton.jit(do_not_specialize=["first_request", "num_requests", "table_row"])
def _paged_prefill_kernel(
    q_ptr, cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr, kv_scale_ptr,
    q_row, q_head, out_row, cache_block, first_request, num_requests, table_row, scale_log2, cap_scale,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
    HOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile): a tile is BLOCK_M // GROUP rows of one request."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    k_unit, v_unit = units(kv_scale_ptr, kv_head, KV_HEADS, KIND, HOW)  # which no kernel writes
    if CAPPED:
        cap_scale *= k_unit
    else:
        scale_log2 *= k_unit
    wait_for_previous(OVERLAP)
    # Later rows have longer contexts: starting with them leaves short tiles to fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Request i begins at tile (rows before it) // TILE_ROWS + (requests before it): monotonic, and
    # wide enough for its last, partly filled tile. Find the last request that begins at or before.
    origin = tl.load(query_start_ptr + first_request)
    request = first_request
    above = num_requests
    while above - request > 1:
        middle = (request + above) // 2
        begins = (tl.load(query_start_ptr + middle) - origin) // TILE_ROWS + middle - first_request
        request = tl.where(begins <= tile, middle, request)
        above = tl.where(begins <= tile, above, middle)
    start = tl.load(query_start_ptr + request)
    rows = tl.load(query_start_ptr + request + 1) - start
    tile_row = (tile - ((start - origin) // TILE_ROWS + request - first_request)) * TILE_ROWS
    if tile_row >= rows:
        return
    context = tl.load(seq_len_ptr + request)

    m = tl.arange(0, BLOCK_M)
    row = tile_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (m < TILE_ROWS * GROUP) & (row < rows)
    at_row = start.to(tl.int64) + row
    q, q_odd = load_queries(q_ptr + at_row * q_row + head * q_head, live, HEAD_DIM, BLOCK_W, KIND)
    first_pos = context - rows + tile_row
    end = tl.minimum(first_pos + TILE_ROWS, context)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_pos = context - rows + row
    table = table_ptr + request.to(tl.int64) * table_row
    head_ptr = cache_words(cache_ptr, KIND) + kv_head * head_words(BLOCK_SIZE, HEAD_DIM, KIND)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    else:
        # Positions that every row of the tile sees need no mask.
        begin = (first_pos + 1) // BLOCK_N * BLOCK_N
        acc, acc_odd, row_max, row_sum = kv_steps(
            acc, acc_odd, row_max, row_sum, q, q_odd, 0, begin, row_pos, table, head_ptr, cache_block,
            scale_log2, cap_scale,
            WINDOW, CAPPED, False, HEAD_DIM, BLOCK_SIZE, KV_HEADS, BLOCK_N, BLOCK_W, STAGES, PRECISION, KIND,
            HOW,
        )  # fmt: skip
    acc, acc_odd, row_max, row_sum = kv_steps(
        acc, acc_odd, row_max, row_sum, q, q_odd, begin, end, row_pos, table, head_ptr, cache_block,
        scale_log2, cap_scale,
        WINDOW, CAPPED, True, HEAD_DIM, BLOCK_SIZE, KV_HEADS, BLOCK_N, BLOCK_W, STAGES, PRECISION, KIND, HOW,
    )  # fmt: skip
    factor = (v_unit / row_sum)[:, None]
    target = out_ptr + at_row * out_row + head * HEAD_DIM
    store_heads(target, acc * factor, acc_odd * factor, live, HEAD_DIM, BLOCK_W, KIND)


# Positions of the shortest split. A context of up to WHOLE of them is not split: combining results takes as
# long as one program takes for the rest of it. (H200, one request with 8 KV heads of 128: 1024 positions take
# 17 µs in splits of 512 and 10 in splits of 128; 384 take 9.5 either way; 256 take 7 whole and 9 in two.)
MIN_CHUNK = 128
WHOLE = 3
MAX_SPLITS = 64
# A single row's tile: splits as short as it, none whole. (H200, microseconds of a layer of Llama-8B, whose
# row rotates itself: contexts of 128, 256, 384, 1024 and 2048 take 109.6, 109.7, 110.0, 110.8 and 115.0; with
# the tile and the splits of many requests 109.7, 113.0, 114.1, 117.3 and 120.5.)
SINGLE = TileConfig(0, 64, 2, 2)
# Positions of a lone request's program whose keys and values are sent for while the kernel before still runs.
# Of many requests more would be sent for than the L2 holds until it is read: a step of 32 took 3% longer.
SENT_EARLY = 1024


def decode_cut(
    single: bool, head_dim: int, dtype: torch.dtype, quantized: bool, shared_memory: int
) -> tuple[TileConfig, int, int]:
    """The decode kernel's tile, positions of its shortest split, and how many of these are not split.

    Args:
        single: one request of one row.
        dtype: of the products.
    """
    cfg = (quantized_decode_config if quantized else decode_config)(head_dim, dtype, shared_memory)
    usual = not quantized and dtype.itemsize == 2 and head_dim <= 128
    if single and usual and cfg.block_n > SINGLE.block_n:
        return SINGLE, SINGLE.block_n, 1
    return cfg, MIN_CHUNK, WHOLE


def choose_splits(
    programs: int,
    max_context: int,
    multiprocessors: int,
    per_multiprocessor: int = 2,
    min_chunk: int | None = None,
) -> int:
    """Into how many pieces a context is split, from what the host knows.

    The smallest number whose last wave of programs is nearly full: within 15% of the best filling.

    Args:
        programs: requests x KV heads.
        max_context: upper bound of the context (of the window, where there is one).
        multiprocessors: of the device.
        per_multiprocessor: programs that run on one at a time.
        min_chunk: positions of the shortest split that pays; None: `MIN_CHUNK`.
    """
    slots = multiprocessors * per_multiprocessor
    most = max(
        1, min(-(-max_context // (min_chunk or MIN_CHUNK)), MAX_SPLITS, max(4, slots // max(programs, 1)))
    )
    filling = [programs * s / slots / -(-programs * s // slots) for s in range(1, most + 1)]
    best = max(filling)
    return next(s for s, f in enumerate(filling, 1) if f >= 0.85 * best)


@dataclass(frozen=True)
class SharedPass:
    """What a pass over a beginning that all requests share left for the decode kernel: see
    `octavo.kernels.triton.cascade`.

    Attributes:
        length: int32 `[1]`, shared tokens, whole blocks, fewer than each request had before its rows.
        rows: most rows of a step.
        splits: programs that the beginning is split over.
        partials: float32, accumulators `[splits, rows, heads, head_dim]`, then their maxima and then their
            sums, `[splits, rows, heads]` each.
        config: tile of the pass; it attends to as many of the positions as are whole tiles.
        min_chunk: positions of the shortest split, a multiple of `config.block_n`.
    """

    length: torch.Tensor
    rows: int
    splits: int
    partials: torch.Tensor
    config: TileConfig
    min_chunk: int


def decode_workspace_sizes(
    requests: int, kv_heads: int, group: int, head_dim: int, max_rows: int, splits: int
) -> tuple[int, int]:
    """Elements that `paged_decode` needs: of float32 partial results, of int32 counters (zeroed once)."""
    partials = 0 if splits == 1 else requests * kv_heads * splits * max_rows * group
    return partials * (head_dim + 2), requests * kv_heads


_paged_decode = Launcher(_paged_decode_kernel, overlap=True)
_paged_prefill = Launcher(_paged_prefill_kernel, overlap=True)


def score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """`scale_log2` and `cap_scale` of the kernels: the exponents of softmax are `scale * scores`, or
    `softcap * tanh(scale * scores / softcap)` (Gemma 2, arXiv 2408.00118)."""
    if softcap is None:
        return scale * LOG2E, 0.0
    return softcap * LOG2E, scale / softcap


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def _decode_constants(
    heads: int, kv_heads: int, head_dim: int, block_words: int, block_size: int, dtype: torch.dtype,
    window: int, capped: bool,
    max_rows: int, split: bool, cfg: TileConfig, min_chunk: int, shared_tile: int, shared_chunk: int,
    kind: int, how: int, early: bool, sent: int, whole: int, rot_dim: int, has_norm: bool, centred: bool,
    apart: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Constants of `_paged_decode_kernel`, in its order."""
    block_d = power_of_2(head_dim)
    block_t = power_of_2(max_rows * (heads // kv_heads))
    # About 64 registers of partial results a thread.
    block_s = max(1, min(MAX_SPLITS, 8192 // (block_t * block_d)))
    return (
        window, capped, heads, kv_heads, head_dim, block_size, max_rows, split, min_chunk, whole,
        max(16, block_t), cfg.block_n, block_d, block_words, block_t, block_s, cfg.stages, early, sent,
        32 * cfg.warps, rot_dim, has_norm, centred, apart, shared_tile, shared_chunk, precision(dtype), kind,
        how,
    )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    first_request: int,
    num_requests: int,
    max_rows: int,
    splits: int,
    partials: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: TileConfig | None = None,
    shared: SharedPass | None = None,
    codes: KVCodes | None = None,
    early: bool = False,
    unrotated: Unrotated | None = None,
    apart: bool = False,
) -> None:
    """Attention of requests `first_request .. num_requests` (exclusive), each with at most `max_rows` rows.

    Args:
        q: `[rows, heads, head_dim]`, contiguous in the last dimension.
        cache: `[num_blocks, 2, kv_heads, block_size, head_dim]` of `q`'s dtype, each block contiguous; with
            `codes` uint8, as `octavo.kernels.reference_kv` writes it.
        out: `[rows, heads, head_dim]`, contiguous in its last two dimensions; rows of requests
            with an empty context are left as they are.
        query_start, seq_lens, block_table: as in `AttentionMetadata` (int32).
        max_rows: `max_rows * heads / kv_heads` is at most `max_decode_tile`.
        splits: programs per context, at most `MAX_SPLITS` (`choose_splits`).
        partials, counters: see `decode_workspace_sizes`; counters are zero before and after.
        scale: of the scores.
        window: positions a row sees, itself included; None: all.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None: they stay.
        config: tile shape; None: the measured default.
        shared: go on from this pass over a shared beginning (without a window); None: there was none.
        codes: what a quantized cache's numbers mean; None: it is not quantized.
        early: promises that on the stream, since `query_start`, `seq_lens`, `block_table` and the length of
            `shared` were written, a kernel was launched that is none of a `Launcher` with `overlap`. It began
            when they were complete, and whatever is launched after it begins later: they are read while the
            kernel before still runs, and the keys and values that they name are sent for. Other arguments,
            which that kernel may write, are not touched earlier than without it. It takes registers: where
            there are more programs than the device runs at a time, those that run hide each other's waits.
        unrotated: the one row of the one request has not been through `rotary_kv.rotary_and_write_kv`, whose
            work is done here, except that `q` stays as it is; without `shared`. None: all rows have.
        apart: a kernel of its own adds up what the splits come to, a program for each row and head: better
            than that the last of a KV head's programs does where these are few. Without `shared`.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    view = view_cache(cache, codes, seq_lens)
    kv_heads, dtype = view.kv_heads, product_dtype(q, codes)
    alone = num_requests - first_request == 1
    cfg, min_chunk, whole = config, MIN_CHUNK, WHOLE
    if cfg is None:
        cfg, min_chunk, whole = decode_cut(
            alone and max_rows == 1, head_dim, dtype, codes is not None, shared_memory(q.device)
        )
        if early and cfg.stages > 2:  # table entries are one step ahead already
            cfg = replace(cfg, stages=cfg.stages - 1)
    apart = apart and splits > 1
    min_chunk = ceil_div(min_chunk, cfg.block_n) * cfg.block_n
    constants = _decode_constants(
        heads, kv_heads, head_dim, view.block_words, view.block_size, dtype, window or 0, softcap is not None,
        max_rows, splits > 1, cfg, min_chunk,
        shared.config.block_n if shared else 0, shared.min_chunk if shared else 0, view.kind, view.how,
        early, SENT_EARLY if early and alone else 0, whole, unrotated.angles.shape[1] if unrotated else 0,
        unrotated is not None and unrotated.q_weight is not None, view.centred, apart,
    )  # fmt: skip
    # Where there is no such thing, any tensor stands in for it: the kernel's constants say so.
    new = unrotated or Unrotated(q, q, q, seq_lens)
    assert unrotated is None or (shared is None and len(new.k) == 1), "one row, and none shared"
    assert not apart or shared is None, "none shared"
    begun = (shared.length, shared.partials) if shared else (counters, partials)  # the latter are not read
    _paged_decode(
        (kv_heads, num_requests - first_request, splits),
        (
            q, cache, out, query_start, seq_lens, block_table, partials, counters, *begun, view.scale,
            new.k, new.v, new.angles, new.slots, q if new.q_weight is None else new.q_weight,
            q if new.k_weight is None else new.k_weight, view.centre,
        ),
        (q.stride(0), q.stride(1), out.stride(0), view.block, new.k.stride(1), new.v.stride(1)),
        (
            first_request, splits, block_table.stride(0), shared.rows if shared else 0,
            shared.splits if shared else 0, *score_scales(scale, softcap), new.eps,
        ),
        constants,
        cfg.warps,
    )  # fmt: skip
    if apart:
        combine(
            out, query_start, seq_lens, partials, first_request, num_requests, max_rows, splits, kv_heads,
            window, Pieces(min_chunk, whole, cfg.block_n), view,
        )  # fmt: skip


def paged_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    first_request: int,
    num_requests: int,
    max_rows: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: TileConfig | None = None,
    codes: KVCodes | None = None,
) -> None:
    """Attention of requests `first_request .. num_requests` (exclusive), of any number of rows each.

    Args:
        max_rows: upper bound of the rows of these requests together; the rest as for `paged_decode`.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    view = view_cache(cache, codes, seq_lens)
    kv_heads, dtype = view.kv_heads, product_dtype(q, codes)
    cfg = config or prefill_config(head_dim, dtype, shared_memory(q.device))
    group = heads // kv_heads
    block_m = max(cfg.block_m, power_of_2(group))
    tiles = max_rows // (block_m // group) + (num_requests - first_request)
    _paged_prefill(
        (kv_heads, tiles, 1),
        (q, cache, out, query_start, seq_lens, block_table, view.scale),
        (q.stride(0), q.stride(1), out.stride(0), view.block),
        (first_request, num_requests, block_table.stride(0), *score_scales(scale, softcap)),
        (
            window or 0, softcap is not None, heads, kv_heads, head_dim, view.block_size, block_m,
            cfg.block_n, view.block_words, cfg.stages, precision(dtype), view.kind, view.how,
        ),
        cfg.warps,
    )  # fmt: skip
