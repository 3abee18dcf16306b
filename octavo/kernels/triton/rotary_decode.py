"""A decode step's rotation, KV write and attention as one launch.

For requests of one row each: every program rotates the queries of its KV head, so no kernel has to do so
before. The program of a context's last split also rotates and stores the row's own key and value, and
attends to them from its registers; the cache is read up to the position before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.triton import attention
from octavo.kernels.triton.activation import tanh
from octavo.kernels.triton.attention import MAX_SPLITS, MIN_CHUNK, TileConfig
from octavo.kernels.triton.attention_steps import combine_splits, kv_steps, split_chunk
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous
from octavo.kernels.triton.rotary_kv import weighted


@triton.jit
def _rotated(
    head_ptr, live, weight_ptr, eps, angle_ptr,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The heads at `head_ptr` (`[heads]`), normed and rotated, `[heads, BLOCK_D]` of their dtype."""
    HALF: tl.constexpr = ROT_DIM // 2
    dtype: tl.constexpr = head_ptr.dtype.element_ty
    dims = tl.arange(0, BLOCK_D)
    # Each dimension is loaded with the one that it is rotated with.
    other = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROT_DIM, dims - HALF, dims))
    inside = dims < HEAD_DIM
    mask = live[:, None] & inside[None, :]
    x = tl.load(head_ptr[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptr[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = tl.where(dims < HALF, dims, dims - HALF)
    turns = dims < ROT_DIM
    cos = tl.load(angle_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(angle_ptr + HALF + angle, mask=turns, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        x = weighted(x, scale, tl.load(weight_ptr + dims, mask=inside, other=0.0), dtype)
        y = weighted(y, scale, tl.load(weight_ptr + other, mask=inside, other=0.0), dtype)
    return (x * cos[None, :] + y * sin[None, :]).to(dtype)


# Arguments that change from step to step must not select another compiled variant.
@triton.jit(do_not_specialize=["splits", "table_row"])
def _rotary_decode_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, position_ptr, slot_ptr, q_weight_ptr, k_weight_ptr,
    cache_ptr, out_ptr, query_start_ptr, seq_len_ptr, table_ptr, partial_ptr, counter_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, cache_block,
    splits, table_row, scale_log2, cap_scale, eps,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (kv head, request, split); SPLIT False promises that `splits` is 1. Partial results as in
    `attention._paged_decode_kernel`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(seq_len_ptr + request)
    row = tl.load(query_start_ptr + request).to(tl.int64)
    if (tl.load(query_start_ptr + request + 1) <= row) | (context <= 0):
        return
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context - WINDOW, 0) // BLOCK_SIZE * BLOCK_SIZE
    chunk = context - low
    used = 1
    if SPLIT:
        chunk = split_chunk(context - low, splits, MIN_CHUNK, BLOCK_N)
        used = tl.cdiv(context - low, chunk)
    if split >= used:
        return
    begin = low + split * chunk
    # The row's own position is not read from the cache.
    end = tl.minimum(begin + chunk, context - 1)

    angles = cos_sin_ptr + tl.load(position_ptr + row) * ROT_DIM
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m % GROUP
    q = _rotated(
        q_ptr + row * q_row + head * q_head, m < GROUP, q_weight_ptr, eps, angles,
        HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if split == used - 1:
        one = tl.zeros([1], tl.int32)
        k = _rotated(
            k_ptr + row * k_row + kv_head * k_head + one, one == 0, k_weight_ptr, eps, angles,
            HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM,
        )  # fmt: skip
        v_at = v_ptr + row * v_row + kv_head * v_head + dims[None, :] + one[:, None]
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        slot = tl.load(slot_ptr + row)
        kept: tl.constexpr = cache_ptr.dtype.element_ty
        target = cache_ptr + (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * HEAD_DIM
        target = target + kv_head * (BLOCK_SIZE * HEAD_DIM) + dims[None, :] + one[:, None]
        stored = (dims < HEAD_DIM)[None, :] & (slot >= 0)
        tl.store(target, k.to(kept), mask=stored)
        tl.store(target + KV_HEADS * BLOCK_SIZE * HEAD_DIM, v.to(kept), mask=stored)
        # What others will read is what the cache keeps.
        scores = tl.sum(q.to(tl.float32) * k.to(kept).to(tl.float32), axis=1)
        if CAPPED:
            scores = tanh(scores * cap_scale)
        row_max = scores * scale_log2
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + v.to(kept).to(tl.float32)
    acc, row_max, row_sum = kv_steps(
        acc, row_max, row_sum, q, begin, end, context - 1 + tl.zeros([BLOCK_M], tl.int32),
        table_ptr + request.to(tl.int64) * table_row, cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM),
        cache_block, scale_log2, cap_scale,
        WINDOW, CAPPED, True, HEAD_DIM, BLOCK_SIZE, KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        BLOCK_N, BLOCK_D, STAGES, PRECISION,
    )  # fmt: skip
    if used == 1:
        result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        out_at = out_ptr + row * out_row + head[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_at, result, mask=(m < GROUP)[:, None] & (dims < HEAD_DIM)[None, :])
    else:
        if SPLIT:
            base = (request * KV_HEADS + kv_head).to(tl.int64) * splits
            max_ptr = partial_ptr + tl.num_programs(1).to(tl.int64) * splits * (HEADS * HEAD_DIM)
            sum_ptr = max_ptr + tl.num_programs(1).to(tl.int64) * splits * HEADS
            at = (base + split) * GROUP + m
            tl.store(max_ptr + at, row_max, mask=m < GROUP)
            tl.store(sum_ptr + at, row_sum, mask=m < GROUP)
            part_mask = (m < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=part_mask)
            # All threads' stores come before the release by the one that counts.
            tl.debug_barrier()
            counter = counter_ptr + request * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == used - 1:
                combine_splits(
                    out_ptr, out_row, row, 1, kv_head, partial_ptr, max_ptr, sum_ptr, base, used,
                    GROUP, HEAD_DIM, BLOCK_D, GROUP, BLOCK_T, MAX_SPLITS, BLOCK_S,
                )  # fmt: skip
                tl.store(counter, 0)


_rotary_decode = Launcher(_rotary_decode_kernel, overlap=True)


@functools.cache
def _constants(
    heads: int, kv_heads: int, head_dim: int, rot_dim: int, has_norm: bool, block_size: int,
    dtype: torch.dtype, window: int, capped: bool, split: bool, cfg: TileConfig,
) -> tuple[Any, ...]:  # fmt: skip
    """Constants of `_rotary_decode_kernel`, in its order."""
    block_d, block_t = power_of_2(head_dim), power_of_2(heads // kv_heads)
    # About 64 registers of partial results a thread.
    block_s = max(1, min(MAX_SPLITS, 8192 // (block_t * block_d)))
    min_chunk = ceil_div(MIN_CHUNK, cfg.block_n) * cfg.block_n
    return (
        window, capped, heads, kv_heads, head_dim, rot_dim, has_norm, block_size, split, MAX_SPLITS,
        min_chunk, max(16, block_t), cfg.block_n, block_d, block_t, block_s, cfg.stages,
        attention.precision(dtype),
    )  # fmt: skip


def rotary_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_requests: int,
    splits: int,
    partials: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    config: TileConfig | None = None,
) -> None:
    """`rotary_kv.rotary_and_write_kv` and `attention.paged_decode` of requests of one row each (or none).

    Sums are those of the two up to their order, and the row's own scores are float32's. `q`, `k` and `v`
    stay as they are.

    Args:
        q, k, v, cos_sin, positions, slot_mapping, q_weight, k_weight, eps: as for the first; a request's row
            is the last of its context, so its slot is that of position `seq_lens - 1`.
        out, query_start, …: as for the second, from request 0 on with `max_rows` 1.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, block_size = cache.shape[2], cache.shape[3]
    cfg = config or attention.decode_config(head_dim, q.dtype, attention.shared_memory(q.device))
    _rotary_decode(
        (kv_heads, num_requests, splits),
        (
            q, k, v, cos_sin, positions, slot_mapping, q if q_weight is None else q_weight,
            k if k_weight is None else k_weight, cache, out, query_start, seq_lens, block_table, partials,
            counters,
        ),
        (
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0),
            cache.stride(0),
        ),
        (splits, block_table.stride(0), *attention.score_scales(scale, softcap), eps),
        _constants(
            heads, kv_heads, head_dim, cos_sin.shape[1], q_weight is not None, block_size, q.dtype,
            window or 0, softcap is not None, splits > 1, cfg,
        ),
        cfg.warps,
    )  # fmt: skip
