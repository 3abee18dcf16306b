"""Codes of 4 and 8 bits as numbers of 16 bits, two at a time in a register, a few instructions for each pair.

A float's mantissa bits count from its exponent on: code q or-ed into the number 128 (bfloat16; 1024 for
float16) is 128 + q, and one exact operation on the pair takes that and the zero point away.
"""

from __future__ import annotations

import functools
import struct

import triton
import triton.language as tl

# Four nibbles of each of two int16 in a register, less the pair in $5, to four pairs.
_NIBBLES = """{{
.reg .b32 t, one;
mov.b32 one, {one};
lop3.b32 $0, $4, 0x000f000f, {base}, 0xea;
shr.b32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, {base}, 0xea;
shr.b32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, {base}, 0xea;
shr.b32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, {base}, 0xea;
fma.rn.{pair} $0, $0, one, $5;
fma.rn.{pair} $1, $1, one, $5;
fma.rn.{pair} $2, $2, one, $5;
fma.rn.{pair} $3, $3, one, $5;
}}"""
_BF16_NIBBLES: tl.constexpr = tl.constexpr(
    _NIBBLES.format(one="0x3f803f80", base="0x43004300", pair="bf16x2")
)
# The same of bfloat16, and 128 is not taken away.
_BF16_NIBBLES_AND_128 = tl.constexpr("""{
.reg .b32 t;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
shr.b32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
shr.b32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
shr.b32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
}""")
_FP16_NIBBLES: tl.constexpr = tl.constexpr(_NIBBLES.format(one="0x3c003c00", base="0x64006400", pair="f16x2"))


def by_ptx() -> bool:
    """Whether codes are unpacked by PTX, which Triton's interpreter does not know."""
    return not triton.knobs.runtime.interpret


