"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over the paged cache of latent vectors, absorbed.

Multi-query attention whose one key is a token's whole vector (`rank + rope_dim` elements, DeepSeek's 512
+ 64) and whose value is the first `rank` of them: a tile of vectors is loaded once and serves both
products. A program's tile holds "lanes", pairs of a request's row and a head, a row's heads together.

`latent_decode` is for requests with few rows: it splits each context over programs (flash-decoding) and a
second, small launch adds the splits up in the order of their positions, so that the result is the same
every time. `latent_prefill` is for requests with many rows. Grids come from what the host knows, as in
`octavo.kernels.triton.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton import attention
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2

# Positions of the shortest split: one program reads a latent vector for all heads, so that short splits pay
# sooner than in `attention` (on an H200, one request of 4096 tokens: 13 µs at 64, 16 at 128, 33 at 512).
MIN_CHUNK = 64


@triton.jit
def _load_query(
    q_ptr, q_row, q_head, first_row, lane, live,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The lanes' queries: their part for the compressed KV and the rotated part."""
    base = q_ptr + (first_row + lane // HEADS) * q_row + (lane % HEADS) * q_head
    dims = tl.arange(0, BLOCK_R)
    pe_dims = tl.arange(0, BLOCK_P)
    q = tl.load(base[:, None] + dims[None, :], mask=live[:, None] & (dims < RANK)[None, :], other=0.0)
    q_pe = tl.load(
        base[:, None] + RANK + pe_dims[None, :], mask=live[:, None] & (pe_dims < ROPE)[None, :], other=0.0
    )
    return q, q_pe


@triton.jit
def _latent_steps(
    acc, row_max, row_sum, q, q_pe, begin, end, lane_pos, table_ptr, cache_ptr, cache_block, scale_log2,
    MASKED: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass of online softmax over context positions `begin..end` (exclusive), multiples of BLOCK_N apart.

    MASKED False promises that every lane sees every position of the range and that its length is a
    multiple of BLOCK_N.
    """
    ALIGN: tl.constexpr = BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 else 1
    dims = tl.arange(0, BLOCK_R)
    pe_dims = tl.arange(0, BLOCK_P)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        pos = tl.multiple_of(start, ALIGN) + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=pos < end, other=0)
        else:
            block = tl.load(table_ptr + pos // BLOCK_SIZE)
        # 64-bit: a cache of many gigabytes has more elements than an int32 can count.
        row_ptr = cache_ptr + block.to(tl.int64) * cache_block + (pos % BLOCK_SIZE) * (RANK + ROPE)
        kv_ptr = row_ptr[:, None] + dims[None, :]
        pe_ptr = row_ptr[:, None] + RANK + pe_dims[None, :]
        if MASKED or RANK < BLOCK_R:
            kv = tl.load(kv_ptr, mask=(pos < end)[:, None] & (dims < RANK)[None, :], other=0.0).to(q.dtype)
        else:
            kv = tl.load(kv_ptr).to(q.dtype)
        if MASKED or ROPE < BLOCK_P:
            pe = tl.load(pe_ptr, mask=(pos < end)[:, None] & (pe_dims < ROPE)[None, :], other=0.0).to(q.dtype)
        else:
            pe = tl.load(pe_ptr).to(q.dtype)
        scores = tl.dot(q_pe, tl.trans(pe), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(kv), scores, input_precision=PRECISION)
        if MASKED:
            seen = (pos[None, :] <= lane_pos[:, None]) & (pos < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        if MASKED:
            # A lane that has seen nothing yet must not compute inf - inf.
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            safe_max = new_max
        probs = tl.math.exp2(scores * scale_log2 - safe_max[:, None])
        shrink = tl.math.exp2(row_max - safe_max)
        row_sum = row_sum * shrink + tl.sum(probs, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(probs.to(q.dtype), kv, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _chunk_of(context, splits, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr):
    """Positions of one split: by the true length, so that a short context uses few of the launched splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, splits), BLOCK_N) * BLOCK_N, MIN_CHUNK)


# Arguments that change from step to step must not select another compiled variant.
@triton.jit(do_not_specialize=["first_request", "splits", "max_lanes", "table_row"])
def _latent_decode_kernel(
    q_ptr, cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr, partial_ptr,
    q_row, q_head, out_row, cache_block, first_request, splits, max_lanes, table_row, scale_log2,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MIN_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of lanes, request - first_request, split).

    Partial results: accumulators `[requests, max_lanes, splits, RANK]`, then maxima and then sums,
    `[requests, max_lanes, splits]` each. A request that one split serves is written to `out` at once.
    """
    slot = tl.program_id(1)
    request = first_request + slot
    split = tl.program_id(2)
    context = tl.load(seq_len_ptr + request)
    first_row = tl.load(query_start_ptr + request).to(tl.int64)
    rows = (tl.load(query_start_ptr + request + 1) - first_row).to(tl.int32)
    lane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (tl.program_id(0) * BLOCK_M >= rows * HEADS) | (context <= 0):
        return
    chunk = _chunk_of(context, splits, BLOCK_N, MIN_CHUNK)
    used = tl.cdiv(context, chunk)
    if split >= used:
        return
    begin = split * chunk
    end = tl.minimum(begin + chunk, context)
    # Positions that every lane sees need no mask.
    whole = tl.maximum(tl.minimum(end, context - rows + 1) // BLOCK_N * BLOCK_N, begin)

    live = lane < rows * HEADS
    q, q_pe = _load_query(q_ptr, q_row, q_head, first_row, lane, live, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    lane_pos = context - rows + lane // HEADS
    table = table_ptr + request.to(tl.int64) * table_row
    acc, row_max, row_sum = _latent_steps(
        acc, row_max, row_sum, q, q_pe, begin, whole, lane_pos, table, cache_ptr, cache_block, scale_log2,
        False, RANK, ROPE, BLOCK_SIZE, BLOCK_N, BLOCK_R, BLOCK_P, STAGES, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _latent_steps(
        acc, row_max, row_sum, q, q_pe, whole, end, lane_pos, table, cache_ptr, cache_block, scale_log2,
        True, RANK, ROPE, BLOCK_SIZE, BLOCK_N, BLOCK_R, BLOCK_P, 1, PRECISION,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_R)
    mask = live[:, None] & (dims < RANK)[None, :]
    if used == 1:
        target = (first_row + lane // HEADS) * out_row + (lane % HEADS) * RANK
        result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dims[None, :], result, mask=mask)
    else:
        at = (slot * max_lanes + lane).to(tl.int64) * splits + split
        total = tl.num_programs(1).to(tl.int64) * max_lanes * splits
        tl.store(partial_ptr + at[:, None] * RANK + dims[None, :], acc, mask=mask)
        tl.store(partial_ptr + total * RANK + at, row_max, mask=live)
        tl.store(partial_ptr + total * (RANK + 1) + at, row_sum, mask=live)


@triton.jit(do_not_specialize=["first_request", "splits", "max_lanes"])
def _latent_combine_kernel(
    partial_ptr, out_ptr, query_start_ptr, seq_len_ptr, out_row, first_request, splits, max_lanes,
    HEADS: tl.constexpr, RANK: tl.constexpr, MIN_CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (piece of the result, lane, request - first_request): adds up a lane's splits in order."""
    lane = tl.program_id(1)
    slot = tl.program_id(2)
    request = first_request + slot
    context = tl.load(seq_len_ptr + request)
    first_row = tl.load(query_start_ptr + request).to(tl.int64)
    rows = (tl.load(query_start_ptr + request + 1) - first_row).to(tl.int32)
    if (lane >= rows * HEADS) | (context <= 0):
        return
    used = tl.cdiv(context, _chunk_of(context, splits, BLOCK_N, MIN_CHUNK))
    if used == 1:
        return
    base = (slot * max_lanes + lane).to(tl.int64) * splits
    total = tl.num_programs(2).to(tl.int64) * max_lanes * splits
    max_ptr = partial_ptr + total * RANK + base
    every = tl.arange(0, MAX_SPLITS)
    # The last splits of a request with several rows may see nothing for its first rows: maximum -inf,
    # sum 0. The first split sees something, so that the greatest maximum is finite.
    top = tl.max(tl.load(max_ptr + every, mask=every < used, other=float("-inf")), axis=0)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    result = tl.zeros([BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_S], tl.float32)
    for s in tl.range(0, used, BLOCK_S):
        some = s + tl.arange(0, BLOCK_S)
        weight = tl.math.exp2(tl.load(max_ptr + some, mask=some < used, other=float("-inf")) - top)
        part = tl.load(
            partial_ptr + (base + some)[:, None] * RANK + dims[None, :],
            mask=(some < used)[:, None] & (dims < RANK)[None, :], other=0.0,
        )  # fmt: skip
        result += tl.sum(part * weight[:, None], axis=0)
        weight_sum += weight * tl.load(max_ptr + total + some, mask=some < used, other=0.0)
    result = result / tl.sum(weight_sum, axis=0)
    target = (first_row + lane // HEADS) * out_row + (lane % HEADS) * RANK
    tl.store(out_ptr + target + dims, result.to(out_ptr.dtype.element_ty), mask=dims < RANK)


@triton.jit(do_not_specialize=["first_request", "num_requests", "table_row"])
def _latent_prefill_kernel(
    q_ptr, cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr,
    q_row, q_head, out_row, cache_block, first_request, num_requests, table_row, scale_log2,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile): a tile is BLOCK_M lanes of one request."""
    # Later rows have longer contexts: starting with them leaves short tiles to fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    # Request i begins at tile (lanes before it) // BLOCK_M + (requests before it): monotonic, and wide
    # enough for its last, partly filled tile. Find the last request that begins at or before.
    origin = tl.load(query_start_ptr + first_request)
    request = first_request
    above = num_requests
    while above - request > 1:
        middle = (request + above) // 2
        begins = (tl.load(query_start_ptr + middle) - origin) * HEADS // BLOCK_M + middle - first_request
        request = tl.where(begins <= tile, middle, request)
        above = tl.where(begins <= tile, above, middle)
    start = tl.load(query_start_ptr + request)
    rows = tl.load(query_start_ptr + request + 1) - start
    first_lane = (tile - ((start - origin) * HEADS // BLOCK_M + request - first_request)) * BLOCK_M
    if first_lane >= rows * HEADS:
        return
    context = tl.load(seq_len_ptr + request)
    first_row = start.to(tl.int64)
    lane = first_lane + tl.arange(0, BLOCK_M)
    live = lane < rows * HEADS
    q, q_pe = _load_query(q_ptr, q_row, q_head, first_row, lane, live, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    lane_pos = context - rows + lane // HEADS
    table = table_ptr + request.to(tl.int64) * table_row
    first_pos = context - rows + first_lane // HEADS
    end = tl.minimum(context - rows + (first_lane + BLOCK_M - 1) // HEADS + 1, context)
    whole = (first_pos + 1) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = _latent_steps(
        acc, row_max, row_sum, q, q_pe, 0, whole, lane_pos, table, cache_ptr, cache_block, scale_log2,
        False, RANK, ROPE, BLOCK_SIZE, BLOCK_N, BLOCK_R, BLOCK_P, STAGES, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _latent_steps(
        acc, row_max, row_sum, q, q_pe, whole, end, lane_pos, table, cache_ptr, cache_block, scale_log2,
        True, RANK, ROPE, BLOCK_SIZE, BLOCK_N, BLOCK_R, BLOCK_P, 1, PRECISION,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_R)
    target = (first_row + lane // HEADS) * out_row + (lane % HEADS) * RANK
    result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + target[:, None] + dims[None, :], result, mask=live[:, None] & (dims < RANK)[None, :])


@triton.jit
def _latent_write_kernel(
    q_ptr, q_out_ptr, kv_ptr, weight_ptr, cos_sin_ptr, position_ptr, cache_ptr, slot_ptr,
    q_row, q_head, out_row, out_head, kv_row, cache_block, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (row, g): rotates the g-th group of BLOCK_H heads; the last g stores the row's vector."""
    HALF: tl.constexpr = ROPE // 2
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    live = half < HALF
    angles = cos_sin_ptr + tl.load(position_ptr + row) * ROPE
    cos = tl.load(angles + half, mask=live, other=0.0)
    sin = tl.load(angles + HALF + half, mask=live, other=0.0)
    if group < tl.num_programs(1) - 1:
        heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (heads < HEADS)[:, None] & live[None, :]
        at = q_ptr + row * q_row + heads[:, None] * q_head + half[None, :]
        low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        to = q_out_ptr + row * out_row + heads[:, None] * out_head + half[None, :]
        dtype: tl.constexpr = q_out_ptr.dtype.element_ty
        tl.store(to, (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=mask)
        tl.store(to + HALF, (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=mask)
    else:
        slot = tl.load(slot_ptr + row)
        if slot >= 0:
            # Rounded to the model's dtype where an unfused norm and rotation round.
            own: tl.constexpr = kv_ptr.dtype.element_ty
            stored: tl.constexpr = cache_ptr.dtype.element_ty
            to = cache_ptr + (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * (RANK + ROPE)
            dims = tl.arange(0, BLOCK_R)
            x = tl.load(kv_ptr + row * kv_row + dims, mask=dims < RANK, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + dims, mask=dims < RANK, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
            x = ((x * scale).to(own).to(tl.float32) * weight).to(own)
            tl.store(to + dims, x.to(stored), mask=dims < RANK)
            at = kv_ptr + row * kv_row + RANK + half
            low = tl.load(at, mask=live, other=0.0).to(tl.float32)
            high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
            tl.store(to + RANK + half, (low * cos - high * sin).to(own).to(stored), mask=live)
            tl.store(to + RANK + HALF + half, (high * cos + low * sin).to(own).to(stored), mask=live)


_latent_decode = Launcher(_latent_decode_kernel)
_latent_combine = Launcher(_latent_combine_kernel)
_latent_prefill = Launcher(_latent_prefill_kernel)
_latent_write = Launcher(_latent_write_kernel)


@dataclass(frozen=True)
class LatentTile:
    """Shape of one program: lanes, context positions, pipeline."""

    lanes: int
    positions: int
    stages: int
    warps: int


# Bytes of shared memory that a tile of 64 lanes and 64 positions of DeepSeek's size needs (Triton 3.6).
_WIDE_TILE = 217 << 10


def decode_tile(heads: int, dtype: torch.dtype, shared: int) -> LatentTile:
    """Tile of the decode kernel: heads in groups of 16, or of 64 (the height of Hopper's own products)
    where there are that many and the multiprocessor's `shared` memory holds it.

    Measured on an H200, 16 heads over contexts of 4096: 64 positions against 32 are 1.2 times as fast for one
    request and 1.1 for 32.
    """
    if dtype == torch.float32:
        return LatentTile(16, 16, 1, 8)
    if shared < _WIDE_TILE:
        return LatentTile(16, 32, 3, 4)
    return LatentTile(64, 64, 2, 8) if heads >= 64 else LatentTile(16, 64, 2, 8)


def prefill_tile(heads: int, dtype: torch.dtype, shared: int) -> LatentTile:
    """Tile of the prefill kernel."""
    if dtype == torch.float32:
        return LatentTile(16, 16, 1, 8)
    return LatentTile(64, 64, 2, 8) if shared >= _WIDE_TILE else LatentTile(16, 32, 3, 4)


_COMBINE_DIMS = 128
_COMBINE_SPLITS = 16


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _sizes(cache: torch.Tensor, rank: int) -> tuple[int, int, int, int]:
    """Rotary dimensions, block size, and the tile's elements of both parts of a vector."""
    block_size, size = cache.shape[3], cache.shape[4]
    rope = size - rank
    return rope, block_size, max(16, power_of_2(rank)), max(16, power_of_2(rope))


def latent_workspace_size(requests: int, heads: int, max_rows: int, rank: int, splits: int) -> int:
    """Elements of float32 that `latent_decode` needs for partial results."""
    return 0 if splits == 1 else requests * heads * max_rows * splits * (rank + 2)


def latent_decode(
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
    rank: int,
    scale: float,
    tile: LatentTile | None = None,
) -> None:
    """Attention of requests `first_request .. num_requests` (exclusive), each with at most `max_rows` rows.

    Args:
        q: `[rows, heads, rank + rope_dim]`, contiguous in the last dimension.
        cache: `[num_blocks, 1, 1, block_size, rank + rope_dim]`, each block contiguous.
        out: `[rows, heads, rank]`, contiguous in its last two dimensions; rows of requests with an empty
            context are left as they are.
        query_start, seq_lens, block_table: as in `AttentionMetadata` (int32).
        splits: programs per context, at most `attention.MAX_SPLITS`.
        partials: float32, of `latent_workspace_size`, any content.
        rank: elements of a vector that are its value.
        scale: of the scores.
        tile: None: the default.
    """
    heads = q.shape[1]
    rope, block_size, block_r, block_p = _sizes(cache, rank)
    shape = tile or decode_tile(heads, q.dtype, attention.shared_memory(q.device))
    lanes = max_rows * heads
    requests = num_requests - first_request
    min_chunk = ceil_div(MIN_CHUNK, shape.positions) * shape.positions
    _latent_decode(
        (ceil_div(lanes, shape.lanes), requests, splits),
        (q, cache, out, query_start, seq_lens, block_table, partials),
        (q.stride(0), q.stride(1), out.stride(0), cache.stride(0)),
        (first_request, splits, lanes, block_table.stride(0), scale * attention.LOG2E),
        (
            heads, rank, rope, block_size, min_chunk, shape.lanes, shape.positions, block_r, block_p,
            shape.stages, _precision(q.dtype),
        ),
        shape.warps,
    )  # fmt: skip
    if splits > 1:
        block_d = min(_COMBINE_DIMS, block_r)
        _latent_combine(
            (ceil_div(rank, block_d), lanes, requests),
            (partials, out, query_start, seq_lens),
            (out.stride(0),),
            (first_request, splits, lanes),
            (
                heads, rank, min_chunk, shape.positions, block_d,
                min(_COMBINE_SPLITS, power_of_2(splits)), attention.MAX_SPLITS,
            ),
            4,
        )  # fmt: skip


def latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    first_request: int,
    num_requests: int,
    max_rows: int,
    rank: int,
    scale: float,
    tile: LatentTile | None = None,
) -> None:
    """Attention of requests `first_request .. num_requests` (exclusive), of any number of rows each.

    Args:
        max_rows: upper bound of the rows of these requests together; the rest as for `latent_decode`.
    """
    heads = q.shape[1]
    rope, block_size, block_r, block_p = _sizes(cache, rank)
    shape = tile or prefill_tile(heads, q.dtype, attention.shared_memory(q.device))
    tiles = max_rows * heads // shape.lanes + (num_requests - first_request)
    _latent_prefill(
        (tiles, 1, 1),
        (q, cache, out, query_start, seq_lens, block_table),
        (q.stride(0), q.stride(1), out.stride(0), cache.stride(0)),
        (first_request, num_requests, block_table.stride(0), scale * attention.LOG2E),
        (
            heads, rank, rope, block_size, shape.lanes, shape.positions, block_r, block_p, shape.stages,
            _precision(q.dtype),
        ),
        shape.warps,
    )  # fmt: skip


def rotate_and_write_latent(
    q_pe: torch.Tensor,
    q_out: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `octavo.kernels.reference_latent.rotate_and_write_latent`; one launch. `q_pe`, `q_out` and `kv` are
    contiguous in their last dimension, and so is each block of the cache."""
    rows, heads, rope = q_pe.shape
    if rows == 0:
        return
    rank = weight.shape[0]
    block_half = power_of_2(rope // 2)
    block_h = max(1, min(power_of_2(heads), 512 // block_half))
    _latent_write(
        (rows, ceil_div(heads, block_h) + 1, 1),
        (q_pe, q_out, kv, weight, cos_sin, positions, cache, slot_mapping),
        (
            q_pe.stride(0), q_pe.stride(1), q_out.stride(0), q_out.stride(1), kv.stride(0), cache.stride(0),
        ),
        (eps,),
        (heads, rank, rope, cache.shape[3], block_h, power_of_2(rank), block_half),
        4,
    )  # fmt: skip
