"""Numbers of 8 bits in the KV cache: how kernels encode and decode them.

Layouts and values are those of `octavo.kernels.reference_kv`. Attention multiplies codes: they become
float16, which holds every one of them exactly, while scales and offsets are applied to scores, probabilities
and results. Queries are brought to float16 as well, as `QUERY_UNIT`-ths, so that those of bfloat16 fit (up to
a million; with what float16 cannot hold, they are exact to 5e-7).

FP8 needs no hardware that knows it: E5M2 is the upper half of a float16, and the bits of an E4M3 moved one
place to the right are a float16 of 1/256 of its value, subnormal numbers included (NaN, which only a NaN
becomes, is then 480). Devices from capability 8.9 on convert E4M3 by an instruction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import power_of_2

# Kinds of numbers in a cache: of the queries' type, or codes.
AS_IS = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)
INT8_OFFSET = tl.constexpr(4)
# How codes are decoded: by plain operations (Triton's interpreter), by instructions on four at a time, by
# the conversion that the device has.
PLAIN = tl.constexpr(0)
PACKED = tl.constexpr(1)
NATIVE = tl.constexpr(2)

QUERY_UNIT = tl.constexpr(16.0)
# Probabilities times V's scales, which are as small as 1e-6, are brought to float16 as multiples of its
# inverse.
VALUE_UNIT = tl.constexpr(1 / 128)

_KINDS = {"fp8": E4M3, "fp8_e5m2": E5M2, "int8": INT8}

# Two pairs of codes, of a register's bytes 0 .. 3, to the first codes of both (bytes 0 and 2) and the second
# ones. `prmt` picks bytes of its first two operands, the first of which are 0 .. 3; code 4 is a zero here.
_E5M2_ASM = tl.constexpr(
    """{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xff00ff00;
    }"""
)
# `lop3` with 0xe4 takes the first operand's bits where the third has a 1 (the signs), else the second's.
_E4M3_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c;
    shl.b32 a, $2, 8;
    shl.b32 b, $2, 7;
    shr.u32 c, $2, 1;
    and.b32 b, b, 0x3f803f80;
    and.b32 c, c, 0x3f803f80;
    and.b32 a, a, 0x80008000;
    or.b32 $0, a, b;
    lop3.b32 $1, $2, c, 0x80008000, 0xe4;
    }"""
)
_E4M3_NATIVE_ASM = tl.constexpr(
    """{
    .reg .b32 a;
    .reg .b16 first, second;
    prmt.b32 a, $2, 0, 0x3120;
    mov.b32 {first, second}, a;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
    }"""
)
# 0x6400 + n is the float16 of 1024 + n, here of a code and 128; 0x6480 that of 1152.
_INT8_ASM = tl.constexpr(
    """{
    .reg .b32 u, a, b, c;
    xor.b32 u, $2, 0x80808080;
    mov.b32 c, 0x64646464;
    prmt.b32 a, u, c, 0x4240;
    prmt.b32 b, u, c, 0x4341;
    mov.b32 c, 0x64806480;
    sub.f16x2 $0, a, c;
    sub.f16x2 $1, b, c;
    }"""
)


@triton.jit
def decode_plain(code, KIND: tl.constexpr):
    """float16 values of codes (uint16) as `decode_pairs` returns them, E4M3's 1/256-fold."""
    if KIND == E4M3:
        value = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif KIND == E5M2:
        value = (code << 8).to(tl.float16, bitcast=True)
    else:
        value = code.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float16)
    return value


@triton.constexpr_function
def decoding_instructions(kind: int, how: int) -> str:
    """The assembly of `decode_pairs`."""
    if kind == E4M3.value:
        return (_E4M3_NATIVE_ASM if how == NATIVE.value else _E4M3_ASM).value
    return (_E5M2_ASM if kind == E5M2.value else _INT8_ASM).value


