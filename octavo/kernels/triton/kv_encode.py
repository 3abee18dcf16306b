"""Rows of keys and values to codes of 8 bits, and back: to the bit as `octavo.kernels.reference_kv` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.kv_codes import (
    E4M3,
    E5M2,
    INT8,
    INT8_OFFSET,
    KVCodes,
    decode_plain,
    view_cache,
)
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous

# The float32 of 1.5 * 2^23: what is added to it is rounded to an integer, to nearest even.
_ROUND = tl.constexpr(12582912.0)


@triton.constexpr_function
def head_bytes(block_size: int, head_dim: int, kind: int) -> int:
    """Elements of the cache tensor in one part's head of a block."""
    return block_size * (head_dim + {INT8.value: 2, INT8_OFFSET.value: 4}.get(kind, 0))


@triton.jit
def less_centre(x, centre_ptr, heads, dims, mask, HEAD_DIM: tl.constexpr, CENTRED: tl.constexpr):
    """Elements `dims` `[1, n]` of some heads' keys `x` `[heads, n]` as they are stored, float32."""
    x = x.to(tl.float32)
    if CENTRED:
        x -= tl.load(centre_ptr + heads[:, None] * HEAD_DIM + dims, mask=mask, other=0.0)
    return x


@triton.jit
def value_range(x, mask):
    """Largest and smallest of each row of `x` where `mask` is set."""
    top = tl.max(tl.where(mask, x, float("-inf")), axis=1)
    return top, tl.min(tl.where(mask, x, float("inf")), axis=1)


@triton.jit
def head_scales(scale_ptr, heads, live, top, bottom, KIND: tl.constexpr):
    """Scales and offsets of some heads' numbers (float32): FP8's given ones at `scale_ptr`, INT8's from their
    range, rounded to float16."""
    if KIND == INT8 or KIND == INT8_OFFSET:
        shift = tl.zeros_like(top)
        if KIND == INT8_OFFSET:
            shift = ((top + bottom) * 0.5).to(tl.float16).to(tl.float32)
        # Rounding keeps order: the largest of all distances is that of an end of the range.
        largest = tl.maximum(tl.abs(top - shift), tl.abs(bottom - shift))
        scale = (largest * (1 / 127)).to(tl.float16).to(tl.float32)
    else:
        shift = tl.zeros_like(top)
        scale = tl.load(scale_ptr + heads, mask=live, other=1.0)
    return scale, shift


