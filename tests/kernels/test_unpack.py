"""The PTX that makes numbers of codes, every code in every place, by an interpreter of our own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.reference_tiles import NF4
from octavo.kernels.triton import unpack
from tests.kernels import ptx

BF16, FP16 = torch.bfloat16, torch.float16


def nibbles_of(first: int) -> tuple[list[int], int]:
    """Eight codes, and the register that holds them."""
    nibbles = [(first + 3 * i) % 16 for i in range(8)]
    return nibbles, sum(nibble << 4 * i for i, nibble in enumerate(nibbles))


@pytest.mark.parametrize("kind", [BF16, FP16])
@pytest.mark.parametrize("zeros", [(8, 8), (0, 15), (3, 11)])
def test_affine_codes(kind: torch.dtype, zeros: tuple[int, int]) -> None:
    code, base = (unpack._BF16_NIBBLES, 128) if kind == BF16 else (unpack._FP16_NIBBLES, 1024)
    less = torch.tensor([-zero - base for zero in zeros], dtype=kind).view(torch.int16).tolist()
    pair = (less[0] & 0xFFFF) | (less[1] & 0xFFFF) << 16
    for first in range(16):
        nibbles, word = nibbles_of(first)
        found = ptx.run(code.value, {"$4": word, "$5": pair})
        for i in range(4):
            want = [nibbles[i] - zeros[0], nibbles[i + 4] - zeros[1]]
            assert ptx.halves(found[f"${i}"], kind) == want


@pytest.mark.parametrize("kind", [BF16, FP16])
def test_tables(kind: torch.dtype) -> None:
    code = unpack.table_ptx(NF4, kind == BF16)
    want = torch.tensor(NF4).to(kind).tolist()
    for first in range(16):
        nibbles, word = nibbles_of(first)
        found = ptx.run(code, {"$4": word})
        for i in range(4):
            assert ptx.halves(found[f"${i}"], kind) == [want[nibbles[i]], want[nibbles[i + 4]]]


@pytest.mark.parametrize("kind", [BF16, FP16])
@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn])
def test_bytes(kind: torch.dtype, form: torch.dtype) -> None:
    codes = {
        (BF16, torch.int8): unpack._BF16_BYTES,
        (FP16, torch.int8): unpack._FP16_BYTES,
        (BF16, torch.float8_e4m3fn): unpack._BF16_E4M3,
        (FP16, torch.float8_e4m3fn): unpack._FP16_E4M3,
    }
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form).float()
    for first in range(0, 256):
        four = [(first + 67 * i) % 256 for i in range(4)]
        want = numbers[four].tolist()
        if any(value != value for value in want):
            continue
        word = sum(byte << 8 * i for i, byte in enumerate(four))
        found = ptx.run(codes[kind, form].value, {"$2": word})
        assert ptx.halves(found["$0"], kind) + ptx.halves(found["$1"], kind) == want
