"""Causal attention over the paged KV cache whose every row is the same bits whatever rows stand beside it.

One arithmetic serves decode tokens, prompt chunks and verified drafts:

* A row's context is cut into chunks at multiples of a chunk's length, counted from position 0; the length
  follows from the row's own position (and the window) alone: `chunk_length`. A chunk is one online softmax
  (arXiv 2205.14135) over blocks of positions in order, from an empty state, and the chunks' states are
  merged in order by one formula. Whether one program does all of this or several take a chunk each and
  another kernel merges (`splits`) is a matter of speed.
* A tile holds all query heads of a KV head for rows at positions `t * T .. t * T + T - 1` of one request,
  those of them that the step has, and is always of the same shape. So are the matrix instructions, which
  compute an element from its row of one operand and its column of the other, and the order in which a row's
  probabilities are added up, which is the same in every row of a tile.
* What a row does not see adds nothing to the bit: hidden scores are -inf and their probabilities exact
  zeros, and a block (or chunk) that is hidden as a whole leaves maximum, sum and accumulator as they are,
  since they are scaled by exp2(0) = 1 and zeros are added. So it is of no effect how far the other rows of
  the tile see.
* No multiplication and addition are fused but those written as such (`enable_fp_fusion` is off), or the
  compiler might round differently in the kernel's variants.

Heads of more than 128 elements have no registers for two states: their context is one chunk.

Grids come from what the host knows (shapes and upper bounds), so that a launch recorded in a CUDA graph
serves any lengths below the bounds it was recorded with. Blocks wholly before the window of a tile's first
row are not read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.activation import tanh
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous

LOG2E = 1.4426950408889634
MIN_CHUNK = 512  # positions; a power of 2
MAX_CHUNKS = 32  # of a context without a window; a power of 2
AT_ONCE = 8  # chunks whose states are loaded together

_EMPTY = tl.constexpr(float("-inf"))


@triton.jit
def chunk_length(position, WINDOW: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr):
    """Positions of a chunk of the context of the row at `position`: MIN doubled until MAX of it hold what the
    row sees."""
    seen = position + 1
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    length = MIN
    while length * MAX < seen:
        length *= 2
    return length


@triton.jit
def _finite(maximum):
    """The maximum to subtract: that of a row which has seen nothing must not give inf - inf."""
    return tl.where(maximum == _EMPTY, 0.0, maximum)


@triton.jit
def _merge(acc, row_max, row_sum, next_acc, next_max, next_sum):
    """The state of two neighbouring ranges of positions from those of each; of an empty one, the other's."""
    new_max = tl.maximum(row_max, next_max)
    shrink = tl.math.exp2(row_max - _finite(new_max))
    next_shrink = tl.math.exp2(next_max - _finite(new_max))
    acc = tl.fma(acc, shrink[:, None], next_acc * next_shrink[:, None])
    return acc, new_max, tl.fma(row_sum, shrink, next_sum * next_shrink)


@triton.jit
def _average(acc, row_sum):
    """The result of a row's state: one division a row, as PTX's approximate one may change with the code."""
    return acc * tl.math.div_rn(tl.full(row_sum.shape, 1.0, tl.float32), row_sum)[:, None]


