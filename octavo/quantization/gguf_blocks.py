"""GGML's block encodings taken apart into integers, scales and minima.

The layouts are those of ggml's block structs (https://github.com/ggml-org/ggml, ggml-common.h). A value is
`scale * (q - zero)` or `scale * q + minimum`, with a scale for every group of 16 or 32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kernels.reference_quant import INT8, QuantFormat, QuantizedMatrix

# Scales, and minima if there are any, float32 `[n, groups, 1]`.
Scales = tuple[torch.Tensor, torch.Tensor | None]
_STEP = 1 << 18  # values taken apart at a time: what stays in a core's cache


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as float32 `[n, 1, 1]`."""
    return blocks[:, at : at + 2].view(torch.float16).float()[:, :, None]


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Bytes `[..., m]` to `out` `[..., 2, m]`: low halves, then high halves."""
    out[..., 0, :] = packed & 0xF
    out[..., 1, :] = packed >> 4


def _q4_0(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, 2:], q.view(-1, 2, 16))
    return _half(b, 0), None


def _q4_1(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, 4:], q.view(-1, 2, 16))
    return _half(b, 0), _half(b, 2)


def _fifth_bits(b: torch.Tensor, at: int) -> torch.Tensor:
    """Bit j of the 32 bits at byte `at`, worth 16 each: uint8 `[n, 32]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)
    return ((b[:, at : at + 4, None] >> shifts) & 1).mul_(16).flatten(1)


def _q5_0(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, 6:], q.view(-1, 2, 16))
    q.add_(_fifth_bits(b, 2))
    return _half(b, 0), None


def _q5_1(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, 8:], q.view(-1, 2, 16))
    q.add_(_fifth_bits(b, 4))
    return _half(b, 0), _half(b, 2)


def _q8_0(b: torch.Tensor, q: torch.Tensor) -> Scales:
    q.copy_(b[:, 2:].view(torch.int8))
    return _half(b, 0), None


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, 64]` to `[n, 2, 4, 32]`: of each 32 bytes the lowest pairs of bits, then the next."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    return (packed.unflatten(1, (2, 1, 32)) >> shifts) & 3


def _q2_k(b: torch.Tensor, q: torch.Tensor) -> Scales:
    scales = b[:, :16, None]
    q.view(-1, 2, 4, 32).copy_(_two_bits(b[:, 16:80]))
    return _half(b, 80) * (scales & 0xF), -(_half(b, 82) * (scales >> 4))


def _q3_k(b: torch.Tensor, q: torch.Tensor) -> Scales:
    bits = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 2, 4, 1)
    # The third bit is stored inverted: where it is 0, 4 is taken off (the format's zero).
    high = ((b[:, None, None, :32] >> bits) & 1).mul_(4)
    q.view(-1, 2, 4, 32).copy_(_two_bits(b[:, 32:96])).add_(high)
    low = torch.empty((len(b), 2, 8), dtype=torch.uint8, device=b.device)
    _nibbles(b[:, 96:104], low)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).view(1, 4, 1)
    top = ((b[:, 104:108].unflatten(1, (1, 4)) >> shifts) & 3).flatten(1)
    scales = (low.flatten(1) + (top << 4)).to(torch.int8).sub_(32)
    return _half(b, 108) * scales[:, :, None], None


def _k_scales(b: torch.Tensor) -> Scales:
    """Scales and minima of Q4_K's and Q5_K's 8 sub-blocks.

    Six bits each in 12 bytes: four whole scales, four whole minima (their top two bits belong to the
    later ones), then the low nibbles of the later four of both. The minima are stored without their sign.
    """
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([first & 63, (third & 0xF) | ((first >> 2) & 0x30)], dim=1)
    low = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
    return _half(b, 0) * scale[:, :, None], -(_half(b, 2) * low[:, :, None])


def _q4_k(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, 16:].unflatten(1, (4, 32)), q.view(-1, 4, 2, 32))
    return _k_scales(b)


def _q5_k(b: torch.Tensor, q: torch.Tensor) -> Scales:
    bits = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    high = ((b[:, None, 16:48] >> bits) & 1).mul_(16)
    _nibbles(b[:, 48:].unflatten(1, (4, 32)), q.view(-1, 4, 2, 32))
    q.view(-1, 8, 32).add_(high)
    return _k_scales(b)