@triton.jit
def decode_pairs(pairs, KIND: tl.constexpr, HOW: tl.constexpr):
    """float16 values of pairs of codes (uint16), those of the lower bytes and those of the upper ones.

    They are to be multiplied by their scales and by `units`.
    """
    if HOW == PLAIN:
        low = decode_plain(pairs & 0xFF, KIND)
        high = decode_plain(pairs >> 8, KIND)
    else:
        low, high = tl.inline_asm_elementwise(
            decoding_instructions(KIND, HOW),
            "=&r,=&r,r",
            [pairs],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def units(scale_ptr, kv_head, KV_HEADS: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr):
    """Factors of a KV head: of the scores' products, and of the weighted sums of values."""
    k_unit = 1.0
    v_unit = 1.0
    if KIND == E4M3 or KIND == E5M2:
        DECODED: tl.constexpr = 256.0 if KIND == E4M3 and HOW != NATIVE else 1.0
        k_unit = tl.load(scale_ptr + kv_head) * (DECODED * QUERY_UNIT)
        v_unit = tl.load(scale_ptr + KV_HEADS + kv_head) * DECODED
    if KIND == INT8 or KIND == INT8_OFFSET:
        k_unit = 1.0 * QUERY_UNIT
        v_unit = 1.0 * VALUE_UNIT
    return k_unit, v_unit


@triton.jit
def load_queries(
    q_ptr, mask, HEAD_DIM: tl.constexpr, BLOCK_W: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Queries at `q_ptr` `[lanes]` as they are multiplied with keys, `[lanes, BLOCK_W]`: all elements of a
    head, of a quantized cache the even ones and the odd ones."""
    if KIND == AS_IS:
        dims = tl.arange(0, BLOCK_W)
        live = mask[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr[:, None] + dims[None, :], mask=live, other=0.0)
        q_odd = q
    else:
        dims = tl.arange(0, BLOCK_W) * 2
        live = mask[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr[:, None] + dims[None, :], mask=live, other=0.0).to(tl.float32)
        q_odd = tl.load(q_ptr[:, None] + dims[None, :] + 1, mask=live, other=0.0).to(tl.float32)
        q = (q * (1 / QUERY_UNIT)).to(tl.float16)
        q_odd = (q_odd * (1 / QUERY_UNIT)).to(tl.float16)
    return q, q_odd


@triton.jit
def load_stats(stats_ptr, place, mask, V_OFFSET: tl.constexpr):
    """INT8's scales or offsets of keys and of values, float32, of the positions at `place` of their blocks,
    whose first one's is at `stats_ptr`, and V_OFFSET words on for values.

    Two at once are read, of which one is taken: what is narrower than 4 bytes is not copied asynchronously,
    and would be waited for in each step. Both parts are one load, or for tiles of few positions the compiler
    lets every thread load each number that it needs.
    """
    part = tl.arange(0, 2)[:, None] * V_OFFSET
    two_ptr = ((stats_ptr + place // 2 * 2)[None, :] + part).to(tl.pointer_type(tl.uint32))
    two = tl.load(two_ptr, mask=tl.broadcast_to(mask[None, :], two_ptr.shape), other=0)
    one = (two >> (place % 2 * 16).to(tl.uint32)[None, :]).to(tl.uint16)
    return tl.split(tl.trans(one.to(tl.float16, bitcast=True).to(tl.float32)))


@triton.jit
def cache_words(cache_ptr, KIND: tl.constexpr):
    """The cache by words: elements, or pairs of codes."""
    if KIND != AS_IS:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint16))
    return cache_ptr


@triton.constexpr_function
def words_of(head_dim: int, kind: int) -> int:
    """Words of a token's part and head."""
    return head_dim if kind == AS_IS.value else head_dim // 2


@triton.constexpr_function
def head_words(block_size: int, head_dim: int, kind: int) -> int:
    """Words of one part's head in a block."""
    stats = {INT8.value: 1, INT8_OFFSET.value: 2}.get(kind, 0)
    return block_size * ((head_dim if kind == AS_IS.value else head_dim // 2) + stats)


@triton.jit
def store_heads(ptr, even, odd, live, HEAD_DIM: tl.constexpr, BLOCK_W: tl.constexpr, KIND: tl.constexpr):
    """Stores heads `[lanes, HEAD_DIM]` at `ptr` `[lanes]`, in the dtype that it points to; of a quantized
    cache from their even and odd elements."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    words = tl.arange(0, BLOCK_W)
    if KIND == AS_IS:
        tl.store(
            ptr[:, None] + words[None, :], even.to(dtype), mask=live[:, None] & (words < HEAD_DIM)[None, :]
        )
    else:
        mask = live[:, None] & (words < HEAD_DIM // 2)[None, :]
        tl.store(ptr[:, None] + words[None, :] * 2, even.to(dtype), mask=mask)
        tl.store(ptr[:, None] + words[None, :] * 2 + 1, odd.to(dtype), mask=mask)


@dataclass(frozen=True, eq=False)
class KVCodes:
    """What kernels must know of a quantized cache beside its tensor.

    Attributes:
        dtype: fp8, fp8_e5m2 or int8.
        block_size: tokens of a block.
        head_dim: elements of a head.
        offset: whether INT8 numbers have one.
        scale: of FP8, float32 `[2, kv_heads]`, K's and V's, on the device; None for INT8.
        how: PLAIN, PACKED or NATIVE; None: the device's fastest.
        centre: float32 `[kv_heads, head_dim]`, contiguous, what keys are stored less of (read only
            where they are written); None: nothing.
    """

    dtype: str
    block_size: int
    head_dim: int
    offset: bool = False
    scale: torch.Tensor | None = None
    how: int | None = None
    centre: torch.Tensor | None = None

    @functools.cached_property
    def kind(self) -> int:
        """The kernels' constant KIND."""
        return (INT8_OFFSET if self.offset else _KINDS[self.dtype]).value


@functools.cache
def fastest_decoding(device: int) -> int:
    """HOW of a device; negative: the CPU, where Triton's interpreter knows no instructions."""
    if device < 0:
        return PLAIN.value
    return (NATIVE if torch.cuda.get_device_capability(device) >= (8, 9) else PACKED).value


class CacheView(NamedTuple):
    """A cache tensor as kernels take it.

    Attributes:
        kv_heads, block_size: its sizes.
        block: words from a block to the next.
        block_words: lanes for a head's words: a power of 2.
        kind, how: constants KIND and HOW.
        scale, centre: tensors for the places of FP8's scales, and of what keys are stored less of.
        centred: whether there is such a thing.
    """

    kv_heads: int
    block_size: int
    block: int
    block_words: int
    kind: int
    how: int
    scale: torch.Tensor
    centre: torch.Tensor
    centred: bool


def view_cache(cache: torch.Tensor, codes: KVCodes | None, instead: torch.Tensor) -> CacheView:
    """How kernels take a cache; `instead` stands for scales and centres where there are none."""
    kv_heads, block = cache.shape[2], cache.stride(0)
    if codes is None:
        lanes = power_of_2(cache.shape[4])
        sizes = (kv_heads, cache.shape[3], block, lanes)
        return CacheView(*sizes, AS_IS.value, PLAIN.value, instead, instead, False)
    how = fastest_decoding(cache.get_device()) if codes.how is None else codes.how
    # A matrix product takes at least 16.
    lanes = max(16, power_of_2(codes.head_dim // 2))
    scale = instead if codes.scale is None else codes.scale
    centred = codes.centre is not None
    centre = instead if codes.centre is None else codes.centre
    sizes = (kv_heads, codes.block_size, block // 2, lanes)
    return CacheView(*sizes, codes.kind, how, scale, centre, centred)


def product_dtype(q: torch.Tensor, codes: KVCodes | None) -> torch.dtype:
    """Of the matrix products of attention, on which tiles depend."""
    return q.dtype if codes is None else torch.float16