@triton.jit
def unpack_affine(codes, zero, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Nibbles less their zero point: int16 codes `[…, n, m]`, int32 zeros `[…, n]`, to four of `dtype` as the
    codes.

    PACKED: by PTX, for a 16-bit `dtype`; else by what Triton's interpreter knows.
    """
    if PACKED:
        BASE: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
        less = (-zero - BASE).to(tl.float32).to(dtype)
        less = tl.broadcast_to(tl.expand_dims(less, -1), codes.shape)
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _BF16_NIBBLES, "=&r,=&r,=&r,=&r,r,r", [codes, less],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _FP16_NIBBLES, "=&r,=&r,=&r,=&r,r,r", [codes, less],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        wide = codes.to(tl.int32)
        less = tl.expand_dims(zero, -1)
        return (
            ((wide & 15) - less).to(dtype),
            ((wide >> 4 & 15) - less).to(dtype),
            ((wide >> 8 & 15) - less).to(dtype),
            ((wide >> 12 & 15) - less).to(dtype),
        )


@triton.jit
def unpack_and_128(codes, dtype: tl.constexpr, PACKED: tl.constexpr):
    """128 and each nibble of int16 codes, as four of `dtype` in the codes' shape.

    PACKED: by PTX, for bfloat16; else by what Triton's interpreter knows.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            _BF16_NIBBLES_AND_128, "=&r,=&r,=&r,=&r,r", [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = codes.to(tl.int32)
        return (
            ((wide & 15) + 128).to(dtype),
            ((wide >> 4 & 15) + 128).to(dtype),
            ((wide >> 8 & 15) + 128).to(dtype),
            ((wide >> 12 & 15) + 128).to(dtype),
        )


# Four int8 in a register to two pairs. For bfloat16 by way of float32, whose upper half holds them: b + 128
# or-ed into 2 ** 23.
_BF16_BYTES = tl.constexpr("""{
.reg .b32 u, t<4>;
.reg .f32 f<4>;
xor.b32 u, $2, 0x80808080;
prmt.b32 t0, u, 0x4b000000, 0x7440;
prmt.b32 t1, u, 0x4b000000, 0x7441;
prmt.b32 t2, u, 0x4b000000, 0x7442;
prmt.b32 t3, u, 0x4b000000, 0x7443;
mov.b32 f0, t0;
mov.b32 f1, t1;
mov.b32 f2, t2;
mov.b32 f3, t3;
sub.f32 f0, f0, 0f4B000080;
sub.f32 f1, f1, 0f4B000080;
sub.f32 f2, f2, 0f4B000080;
sub.f32 f3, f3, 0f4B000080;
mov.b32 t0, f0;
mov.b32 t1, f1;
mov.b32 t2, f2;
mov.b32 t3, f3;
prmt.b32 $0, t0, t1, 0x7632;
prmt.b32 $1, t2, t3, 0x7632;
}""")
_FP16_BYTES = tl.constexpr("""{
.reg .b32 u, one, less;
mov.b32 one, 0x3c003c00;
mov.b32 less, 0xe480e480;
xor.b32 u, $2, 0x80808080;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
fma.rn.f16x2 $0, $0, one, less;
fma.rn.f16x2 $1, $1, one, less;
}""")
# Four E4M3 likewise: their bits lie in a bfloat16 as those of a number that is 2 ** 120 times smaller, in a
# float16 of one 2 ** 8 times smaller. NaN becomes 480.
_E4M3 = """{{
.reg .b32 t, s, factor, none;
mov.b32 factor, {factor};
mov.b32 none, 0x80008000;
prmt.b32 t, $2, 0, 0x1404;
and.b32 s, t, 0x80008000;
shr.b32 t, t, {shift};
lop3.b32 $0, t, {mask}, s, 0xea;
prmt.b32 t, $2, 0, 0x3424;
and.b32 s, t, 0x80008000;
shr.b32 t, t, {shift};
lop3.b32 $1, t, {mask}, s, 0xea;
fma.rn.{pair} $0, $0, factor, none;
fma.rn.{pair} $1, $1, factor, none;
}}"""
_BF16_E4M3 = tl.constexpr(_E4M3.format(factor="0x7b807b80", shift=4, mask="0x07f007f0", pair="bf16x2"))
_FP16_E4M3 = tl.constexpr(_E4M3.format(factor="0x5c005c00", shift=1, mask="0x3f803f80", pair="f16x2"))


@triton.jit
def unpack_bytes(codes, dtype: tl.constexpr, E4M3: tl.constexpr, PACKED: tl.constexpr):
    """int8 numbers, or bytes that are E4M3 (finite ones), as `dtype`.

    PACKED: by PTX, for a 16-bit `dtype`; else by what Triton's interpreter knows.
    """
    if PACKED and dtype != tl.float32:
        if dtype == tl.bfloat16 and E4M3:
            return tl.inline_asm_elementwise(
                _BF16_E4M3, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        elif dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _BF16_BYTES, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        elif E4M3:
            return tl.inline_asm_elementwise(
                _FP16_E4M3, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                _FP16_BYTES, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
    elif E4M3:
        # The bits of a float32 that is 2 ** 120 times smaller.
        wide = codes.to(tl.int32)
        bits = ((wide & 127) << 20) | ((wide & 128) << 24)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def unpack_table(codes, table_ptr, dtype: tl.constexpr, LOOK_UP: tl.constexpr):
    """Numbers of a table by nibbles of int16 codes, as four of `dtype`, in the codes' shape.

    LOOK_UP: `table_ptx` of the table and `dtype`; None: it is read from memory, float32 `[16]`.
    """
    if LOOK_UP is not None:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                LOOK_UP, "=&r,=&r,=&r,=&r,r", [codes],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                LOOK_UP, "=&r,=&r,=&r,=&r,r", [codes],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        wide = codes.to(tl.int32)
        return (
            tl.load(table_ptr + (wide & 15)).to(dtype),
            tl.load(table_ptr + (wide >> 4 & 15)).to(dtype),
            tl.load(table_ptr + (wide >> 8 & 15)).to(dtype),
            tl.load(table_ptr + (wide >> 12 & 15)).to(dtype),
        )


def _bits(value: float, bfloat16: bool) -> int:
    """The 16 bits of a number, rounded to nearest even."""
    if not bfloat16:
        return int.from_bytes(struct.pack("<e", value), "little")
    wide = int.from_bytes(struct.pack("<f", value), "little")
    return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16 & 0xFFFF


def _words(values: list[int]) -> list[str]:
    """Bytes as 32-bit constants, the first one lowest."""
    return [hex(int.from_bytes(bytes(values[at : at + 4]), "little")) for at in range(0, len(values), 4)]


@functools.cache
def table_ptx(values: tuple[float, ...], bfloat16: bool) -> str:
    """The code of `unpack_table` for 16 numbers, which it holds as constants.

    `prmt` chooses four bytes of eight by a nibble each. So for four codes two of them look up the lower
    bytes and two the upper ones, among the first and the last eight numbers; the codes' highest bits, spread
    over bytes, choose between these.
    """
    bits = [_bits(value, bfloat16) for value in values]
    low, high = _words([b & 0xFF for b in bits]), _words([b >> 8 for b in bits])
    lines = [
        ".reg .b32 w<2>, s<2>, m<2>, a, b, l<2>, h<2>, p, q;",
        "mov.b32 w0, $4;",
        "shr.b32 w1, $4, 16;",
    ]
    for i in range(2):
        lines += [
            f"and.b32 s{i}, w{i}, 0x7777;",
            f"shr.b32 m{i}, w{i}, 3;",
            f"and.b32 m{i}, m{i}, 0x1111;",
            f"prmt.b32 m{i}, 0xff00, 0, m{i};",
        ]
        for name, table in (("l", low), ("h", high)):
            lines += [
                f"prmt.b32 a, {table[0]}, {table[1]}, s{i};",
                f"prmt.b32 b, {table[2]}, {table[3]}, s{i};",
                f"lop3.b32 {name}{i}, m{i}, b, a, 0xca;",  # m ? b : a
            ]
    for first, selector in ((0, 0x5140), (2, 0x7362)):  # codes `first` and the next of both elements
        lines += [
            f"prmt.b32 p, l0, h0, {selector:#x};",
            f"prmt.b32 q, l1, h1, {selector:#x};",
            f"prmt.b32 ${first}, p, q, 0x5410;",
            f"prmt.b32 ${first + 1}, p, q, 0x7632;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"
