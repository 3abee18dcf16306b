"""Triton's products with 4-bit weights in tiles against float64, in sizes that fill nothing evenly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import ops, reference_tiles
from octavo.kernels.reference_tiles import Tiles, dequantize_tiles
from octavo.kernels.triton import tiles as kernels
from octavo.kernels.triton import weight_only
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.tiles_row import RowConfig, tiles_row_linear
from octavo.kernels.triton.tiles_row_warps import WarpsConfig, tiles_row_warps_linear
from octavo.kernels.triton.workspace import workspace
from tests.kernels import tiles_cases
from tests.kernels.poison import poison
from tests.kernels.tiles_cases import FORMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until they are written."""
    poison(monkeypatch, DEVICE)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size_in", "size_out", "act"), [(576, 33, None), (256, 24, "silu")])
def test_one_row(form: str, size_in: int, size_out: int, act: str | None) -> None:
    """Alone, with inputs shared by programs; behind a norm, with and without a residual stream."""
    case = tiles_cases.make(form, size_in, size_out, DEVICE)
    for norm, stream, splits in ((False, False, 2), (True, False, 1), (True, True, 1)):
        tiles_cases.check_row(case, HALF, act, RowConfig(16, 2, 4, splits, 4), norm, stream, TOLERANCE[HALF])
    assert not workspace(case.weight.device).counters.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 33), (256, 24), (1280, 70)])
@pytest.mark.parametrize("config", [(16, 4), (16, 2, 2, 4), (16, 8, 3, 16), (32, 1, 3, 64), (32, 16)])
def test_one_row_by_warps(form: str, size_in: int, size_out: int, config: tuple[int, ...]) -> None:
    """All codes in registers, and in a loop by rounds; more warps than steps."""
    case = tiles_cases.make(form, size_in, size_out, DEVICE)
    cut = WarpsConfig(*config)
    if cut.serves(size_in):
        tiles_cases.check_row_warps(case, HALF, cut, size_out == 33, TOLERANCE[HALF])
        return
    x = torch.zeros(1, size_in, device=DEVICE, dtype=HALF)
    with pytest.raises(ValueError, match=f"of {size_in} inputs.*serves one row, of fewer inputs"):
        tiles_row_warps_linear(x, case.tiles, None, cut)


@pytest.mark.parametrize("rows", [1, 5, 130, 600])
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
    with pytest.raises(ValueError, match="2 rows"):
        tiles_row_linear(x.expand(2, -1), case.tiles, None, None, RowConfig(16, 2, 4))
    with pytest.raises(ValueError, match="2 rows"):
        tiles_row_warps_linear(x.expand(2, -1), case.tiles, None, WarpsConfig(16, 2))
    with pytest.raises(ValueError, match="takes all inputs"):
        tiles_row_linear(x, case.tiles, None, None, RowConfig(16, 2, 4, 2), x[0])
    with pytest.raises(ValueError, match="256 columns in 16 groups: groups must be of multiples of 32"):
        reference_tiles.group_of(256, 16)


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
