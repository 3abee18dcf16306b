"""Rotation of one row where it is read: the decode kernel rotates its queries and stores its key itself.

To the bit of `rotary_kv`, up to which products the compiler fuses with sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.kv_codes import AS_IS, QUERY_UNIT
from octavo.kernels.triton.rotary_kv import store_heads_row, weighted


@triton.jit
def _load_rotated(
    x_ptr, dims, live, angles_ptr, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Elements `dims` `[n]` of heads at `x_ptr` `[lanes]`, normed and rotated, `[lanes, n]` of their dtype:
    zeros in lanes that are not `live` and past a head's end."""
    HALF: tl.constexpr = ROT_DIM // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rotates = dims < ROT_DIM
    lower = dims < HALF
    other = tl.where(rotates, tl.where(lower, dims + HALF, dims - HALF), dims)
    cos = tl.load(angles_ptr + dims % HALF, mask=rotates, other=1.0)
    sin = tl.load(angles_ptr + HALF + dims % HALF, mask=rotates, other=0.0)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(x_ptr[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        every = tl.arange(0, BLOCK_D)
        all_mask = live[:, None] & (every < HEAD_DIM)[None, :]
        row = tl.load(x_ptr[:, None] + every[None, :], mask=all_mask, other=0.0).to(tl.float32)
        x_weight = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
        y_weight = tl.load(weight_ptr + other, mask=dims < HEAD_DIM, other=0.0)
        scale = tl.rsqrt(tl.sum(row * row, axis=1) / HEAD_DIM + eps)
        x = weighted(x, scale, x_weight, dtype)
        y = weighted(y, scale, y_weight, dtype)
    return (x * cos[None, :] + y * tl.where(lower, -sin, sin)[None, :]).to(dtype)


@triton.jit
def load_rotated_queries(
    q_ptr, live, angles_ptr, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_NORM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """As `kv_codes.load_queries`, of queries that are neither normed nor rotated yet."""
    words = tl.arange(0, BLOCK_W)
    if KIND == AS_IS:
        q = _load_rotated(
            q_ptr, words, live, angles_ptr, weight_ptr, eps, HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM
        )  # fmt: skip
        q_odd = q
    else:
        even = _load_rotated(
            q_ptr, words * 2, live, angles_ptr, weight_ptr, eps, HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM
        )  # fmt: skip
        odd = _load_rotated(
            q_ptr, words * 2 + 1, live, angles_ptr, weight_ptr, eps, HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM
        )  # fmt: skip
        q = (even.to(tl.float32) * (1 / QUERY_UNIT)).to(tl.float16)
        q_odd = (odd.to(tl.float32) * (1 / QUERY_UNIT)).to(tl.float16)
    return q, q_odd


@triton.jit
def load_rotated_row(
    k_ptr, v_ptr, angles_ptr, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One KV head of a row: the key at `k_ptr`, normed and rotated, and the value, `[1, BLOCK_D]` each."""
    one, dims = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    v = tl.load(v_ptr + one[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    k = _load_rotated(
        k_ptr + one, dims, one < 1, angles_ptr, weight_ptr, eps, HEAD_DIM, ROT_DIM, BLOCK_D, HAS_NORM
    )  # fmt: skip
    return k, v


@triton.jit
def store_one_head(
    k, v, cache_ptr, cache_block, slot, kv_scale_ptr, kv_centre_ptr, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Stores what `load_rotated_row` returns; `cache_block` counts elements of the cache."""
    heads = kv_head + tl.arange(0, 1)
    live = (heads < KV_HEADS) & (slot >= 0)
    mask = live[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    store_heads_row(
        k, v, cache_ptr, cache_block, slot, kv_scale_ptr, kv_centre_ptr, heads, live, mask,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KIND, CENTRED,
    )  # fmt: skip


@dataclass(frozen=True)
class Unrotated:
    """What `paged_decode` takes of a row instead of `rotary_kv.rotary_and_write_kv`, as that does.

    Attributes:
        k, v: `[1, kv_heads, head_dim]`.
        angles: float32 `[1, rot_dim]`, its row of the rotary table.
        slots: int64 `[1]`.
        q_weight, k_weight: `[head_dim]` each, or both None.
        eps: of the norms.
    """

    k: torch.Tensor
    v: torch.Tensor
    angles: torch.Tensor
    slots: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
