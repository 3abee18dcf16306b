"""What the attention kernels are made of: steps of the online softmax, and the merging of partial results.

A partial result is what a softmax over some of a row's positions came to, in float32: the weighted sum of
the values (the accumulator), the largest exponent, and the sum of the weights. Exponents are in base 2. In
memory, an accumulator over a quantized cache has the even elements of a head before the odd ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.activation import tanh
from octavo.kernels.triton.kv_codes import (
    AS_IS,
    INT8,
    INT8_OFFSET,
    VALUE_UNIT,
    decode_pairs,
    head_words,
    load_stats,
    words_of,
)
from octavo.kernels.triton.launch import prefetch_l2


@triton.jit
def split_chunk(length, splits, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions of each of at most `splits` pieces of `length`: a multiple of BLOCK_N, as MIN_CHUNK is, so
    that a short range uses few of the launched splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N, MIN_CHUNK)


@triton.jit
def pieces_of(
    length, splits, SPLIT: tl.constexpr, WHOLE: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Positions of a piece of a context of `length`, and how many pieces there are: up to WHOLE times
    MIN_CHUNK are not split."""
    chunk, used = length, 1
    if SPLIT:
        if length > WHOLE * MIN_CHUNK:
            chunk = split_chunk(length, splits, MIN_CHUNK, BLOCK_N)
            used = tl.cdiv(length, chunk)
    return chunk, used


