"""Writing keys and values into the paged cache, alone and fused with rotary embedding and q/k norms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.kv_codes import AS_IS, KVCodes, view_cache
from octavo.kernels.triton.kv_encode import (
    encode,
    head_bytes,
    head_scales,
    less_centre,
    store_row,
    store_scales,
    value_range,
)
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous


@triton.jit
def store_heads_row(
    k, v, cache_ptr, cache_block, slot, kv_scale_ptr, kv_centre_ptr, heads, live, mask,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Stores some `heads` of a row, keys and values `[heads, BLOCK_D]`, at its slot; those that are `live`
    and elements in `mask`."""
    dims = tl.arange(0, BLOCK_D)
    PIECE: tl.constexpr = head_bytes(BLOCK_SIZE, HEAD_DIM, KIND)
    piece = cache_ptr + (slot // BLOCK_SIZE) * cache_block + heads * PIECE
    place = slot % BLOCK_SIZE
    if KIND == AS_IS:
        target = piece[:, None] + place * HEAD_DIM + dims[None, :]
        tl.store(target, k.to(cache_ptr.dtype.element_ty), mask=mask)
        tl.store(target + KV_HEADS * PIECE, v.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        k = less_centre(k, kv_centre_ptr, heads, dims[None, :], mask, HEAD_DIM, CENTRED)
        store_row(
            piece, place, kv_scale_ptr, heads, k, mask, live, BLOCK_SIZE, HEAD_DIM, BLOCK_D, KIND
        )  # fmt: skip
        store_row(
            piece + KV_HEADS * PIECE, place, kv_scale_ptr + KV_HEADS, heads, v, mask, live,
            BLOCK_SIZE, HEAD_DIM, BLOCK_D, KIND,
        )  # fmt: skip


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, cache_ptr, slot_ptr, kv_scale_ptr, kv_centre_ptr,
    k_row, k_head, v_row, v_head, cache_block,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_ptr + row)
    live = heads < HEADS
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + row * k_row + heads[:, None] * k_head + dims[None, :], mask=mask)
    v = tl.load(v_ptr + row * v_row + heads[:, None] * v_head + dims[None, :], mask=mask)
    if slot < 0:
        return
    store_heads_row(
        k, v, cache_ptr, cache_block, slot, kv_scale_ptr, kv_centre_ptr, heads, live, mask,
        HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KIND, CENTRED,
    )  # fmt: skip


