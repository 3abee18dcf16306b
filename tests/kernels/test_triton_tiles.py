"""Triton's products with 4-bit weights in tiles against float64, in sizes that fill nothing evenly."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import ops, reference_tiles
from octavo.kernels.reference_tiles import NF4, Tiles, dequantize_tiles
from octavo.kernels.triton import tiles as kernels
from octavo.kernels.triton import weight_only
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.unpack import table_ptx
from octavo.kernels.triton.workspace import workspace
from tests.kernels import tiles_cases
from tests.kernels.tiles_cases import FORMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until they are written."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", filled)
    workspace(torch.zeros(0, device=DEVICE).device).floats.fill_(float("nan"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size_in", "size_out"), [(256, 40), (576, 24), (768, 33), (192, 7)])
def test_forms(form: str, size_in: int, size_out: int) -> None:
    """Tiles hold the matrix, expanding gives it back, and the product is that with it."""
    case = tiles_cases.make(form, size_in, size_out, DEVICE)
    assert torch.equal(dequantize_tiles(case.tiles, size_in), case.weight)
    assert torch.equal(kernels.expand_tiles(case.tiles, size_in, torch.float32), case.weight)
    tiles_cases.check(case, 3, HALF, None, TilesConfig(16, 2, 4, 2), TOLERANCE[HALF])


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 17, 40])
@pytest.mark.parametrize("config", [(32, 2, 4, 1, 0, 0), (16, 3, 2, 3, 4, 16)])
def test_rows(rows: int, config: tuple[int, ...]) -> None:
    case = tiles_cases.make("int4 128", 640, 48, DEVICE)
    got = []
    for _ in range(2):
        torch.manual_seed(0)
        got.append(tiles_cases.check(case, rows, HALF, None, TilesConfig(*config), TOLERANCE[HALF]))
    assert torch.equal(*got)
    assert not workspace(got[0].device).counters.any()


@pytest.mark.parametrize("form", ["int4 32", "int4 64 zeros", "int4", "nf4 64"])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("splits", [1, 2])
def test_gated(form: str, act: str, splits: int) -> None:
    case = tiles_cases.make(form, 576, 56, DEVICE)
    tiles_cases.check(case, 3, HALF, act, TilesConfig(16, 2, 4, splits), TOLERANCE[HALF])


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("act", [None, ops.silu_and_mul, torch.nn.functional.silu])
def test_choice(rows: int, dtype: torch.dtype, act: Any) -> None:
    """Whatever is chosen for so many rows of a type, and an activation that no kernel ends with."""
    case = tiles_cases.make("int4 128 zeros", 256, 32, DEVICE)
    x = torch.randn(rows, 256, device=DEVICE).to(dtype)
    bias = torch.randn(32, device=DEVICE).to(dtype)
    got = weight_only.tiles_linear(x, case.tiles, bias, act)
    want = reference_tiles.tiles_linear(x, case.tiles, bias, act)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_no_rows_and_refusals() -> None:
    case = tiles_cases.make("int4 128", 256, 32, DEVICE)
    config = TilesConfig(16, 2, 4)
    x = torch.zeros(1, 256, device=DEVICE, dtype=HALF)
    assert kernels.tiles_linear(x[:0], case.tiles, None, None, config).shape == (0, 32)
    with pytest.raises(ValueError, match="513 rows"):
        kernels.tiles_linear(x.expand(513, -1), case.tiles, None, None, config)
    with pytest.raises(ValueError, match="'relu'"):
        kernels.tiles_linear(x, case.tiles, None, "relu", config)
    with pytest.raises(ValueError, match="256 columns in 16 groups: groups must be of multiples of 32"):
        reference_tiles.group_of(256, 16)


def _run_ptx(code: str, word: int) -> dict[str, int]:
    """What straight-line PTX leaves in registers, of the few instructions that unpacking has."""
    registers: dict[str, int] = {"$4": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in code.strip("{}\n").splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name.startswith("."):
            continue
        target, *operands = re.split(r",\s*", rest)
        a, *others = (value(operand) for operand in operands)
        if name == "mov.b32":
            found = a
        elif name == "shr.b32":
            found = a >> others[0]
        elif name == "and.b32":
            found = a & others[0]
        elif name == "prmt.b32":
            eight, found = (a | others[0] << 32).to_bytes(8, "little"), 0
            for i in range(4):
                which = others[1] >> 4 * i & 15
                assert which < 8  # else it would repeat a sign
                found |= eight[which] << 8 * i
        else:
            assert name == "lop3.b32", name
            b, c, table = others
            found = 0
            for bit in range(32):
                index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
                found |= (table >> index & 1) << bit
        registers[target] = found & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_code_that_looks_numbers_up(bfloat16: bool) -> None:
    """As PTX's manual says what its instructions do; every code in every place."""
    code = table_ptx(NF4, bfloat16)
    form = torch.bfloat16 if bfloat16 else torch.float16
    want = [int(n) & 0xFFFF for n in torch.tensor(NF4).to(form).view(torch.int16)]
    for first in range(16):
        nibbles = [(first + 3 * i) % 16 for i in range(8)]
        word = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
        found = _run_ptx(code, word)
        for i in range(4):
            assert found[f"${i}"] == want[nibbles[i]] | want[nibbles[i + 4]] << 16


def test_codes_or_ed_into_a_number() -> None:
    """Why the PTX for affine codes is right: bits of 128 + q, and of 1024 + q."""
    for q in range(16):
        assert struct.unpack("<f", struct.pack("<I", (0x4300 | q) << 16))[0] == 128 + q
        assert struct.unpack("<e", struct.pack("<H", 0x6400 | q))[0] == 1024 + q


def test_a_matrix_needs_no_more_than_its_tiles() -> None:
    """Sizes that are stated before anything is loaded are those that are made."""
    for form in FORMS:
        case = tiles_cases.make(form, 576, 24, "cpu")
        made: Tiles = case.tiles
        group, codes, scales, zeros = reference_tiles.tiles_shapes(
            24, 576, case.groups, made.scale_type.itemsize
        )
        assert (group, codes, scales) == (made.group, made.codes.shape, made.scales.shape)
        assert made.zeros is None or zeros == made.zeros.shape