@triton.jit
def send_for_blocks(
    table_ptr, head_ptr, cache_block, begin, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sends for the keys and values of positions `begin..end` (exclusive) into the L2, in whole blocks.

    LANES // 2 blocks at most. It reads nothing: blocks may be written meanwhile.
    """
    PIECE: tl.constexpr = head_words(BLOCK_SIZE, HEAD_DIM, KIND)
    BYTES: tl.constexpr = PIECE * head_ptr.dtype.element_ty.primitive_bitwidth // 8 // 16 * 16
    lane = tl.arange(0, LANES)
    number = begin // BLOCK_SIZE + lane // 2
    live = number * BLOCK_SIZE < end
    block = tl.load(table_ptr + number, mask=live, other=0, cache_modifier=".cg")
    at = (head_ptr + block.to(tl.int64) * cache_block + lane % 2 * (KV_HEADS * PIECE)).to(tl.int64)
    prefetch_l2(at // 16 * 16, tl.where(live, BYTES, 0))


@triton.jit
def kv_steps(
    acc, acc_odd, row_max, row_sum, q, q_odd, begin, end, row_pos, table_ptr, head_ptr, cache_block,
    scale_log2, cap_scale,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
    first_blocks=None,
):  # fmt: skip
    """One pass of online softmax over context positions `begin..end` (exclusive).

    Scores times `scale_log2` are the exponents of the softmax in base 2. With CAPPED, scores are first
    replaced by `tanh(scores * cap_scale)`: see `attention.score_scales`.
    MASKED False promises that every row sees every position of the range and that its length is a
    multiple of BLOCK_N. `begin` is a multiple of BLOCK_SIZE or of BLOCK_N.

    With `first_blocks`, the first step's entries of the block table, each step reads those of the next one
    (and MASKED is True): no step's K and V wait for another load of the same step.

    Of a quantized cache (KIND, HOW: see `kv_codes`) elements of a head come as even ones and as odd ones, in
    BLOCK_W lanes each; the accumulators count in `units`, and the scales of the scores have K's. Else
    `acc_odd` and `q_odd` are not used.
    """
    ALIGN: tl.constexpr = BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 else 1
    WORDS: tl.constexpr = words_of(HEAD_DIM, KIND)
    V_OFFSET: tl.constexpr = KV_HEADS * head_words(BLOCK_SIZE, HEAD_DIM, KIND)
    HAS_STATS: tl.constexpr = KIND == INT8 or KIND == INT8_OFFSET
    words = tl.arange(0, BLOCK_W)
    if first_blocks is not None:
        block = first_blocks
    if KIND == INT8_OFFSET:
        q_sum = tl.sum(q.to(tl.float32), axis=1) + tl.sum(q_odd.to(tl.float32), axis=1)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        pos = tl.multiple_of(start, ALIGN) + tl.arange(0, BLOCK_N)
        if first_blocks is None:
            if MASKED:
                block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=pos < end, other=0)
            else:
                block = tl.load(table_ptr + pos // BLOCK_SIZE)
        # 64-bit: a cache of many gigabytes has more elements than an int32 can count.
        at = block.to(tl.int64) * cache_block
        if first_blocks is not None:
            after = pos + BLOCK_N
            block = tl.load(table_ptr + after // BLOCK_SIZE, mask=after < end, other=0)
        rows = at + (pos % BLOCK_SIZE) * WORDS
        k_ptr = head_ptr + rows[None, :] + words[:, None]
        v_ptr = head_ptr + V_OFFSET + rows[:, None] + words[None, :]
        if MASKED or WORDS < BLOCK_W:
            live = words < WORDS
            k = tl.load(k_ptr, mask=(pos < end)[None, :] & live[:, None], other=0)
        else:
            k = tl.load(k_ptr)
        if KIND == AS_IS:
            scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        else:
            k_even, k_odd = decode_pairs(k, KIND, HOW)
            scores = tl.dot(q, k_even)
            scores = tl.dot(q_odd, k_odd, scores)
        if HAS_STATS:
            place = pos % BLOCK_SIZE
            stats_ptr = head_ptr + at + BLOCK_SIZE * WORDS
            k_scale, v_scale = load_stats(stats_ptr, place, pos < end, V_OFFSET)
            scores *= k_scale[None, :]
            if KIND == INT8_OFFSET:
                k_offset, v_offset = load_stats(stats_ptr + BLOCK_SIZE, place, pos < end, V_OFFSET)
                scores += q_sum[:, None] * k_offset[None, :]
        if CAPPED:
            scores = tanh(scores * cap_scale)
        if MASKED:
            seen = (pos[None, :] <= row_pos[:, None]) & (pos < end)[None, :]
            if WINDOW > 0:
                seen = seen & (pos[None, :] > row_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        if MASKED:
            # A row that has seen nothing yet must not compute inf - inf.
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            safe_max = new_max
        probs = tl.math.exp2(scores * scale_log2 - safe_max[:, None])
        shrink = tl.math.exp2(row_max - safe_max)
        row_sum = row_sum * shrink + tl.sum(probs, axis=1)
        if MASKED or WORDS < BLOCK_W:
            v = tl.load(v_ptr, mask=(pos < end)[:, None] & live[None, :], other=0)
        else:
            v = tl.load(v_ptr)
        acc = acc * shrink[:, None]
        if KIND == AS_IS:
            acc = tl.dot(probs.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        else:
            acc_odd = acc_odd * shrink[:, None]
            if KIND == INT8_OFFSET:
                every = tl.sum(probs * (v_offset * (1 / VALUE_UNIT))[None, :], axis=1)[:, None]
                acc += every
                acc_odd += every
            if HAS_STATS:
                probs = probs * (v_scale * (1 / VALUE_UNIT))[None, :]
            v_even, v_odd = decode_pairs(v, KIND, HOW)
            acc = tl.dot(probs.to(q.dtype), v_even, acc)
            acc_odd = tl.dot(probs.to(q.dtype), v_odd, acc_odd)
        row_max = new_max
    return acc, acc_odd, row_max, row_sum


@triton.jit
def store_partial(ptr, acc, acc_odd, live, HEAD_DIM: tl.constexpr, BLOCK_W: tl.constexpr, KIND: tl.constexpr):
    """Stores accumulators at `ptr` `[lanes]`, each in HEAD_DIM consecutive places."""
    WORDS: tl.constexpr = words_of(HEAD_DIM, KIND)
    words = tl.arange(0, BLOCK_W)
    mask = live[:, None] & (words < WORDS)[None, :]
    tl.store(ptr[:, None] + words[None, :], acc, mask=mask)
    if KIND != AS_IS:
        tl.store(ptr[:, None] + words[None, :] + WORDS, acc_odd, mask=mask)


@triton.jit
def merge_partials(
    acc_ptr, max_ptr, sum_ptr, first, step, count, live,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One partial result of each lane's `count`, added up in order, BLOCK_S at a time: lane t's are
    `first[t] + i * step`, of which DIMS elements of HEAD_DIM are taken. Lanes that are not `live` get that of
    no positions: 0, minus infinity, 0.
    """
    # They were written by other multiprocessors: read them past the L1 (".cg").
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_T], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_T], tl.float32)
    for s in tl.range(0, count, BLOCK_S):
        some = s + tl.arange(0, BLOCK_S)
        mask = (some < count)[:, None] & live[None, :]
        at = first[None, :] + some[:, None] * step
        part_max = tl.load(max_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            acc_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & (dims < DIMS)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(part_max, axis=0))
        top = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.math.exp2(row_max - top)
        weight = tl.math.exp2(part_max - top[None, :])
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        row_sum = row_sum * shrink + tl.sum(part_sum * weight, axis=0)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def combine_splits(
    out_ptr, out_row, first_row, rows, kv_head, begin, acc_ptr, max_ptr, sum_ptr, base, splits, v_unit,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, EVEN_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes what the `splits` partial results of one (request, KV head) come to, times `v_unit`, for lanes
    from `begin` on, BLOCK_T of them.

    EVEN_FIRST: they have the even elements of a head before the odd ones.
    """
    tile = begin + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    total, _, weight_sum = merge_partials(
        acc_ptr, max_ptr, sum_ptr, base * TILE + tile, TILE, splits, tile < TILE,
        HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
    )  # fmt: skip
    target = (first_row + tile // GROUP) * out_row + (kv_head * GROUP + tile % GROUP) * HEAD_DIM
    mask = (tile < rows * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    result = (total * (v_unit / weight_sum)[:, None]).to(out_ptr.dtype.element_ty)
    if EVEN_FIRST:
        dims = dims % (HEAD_DIM // 2) * 2 + dims // (HEAD_DIM // 2)
    tl.store(out_ptr + target[:, None] + dims[None, :], result, mask=mask)