@triton.jit
def _attend_range(
    acc, row_max, row_sum, q, begin, end, low, row_pos, table_ptr, head_ptr, cache_block, scale_log2,
    cap_scale,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, V_OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes on with a softmax over positions `begin..end` (exclusive), of which those before `low` are not
    read. `begin` is a multiple of BLOCK_N.

    MASKED False promises that every row sees every position and that `end` is a multiple of BLOCK_N; the
    result is that of MASKED True.
    """
    dims = tl.arange(0, BLOCK_D)
    ALL_DIMS: tl.constexpr = HEAD_DIM == BLOCK_D
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        pos = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        read = (pos >= low) & (pos < end)
        if MASKED:
            block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=read, other=0)
        else:
            block = tl.load(table_ptr + pos // BLOCK_SIZE)
        # 64-bit: a cache of many gigabytes has more elements than an int32 can count.
        at = block.to(tl.int64) * cache_block + (pos % BLOCK_SIZE) * HEAD_DIM
        kv_ptr = head_ptr + at[:, None] + dims[None, :]
        if MASKED or not ALL_DIMS:
            live = read[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(kv_ptr, mask=live, other=0.0)
        else:
            k = tl.load(kv_ptr)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = tanh(scores * cap_scale)
        if MASKED:
            seen = (pos[None, :] <= row_pos[:, None]) & read[None, :]
            if WINDOW > 0:
                seen = seen & (pos[None, :] > row_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, _EMPTY)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        minus_max = -_finite(new_max)
        probs = tl.math.exp2(tl.fma(scores, scale_log2, minus_max[:, None]))
        shrink = tl.math.exp2(row_max + minus_max)
        row_sum = tl.fma(row_sum, shrink, tl.sum(probs, axis=1))
        if MASKED or not ALL_DIMS:
            v = tl.load(kv_ptr + V_OFFSET, mask=live, other=0.0)
        else:
            v = tl.load(kv_ptr + V_OFFSET)
        acc = acc * shrink[:, None]
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _find_tile(query_start_ptr, seq_len_ptr, num_requests, TILE_ROWS: tl.constexpr, ONE_ROW: tl.constexpr):
    """The request of this program's tile, its first row and number of rows, its context, and the position of
    the tile's first row; at or beyond the context where the program has nothing to do."""
    request = tl.program_id(1)
    if not ONE_ROW:
        # Later rows have longer contexts: starting with them leaves short tiles to fill the end.
        tile = tl.num_programs(1) - 1 - request
        # Request i begins at tile (rows before it) // TILE_ROWS + 2 i: monotonic, and wide enough for a
        # first and a last tile that are partly filled. Find the last request that begins at or before.
        request = 0
        above = num_requests
        while above - request > 1:
            middle = (request + above) // 2
            begins = tl.load(query_start_ptr + middle) // TILE_ROWS + 2 * middle
            request = tl.where(begins <= tile, middle, request)
            above = tl.where(begins <= tile, above, middle)
    first_row = tl.load(query_start_ptr + request)
    rows = tl.load(query_start_ptr + request + 1) - first_row
    context = tl.load(seq_len_ptr + request)
    tile_pos = (context - rows) // TILE_ROWS * TILE_ROWS
    if not ONE_ROW:
        tile_pos += (tile - (first_row // TILE_ROWS + 2 * request)) * TILE_ROWS
    if rows <= 0:
        tile_pos = context
    return request, first_row, rows, context, tile_pos


# Arguments that change from step to step must not select another compiled variant.
@triton.jit(do_not_specialize=["num_requests", "splits", "slots", "table_row"])
def _invariant_attention_kernel(
    q_ptr, cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr, part_ptr, stat_ptr,
    q_row, q_head, out_row, cache_block, num_requests, splits, slots, table_row, scale_log2, cap_scale,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr,
    ONE_ROW: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile, split). ONE_ROW promises that no request has more than one row: tile i is
    request i's. With SPLIT, of a tile's chunks a program takes every `splits`-th and stores their states."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    V_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(0)
    request, first_row, rows, context, tile_pos = _find_tile(
        query_start_ptr, seq_len_ptr, num_requests, TILE_ROWS, ONE_ROW
    )
    if tile_pos >= context:
        return
    # The first and last position that rows of this step have in the tile.
    first_pos = tl.maximum(tile_pos, context - rows)
    end = tl.minimum(tile_pos + TILE_ROWS, context)
    low = 0
    # Positions before `whole` are seen by every row, and need no mask.
    whole = (first_pos + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        low = tl.maximum(first_pos - WINDOW + 1, 0)
        whole = 0
    if CHUNKED:
        # The same for all rows of a tile: it changes at multiples of MIN * MAX, which are such of TILE_ROWS.
        length = chunk_length(tile_pos, WINDOW, MIN, MAX)
        first_chunk = low // length
        chunks = tl.cdiv(end, length)
        if SPLIT:
            if first_chunk + tl.program_id(2) >= chunks:
                return
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_pos = tile_pos + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (m < TILE_ROWS * GROUP) & (row_pos >= context - rows) & (row_pos < context)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    row = first_row.to(tl.int64) + row_pos - (context - rows)
    q_tile = q_ptr + row[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    q = tl.load(q_tile, mask=mask, other=0.0)
    table = table_ptr + request.to(tl.int64) * table_row
    head_ptr = cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if CHUNKED:
        step = 1
        split = 0
        if SPLIT:
            step = splits
            split = tl.program_id(2)
        for chunk in tl.range(first_chunk + split, chunks, step, num_stages=1):
            begin = tl.maximum(chunk * length, low // BLOCK_N * BLOCK_N)
            stop = tl.minimum(chunk * length + length, end)
            middle = tl.minimum(tl.maximum(whole, begin), stop)
            chunk_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            chunk_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            chunk_sum = tl.zeros([BLOCK_M], tl.float32)
            if WINDOW == 0:
                chunk_acc, chunk_max, chunk_sum = _attend_range(
                    chunk_acc, chunk_max, chunk_sum, q, begin, middle, low, row_pos, table, head_ptr,
                    cache_block, scale_log2, cap_scale, WINDOW, CAPPED, False, HEAD_DIM, BLOCK_SIZE, V_OFFSET,
                    BLOCK_N, BLOCK_D, STAGES, PRECISION,
                )  # fmt: skip
            chunk_acc, chunk_max, chunk_sum = _attend_range(
                chunk_acc, chunk_max, chunk_sum, q, middle, stop, low, row_pos, table, head_ptr, cache_block,
                scale_log2, cap_scale, WINDOW, CAPPED, True, HEAD_DIM, BLOCK_SIZE, V_OFFSET, BLOCK_N, BLOCK_D,
                STAGES, PRECISION,
            )  # fmt: skip
            if SPLIT:
                at = (row * HEADS + head) * slots + (chunk - first_chunk)
                tl.store(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], chunk_acc, mask=mask)
                tl.store(stat_ptr + at * 2, chunk_max, mask=live)
                tl.store(stat_ptr + at * 2 + 1, chunk_sum, mask=live)
            else:
                acc, row_max, row_sum = _merge(acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum)
    else:
        begin = low // BLOCK_N * BLOCK_N
        middle = tl.maximum(whole, begin)
        if WINDOW == 0:
            acc, row_max, row_sum = _attend_range(
                acc, row_max, row_sum, q, begin, middle, low, row_pos, table, head_ptr, cache_block,
                scale_log2, cap_scale, WINDOW, CAPPED, False, HEAD_DIM, BLOCK_SIZE, V_OFFSET, BLOCK_N,
                BLOCK_D, STAGES, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_range(
            acc, row_max, row_sum, q, middle, end, low, row_pos, table, head_ptr, cache_block, scale_log2,
            cap_scale, WINDOW, CAPPED, True, HEAD_DIM, BLOCK_SIZE, V_OFFSET, BLOCK_N, BLOCK_D, STAGES,
            PRECISION,
        )  # fmt: skip
    if not SPLIT:
        out_tile = out_ptr + row[:, None] * out_row + head[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_tile, _average(acc, row_sum).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "slots"])
def _merge_chunks_kernel(
    out_ptr, query_start_ptr, seq_len_ptr, part_ptr, stat_ptr, out_row, num_requests, slots,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ONE_ROW: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (head, row): the states of the row's chunks, merged in order."""
    wait_for_previous(OVERLAP)
    head = tl.program_id(0)
    row = tl.program_id(1)
    request = row
    if not ONE_ROW:  # the last request that begins at or before the row (empty ones begin there too)
        request = 0
        above = num_requests
        while above - request > 1:
            middle = (request + above) // 2
            begins = tl.load(query_start_ptr + middle)
            request = tl.where(begins <= row, middle, request)
            above = tl.where(begins <= row, above, middle)
    first_row = tl.load(query_start_ptr + request)
    rows = tl.load(query_start_ptr + request + 1) - first_row
    if ONE_ROW:
        row = first_row
    if (row >= first_row + rows) | (rows <= 0):  # padding
        return
    context = tl.load(seq_len_ptr + request)
    position = context - rows + (row - first_row)
    # Chunks are counted from the first one that the tile reads, as by the kernel that stored them.
    tile_pos = position // TILE_ROWS * TILE_ROWS
    first_pos = tl.maximum(tile_pos, context - rows)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_pos - WINDOW + 1, 0)
    length = chunk_length(tile_pos, WINDOW, MIN, MAX)
    chunks = tl.cdiv(position + 1, length) - low // length
    one = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    base = (row.to(tl.int64) * HEADS + head) * slots
    for first in tl.range(0, chunks, AT_ONCE, num_stages=1):
        for i in tl.static_range(AT_ONCE):  # a missing chunk is an empty state, which changes nothing
            at = base + first + i + one
            there = first + i + one < chunks
            # Written by other multiprocessors: read past the L1 (".cg").
            part = tl.load(
                part_ptr + at[:, None] * HEAD_DIM + dims[None, :],
                mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            part_max = tl.load(stat_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_sum = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            acc, row_max, row_sum = _merge(acc, row_max, row_sum, part, part_max, part_sum)
    target = out_ptr + (row.to(tl.int64) + one)[:, None] * out_row + head * HEAD_DIM + dims[None, :]
    result = _average(acc, row_sum).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=(one == 0)[:, None] & (dims < HEAD_DIM)[None, :])


_invariant_attention = Launcher(_invariant_attention_kernel, overlap=True, enable_fp_fusion=False)
_merge_chunks = Launcher(_merge_chunks_kernel, overlap=True, enable_fp_fusion=False)


@dataclass(frozen=True)
class InvariantTile:
    """Shape of every program of a layer: lanes (rows times query heads of a KV head), positions of a block,
    pipeline stages, warps; whether contexts are chunked."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    chunked: bool


def tile_config(head_dim: int, dtype: torch.dtype, group: int, shared_memory: int) -> InvariantTile:
    """The tile of a layer: nothing that a step could change enters it.

    Args:
        head_dim: elements of a head.
        dtype: of queries and cache.
        group: query heads of a KV head.
        shared_memory: bytes that a program can have.
    """
    lanes = power_of_2(group)
    if dtype == torch.float32:
        if head_dim > 128:
            return InvariantTile(max(16, lanes), 16, 1, 8, False)
        return InvariantTile(max(32, lanes), 32, 1, 8, True)
    block_m = max(64, lanes)
    warps = block_m // 16
    if head_dim > 128:
        return InvariantTile(block_m, 32, 2, warps, False)
    # Before Hopper, where results lie in registers alone, 64 positions spill in every block.
    return InvariantTile(block_m, 64 if shared_memory > 200 << 10 else 32, 3, warps, True)


@dataclass(frozen=True)
class InvariantPlan:
    """How a step's rows are given to programs; it changes no bit of the result.

    Attributes:
        tiles: programs' second dimension.
        one_row: whether every request has at most one row.
        splits: programs that share a tile's chunks.
        slots: chunks of a row that there is room for (splits > 1).
        num_requests, num_rows: of the step.
    """

    tiles: int
    one_row: bool
    splits: int
    slots: int
    num_requests: int
    num_rows: int

    def floats(self, heads: int, head_dim: int) -> int:
        """float32 of scratch memory that the chunks' states take."""
        return 0 if self.splits == 1 else self.num_rows * heads * self.slots * (head_dim + 2)


_MOST_FLOATS = 16 << 20  # of scratch memory


def make_plan(
    tile: InvariantTile,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    num_requests: int,
    num_rows: int,
    max_query_len: int,
    max_seq_len: int,
    processors: int,
) -> InvariantPlan:
    """Programs for a step of at most these sizes, on a device with `processors` multiprocessors."""
    one_row = max_query_len == 1
    tile_rows = _tile_rows(tile, heads // kv_heads)
    tiles = num_requests if one_row else num_rows // tile_rows + 2 * num_requests
    context = max_seq_len if window is None else min(max_seq_len, window + tile_rows)
    # A window may begin and end within a chunk.
    slots = min(ceil_div(context, MIN_CHUNK), MAX_CHUNKS) + (0 if window is None else 2)
    # Contexts differ: four programs a multiprocessor even out what the longest ones take.
    splits = min(slots, ceil_div(4 * processors, tiles * kv_heads))
    if one_row:
        splits = min(slots, max(splits, 4))
    plan = InvariantPlan(tiles, one_row, splits, slots, num_requests, num_rows)
    if not tile.chunked or splits <= 1 or plan.floats(heads, head_dim) > _MOST_FLOATS:
        return InvariantPlan(tiles, one_row, 1, 1, num_requests, num_rows)
    return plan


def _tile_rows(tile: InvariantTile, group: int) -> int:
    """Rows of a tile: a power of 2, so that tiles end where the chunks' length changes."""
    rows = tile.block_m // group
    return rows if rows & (rows - 1) == 0 else power_of_2(rows) // 2


@functools.cache
def program_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 227 << 10  # the interpreter, and compilation without a device: as capability 9.0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - 1024


def invariant_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    plan: InvariantPlan,
    tile: InvariantTile,
    scratch: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of all rows of a step, each independent of the others to the bit.

    Args:
        q: `[rows, heads, head_dim]`, contiguous in the last dimension, of the cache's dtype.
        cache: `[num_blocks, 2, kv_heads, block_size, head_dim]`, each block contiguous.
        out: `[rows, heads, head_dim]`, contiguous in its last two dimensions; rows that belong to no
            request are left as they are.
        query_start, seq_lens, block_table: as in `AttentionMetadata` (int32).
        plan: of `make_plan`, for this step or for larger bounds.
        tile: the layer's, of `tile_config`.
        scratch: float32 of any content: `num_rows * heads * slots * head_dim` and twice
            `num_rows * heads * slots` elements (of any number with one split).
        scale: of the scores, above 0.
        window: positions a row sees, itself included; None: all.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None: they stay.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, block_size = cache.shape[2], cache.shape[3]
    scales = (scale * LOG2E, 0.0) if softcap is None else (softcap * LOG2E, scale / softcap)
    block_d = power_of_2(head_dim)
    tile_rows = _tile_rows(tile, heads // kv_heads)
    split = plan.splits > 1
    _invariant_attention(
        (kv_heads, plan.tiles, plan.splits),
        (q, cache, out, query_start, seq_lens, block_table, *scratch),
        (q.stride(0), q.stride(1), out.stride(0), cache.stride(0)),
        (plan.num_requests, plan.splits, plan.slots, block_table.stride(0), *scales),
        (
            window or 0, softcap is not None, heads, kv_heads, head_dim, block_size, tile.chunked, split,
            plan.one_row, MIN_CHUNK, MAX_CHUNKS, tile_rows, tile.block_m, tile.block_n, block_d, tile.stages,
            "ieee" if q.dtype == torch.float32 else "tf32",
        ),
        tile.warps,
    )  # fmt: skip
    if split:
        _merge_chunks(
            (heads, plan.num_requests if plan.one_row else plan.num_rows, 1),
            (out, query_start, seq_lens, *scratch),
            (out.stride(0),),
            (plan.num_requests, plan.slots),
            (
                window or 0, heads, head_dim, MIN_CHUNK, MAX_CHUNKS, tile_rows, block_d, plan.one_row,
                AT_ONCE,
            ),
            4,
        )  # fmt: skip