@triton.jit
def weighted(x, scale, weight, dtype: tl.constexpr):
    """The tile `x` times its heads' `scale` and the weight, rounded to `dtype` where an unfused norm rounds:
    before a weight of that dtype and after, or with a float32 weight only after."""
    x = x * scale[:, None]
    if weight.dtype == dtype:
        x = x.to(dtype).to(tl.float32)
    return (x * weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x_ptr, weight_ptr, cos_sin_ptr, eps, head_stride, heads, live,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norms and rotates some heads of one row in place; returns their new low, high and unrotated parts."""
    HALF: tl.constexpr = ROT_DIM // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)
    mask = live[:, None] & (half < HALF)[None, :]
    cos = tl.load(cos_sin_ptr + half, mask=half < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + HALF + half, mask=half < HALF, other=0.0)
    low_ptr = x_ptr + heads[:, None] * head_stride + half[None, :]
    low = tl.load(low_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    rest_dims = ROT_DIM + tl.arange(0, BLOCK_REST)
    rest_mask = live[:, None] & (rest_dims < HEAD_DIM)[None, :]
    rest_ptr = x_ptr + heads[:, None] * head_stride + rest_dims[None, :]
    rest = tl.load(rest_ptr, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        low_weight = tl.load(weight_ptr + half, mask=half < HALF, other=0.0)
        high_weight = tl.load(weight_ptr + HALF + half, mask=half < HALF, other=0.0)
        rest_weight = tl.load(weight_ptr + rest_dims, mask=rest_dims < HEAD_DIM, other=0.0)
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)
        low = weighted(low, scale, low_weight, dtype)
        high = weighted(high, scale, high_weight, dtype)
        rest = weighted(rest, scale, rest_weight, dtype)
        tl.store(rest_ptr, rest.to(dtype), mask=rest_mask)
    new_low = (low * cos[None, :] - high * sin[None, :]).to(dtype)
    new_high = (high * cos[None, :] + low * sin[None, :]).to(dtype)
    tl.store(low_ptr, new_low, mask=mask)
    tl.store(low_ptr + HALF, new_high, mask=mask)
    return new_low, new_high, rest.to(dtype)


@triton.jit
def _rotary_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, position_ptr, slot_ptr, cache_ptr, q_weight_ptr, k_weight_ptr,
    kv_scale_ptr, kv_centre_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_block, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CACHE: tl.constexpr, BY_ROW: tl.constexpr,
    KIND: tl.constexpr, CENTRED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, g): the g-th group of BLOCK_H heads; query groups come first, then KV groups."""
    HALF: tl.constexpr = ROT_DIM // 2
    Q_GROUPS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    angles = cos_sin_ptr + (row if BY_ROW else tl.load(position_ptr + row)) * ROT_DIM
    heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
    if group < Q_GROUPS:
        _rotate_heads(
            q_ptr + row * q_row, q_weight_ptr, angles, eps, q_head, heads, heads < Q_HEADS,
            HEAD_DIM, ROT_DIM, BLOCK_HALF, BLOCK_REST, HAS_NORM,
        )  # fmt: skip
    else:
        heads = heads - Q_GROUPS * BLOCK_H
        live = heads < KV_HEADS
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = live[:, None] & (dims < HEAD_DIM)
        if HAS_CACHE:  # one way to memory for all that is read: a load is not moved up over the stores below
            slot = tl.load(slot_ptr + row)
            v = tl.load(v_ptr + row * v_row + heads[:, None] * v_head + dims, mask=mask)
        low, high, rest = _rotate_heads(
            k_ptr + row * k_row, k_weight_ptr, angles, eps, k_head, heads, live,
            HEAD_DIM, ROT_DIM, BLOCK_HALF, BLOCK_REST, HAS_NORM,
        )  # fmt: skip
        if HAS_CACHE:
            live = live & (slot >= 0)
            PIECE: tl.constexpr = head_bytes(BLOCK_SIZE, HEAD_DIM, KIND)
            piece = cache_ptr + (slot // BLOCK_SIZE) * cache_block + heads * PIECE
            place = slot % BLOCK_SIZE
            head_ptr = piece[:, None] + place * HEAD_DIM
            half = tl.arange(0, BLOCK_HALF)[None, :]
            rest_dims = ROT_DIM + tl.arange(0, BLOCK_REST)[None, :]
            half_mask = live[:, None] & (half < HALF)
            rest_mask = live[:, None] & (rest_dims < HEAD_DIM)
            mask = mask & (slot >= 0)
            if KIND == AS_IS:
                dtype: tl.constexpr = cache_ptr.dtype.element_ty
                tl.store(head_ptr + half, low.to(dtype), mask=half_mask)
                tl.store(head_ptr + HALF + half, high.to(dtype), mask=half_mask)
                tl.store(head_ptr + rest_dims, rest.to(dtype), mask=rest_mask)
                tl.store(head_ptr + KV_HEADS * PIECE + dims, v.to(dtype), mask=mask)
            else:
                low = less_centre(low, kv_centre_ptr, heads, half, half_mask, HEAD_DIM, CENTRED)
                high = less_centre(high, kv_centre_ptr + HALF, heads, half, half_mask, HEAD_DIM, CENTRED)
                rest = less_centre(rest, kv_centre_ptr, heads, rest_dims, rest_mask, HEAD_DIM, CENTRED)
                top, bottom = value_range(low, half_mask)
                high_top, high_bottom = value_range(high, half_mask)
                rest_top, rest_bottom = value_range(rest, rest_mask)
                top = tl.maximum(tl.maximum(top, high_top), rest_top)
                bottom = tl.minimum(tl.minimum(bottom, high_bottom), rest_bottom)
                scale, shift = head_scales(kv_scale_ptr, heads, live, top, bottom, KIND)
                tl.store(head_ptr + half, encode(low, scale, shift, KIND), mask=half_mask)
                tl.store(head_ptr + HALF + half, encode(high, scale, shift, KIND), mask=half_mask)
                tl.store(head_ptr + rest_dims, encode(rest, scale, shift, KIND), mask=rest_mask)
                store_scales(piece, place, scale, shift, live, BLOCK_SIZE, HEAD_DIM, KIND)
                store_row(
                    piece + KV_HEADS * PIECE, place, kv_scale_ptr + KV_HEADS, heads, v, mask, live,
                    BLOCK_SIZE, HEAD_DIM, BLOCK_D, KIND,
                )  # fmt: skip


_write_kv = Launcher(_write_kv_kernel, overlap=True)
_rotary_write = Launcher(_rotary_write_kernel, overlap=True)


def _heads_block(heads: int, block_d: int) -> int:
    """Heads of one program: about 1024 elements, so that a decode row still spreads over programs."""
    return max(1, min(power_of_2(heads), 1024 // block_d))


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    codes: KVCodes | None = None,
) -> None:
    """Stores rows of keys and values at their slots.

    Args:
        k, v: `[rows, kv_heads, head_dim]`, contiguous in the last dimension.
        cache: `[num_blocks, 2, kv_heads, block_size, head_dim]`; each block contiguous; with `codes` uint8,
            as `octavo.kernels.reference_kv` writes it.
        slot_mapping: int64 `[rows]`, `block_id * block_size + offset`; negative rows are dropped.
        codes: how numbers are stored; None: as the cache's dtype.
    """
    rows, heads, head_dim = k.shape
    if rows == 0:
        return
    block_d = power_of_2(head_dim)
    block_h = _heads_block(heads, block_d)
    view = view_cache(cache, codes, slot_mapping)
    _write_kv(
        (rows, ceil_div(heads, block_h), 1),
        (k, v, cache, slot_mapping, view.scale, view.centre),
        (k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0)),
        (),
        (heads, head_dim, view.block_size, block_h, block_d, view.kind, view.centred),
        4,
    )


def rotary_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    codes: KVCodes | None = None,
) -> None:
    """Rotates `q` and `k` in place (neox pairing: dimension i with i + rot_dim/2), then stores K and V.

    With `q_weight` and `k_weight`, each head of `q` and `k` is RMS-normalized first (Qwen3, Gemma 3). Without
    a cache only the rotation (and norm) is done. Source: RoPE, arXiv 2104.09864.

    Args:
        q: `[rows, heads, head_dim]`, contiguous in the last dimension (may be a view of the QKV rows).
        k, v: `[rows, kv_heads, head_dim]`, likewise.
        cos_sin: float32 `[max_position, rot_dim]`, cosines in the first half and sines in the second;
            dimensions past `rot_dim` are not rotated.
        positions: int64 `[rows]`; None: `cos_sin` is `[rows, rot_dim]`, each row's own.
        cache, slot_mapping, codes: as for `write_kv`.
        q_weight, k_weight: `[head_dim]` each, of `q`'s dtype or float32, or both None.
        eps: of the norms.
    """
    rows, heads, head_dim = q.shape
    kv_heads, rot_dim = k.shape[1], cos_sin.shape[1]
    if rows == 0:
        return
    block_d = power_of_2(head_dim)
    block_h = _heads_block(max(heads, kv_heads), block_d)
    # Where there is no cache or norm, any tensor stands in for it: the kernel's constants say so.
    has_cache, has_norm = cache is not None, q_weight is not None
    into = k if cache is None else cache
    at = cos_sin if positions is None else positions
    slots = at if slot_mapping is None else slot_mapping
    view = None if cache is None else view_cache(cache, codes, slots)
    _rotary_write(
        (rows, ceil_div(heads, block_h) + ceil_div(kv_heads, block_h), 1),
        (
            q, k, v, cos_sin, at, slots, into,
            q if q_weight is None else q_weight, k if k_weight is None else k_weight,
            slots if view is None else view.scale, slots if view is None else view.centre,
        ),
        (
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            into.stride(0),
        ),
        (eps,),
        (
            heads, kv_heads, head_dim, rot_dim, view.block_size if view else 1, block_h,
            power_of_2(rot_dim // 2), power_of_2(head_dim - rot_dim), block_d, has_norm, has_cache,
            positions is None, view.kind if view else AS_IS.value, view.centred if view else False,
        ),
        4,
    )  # fmt: skip