def _q6_k(b: torch.Tensor, q: torch.Tensor) -> Scales:
    _nibbles(b[:, :128].unflatten(1, (2, 64)), q.view(-1, 2, 2, 64))
    q.view(-1, 2, 4, 32).add_(_two_bits(b[:, 128:192]).mul_(16))
    return _half(b, 208) * b[:, 192:208, None].view(torch.int8), None


@dataclass(frozen=True)
class Encoding:
    """One of GGML's encodings.

    Attributes:
        elements, nbytes: values and bytes of a block.
        format: what `take_apart` gives: the group, zero and minima of q.
        take_apart: from blocks uint8 `[n, nbytes]` fills q `[n, elements]` (contiguous, of any dtype that
            holds the numbers); returns scales and minima.
        halves: where in a block there are float16s.
    """

    elements: int
    nbytes: int
    format: QuantFormat
    take_apart: Callable[[torch.Tensor, torch.Tensor], Scales]
    halves: tuple[int, ...]


ENCODINGS = {
    "Q4_0": Encoding(32, 18, QuantFormat(4, 32, False, 8), _q4_0, (0,)),
    "Q4_1": Encoding(32, 20, QuantFormat(4, 32, True, 0), _q4_1, (0, 2)),
    "Q5_0": Encoding(32, 22, QuantFormat(5, 32, False, 16), _q5_0, (0,)),
    "Q5_1": Encoding(32, 24, QuantFormat(5, 32, True, 0), _q5_1, (0, 2)),
    "Q8_0": Encoding(32, 34, INT8, _q8_0, (0,)),
    "Q2_K": Encoding(256, 84, QuantFormat(4, 16, True, 0), _q2_k, (80, 82)),
    "Q3_K": Encoding(256, 110, QuantFormat(4, 16, False, 4), _q3_k, (108,)),
    "Q4_K": Encoding(256, 144, QuantFormat(4, 32, True, 0), _q4_k, (0, 2)),
    "Q5_K": Encoding(256, 176, QuantFormat(5, 32, True, 0), _q5_k, (0, 2)),
    "Q6_K": Encoding(256, 210, QuantFormat(6, 16, False, 32), _q6_k, (208,)),
}


def is_finite(encoding: Encoding, data: torch.Tensor) -> bool:
    """Whether the numbers of which scales and minima are made are finite: data uint8 `[bytes]`."""
    blocks = data.view(-1, encoding.nbytes)
    return all(bool(blocks[:, at : at + 2].view(torch.float16).isfinite().all()) for at in encoding.halves)


def decode(encoding: Encoding, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks to values, float32 `[n, elements]`, by the operations of ggml's `dequantize_row_*` in the same
    order and precision: results are bit-equal."""
    scale, minimum = encoding.take_apart(blocks, out)
    if encoding.format.zero:
        out.sub_(encoding.format.zero)
    groups = out.view(len(out), -1, encoding.format.group)
    groups.mul_(scale)
    if minimum is not None:
        groups.add_(minimum)


def quantized_matrix(type_name: str, data: torch.Tensor, rows: int, columns: int) -> QuantizedMatrix | None:
    """A matrix in its quantized form.

    Its numbers are those that `decode` gives, but for the K encodings: their scales, products of two numbers,
    are rounded to float16 here (by at most 2^-11 of themselves).

    Args:
        type_name: GGML's name of the encoding.
        data: uint8 `[bytes]`, the encoded matrix `[rows, columns]`.

    Returns:
        None where scales exceed what float16 holds.
    """
    encoding = ENCODINGS[type_name]
    form = encoding.format
    blocks = data.view(-1, encoding.nbytes)
    q = torch.empty(len(blocks), encoding.elements, dtype=torch.int8 if form.bits == 8 else torch.uint8)
    groups = encoding.elements // form.group
    scale = torch.empty(len(blocks), groups, dtype=torch.float16)
    minimum = torch.empty_like(scale) if form.has_minimum else None
    step = _STEP // encoding.elements
    for start in range(0, len(blocks), step):
        piece = slice(start, start + step)
        scales, minima = encoding.take_apart(blocks[piece], q[piece])
        scale[piece] = scales[:, :, 0]
        if minimum is not None and minima is not None:
            minimum[piece] = minima[:, :, 0]
    if not bool(scale.isfinite().all()) or (minimum is not None and not bool(minimum.isfinite().all())):
        return None
    per_row = (rows, columns // form.group)
    return QuantizedMatrix(
        form, q.view(rows, columns), scale.view(per_row), None if minimum is None else minimum.view(per_row)
    )