@triton.jit
def _encode_fp8(x, scale, KIND: tl.constexpr):
    """FP8 codes of `x / scale`, rounded to nearest even, saturated.

    Mantissas of M bits are rounded by adding half of the last place that stays (less one where that is
    even); what is subnormal by an addition whose result has the subnormals' last place.
    """
    M: tl.constexpr = 3 if KIND == E4M3 else 2
    DROP: tl.constexpr = 23 - M
    LARGEST: tl.constexpr = 448.0 if KIND == E4M3 else 57344.0
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if KIND == E4M3 else 2.0**-14
    REBIAS: tl.constexpr = (127 - 7) << 3 if KIND == E4M3 else (127 - 15) << 2
    LAST_PLACE: tl.constexpr = 2.0 ** (23 - 9) if KIND == E4M3 else 2.0 ** (23 - 16)
    LAST_BITS: tl.constexpr = (127 + 14) << 23 if KIND == E4M3 else (127 + 7) << 23
    y = tl.math.div_rn(x, scale)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(y), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - REBIAS
    subnormal = (size + LAST_PLACE).to(tl.int32, bitcast=True) - LAST_BITS
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    return (tl.where(y != y, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def encode(x, scale, shift, KIND: tl.constexpr):
    """Codes (uint8) of `x` `[heads, elements]`, float32, by its heads' scales and offsets."""
    wide = tl.broadcast_to(scale[:, None], x.shape)
    if KIND == E4M3 or KIND == E5M2:
        codes = _encode_fp8(x, wide, KIND)
    else:
        quotient = tl.where(wide > 0, tl.math.div_rn(x - shift[:, None], wide), 0.0)
        quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
        codes = ((quotient + _ROUND) - _ROUND).to(tl.int32).to(tl.uint8)
    return codes


@triton.jit
def store_scales(
    piece_ptr, place, scale, shift, live,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Stores INT8's scales and offsets behind the codes of their heads, whose pieces are at `piece_ptr`."""
    if KIND == INT8 or KIND == INT8_OFFSET:
        scale_ptr = (piece_ptr + BLOCK_SIZE * HEAD_DIM + place * 2).to(tl.pointer_type(tl.float16))
        tl.store(scale_ptr, scale.to(tl.float16), mask=live)
        if KIND == INT8_OFFSET:
            tl.store(scale_ptr + BLOCK_SIZE, shift.to(tl.float16), mask=live)


@triton.jit
def store_row(
    piece_ptr, place, scale_ptr, heads, x, mask, live,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Stores one token's heads `x` `[heads, BLOCK_D]` in pieces at `piece_ptr` `[heads]`."""
    x = x.to(tl.float32)
    top, bottom = value_range(x, mask)
    scale, shift = head_scales(scale_ptr, heads, live, top, bottom, KIND)
    at = piece_ptr[:, None] + place * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    tl.store(at, encode(x, scale, shift, KIND), mask=mask)
    store_scales(piece_ptr, place, scale, shift, live, BLOCK_SIZE, HEAD_DIM, KIND)


@triton.jit(do_not_specialize=["rows"])
def _gather_kv_kernel(
    cache_ptr, out_ptr, block_ptr, kv_scale_ptr, cache_block, rows,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N positions, head, part)."""
    PIECE: tl.constexpr = head_bytes(BLOCK_SIZE, HEAD_DIM, KIND)
    wait_for_previous(OVERLAP)
    pos = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2) * KV_HEADS + tl.program_id(1)  # of both parts
    there = pos < rows
    block = tl.load(block_ptr + pos // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    piece = cache_ptr + block * cache_block + head * PIECE
    place = pos % BLOCK_SIZE
    dims = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    codes = tl.load(piece[:, None] + (place * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0)
    values = decode_plain(codes.to(tl.uint16), KIND).to(tl.float32)
    if KIND == INT8 or KIND == INT8_OFFSET:
        stats = (piece + BLOCK_SIZE * HEAD_DIM + place * 2).to(tl.pointer_type(tl.float16))
        values *= tl.load(stats, mask=there, other=0.0).to(tl.float32)[:, None]
        if KIND == INT8_OFFSET:
            values += tl.load(stats + BLOCK_SIZE, mask=there, other=0.0).to(tl.float32)[:, None]
    else:
        values *= tl.load(kv_scale_ptr + head) * (256.0 if KIND == E4M3 else 1.0)
    at = (head.to(tl.int64) * rows + pos)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=mask)


_gather_kv = Launcher(_gather_kv_kernel, overlap=True)


def gather_kv(
    cache: torch.Tensor, codes: KVCodes, blocks: torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """The values of a quantized cache's first `rows` tokens of a block table.

    Args:
        cache, codes: as for `attention.paged_decode`.
        blocks: int32 `[at least rows / block_size]`, contiguous: the table's entries.
        rows: tokens.
        dtype: of the result, to which values are rounded.

    Returns:
        `[2, kv_heads, rows, head_dim]`, keys and values.
    """
    view = view_cache(cache, codes, blocks)
    block_d = power_of_2(codes.head_dim)
    block_n = max(1, 4096 // block_d)
    out = torch.empty(2, view.kv_heads, rows, codes.head_dim, dtype=dtype, device=cache.device)
    _gather_kv(
        (ceil_div(rows, block_n), view.kv_heads, 2),
        (cache, out, blocks, view.scale),
        (cache.stride(0),),
        (rows,),
        (view.kv_heads, codes.head_dim, view.block_size, block_d, block_n, view.kind),
        4,
    )
    return out
