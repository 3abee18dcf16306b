"""Triton's product of up to 256 rows against float64: odd sizes, strides, splits, poisoned memory."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import skinny_linear as skinny
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.kernels.triton.workspace import workspace
from tests.kernels import skinny_cases
from tests.kernels.poison import poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until they are written."""
    poison(monkeypatch, DEVICE)


def check(case: skinny_cases.Case, act: str | None, config: SkinnyConfig) -> torch.Tensor:
    got = skinny.skinny_linear(case.x, case.weight, case.bias, act, config)
    assert got.dtype == case.x.dtype and got.shape == case.want.shape
    assert skinny_cases.error(got, case) < TOLERANCE[got.dtype]
    assert not workspace(case.x.device).counters.any()
    return got


@pytest.mark.parametrize(
    ("rows", "weights_first"),
    [*((rows, True) for rows in (1, 2, 3, 16, 17, 33, 65, 128)), (1, False), (65, False)],
)
def test_rows(rows: int, weights_first: bool) -> None:
    """Rows of x with a stride, outputs that do not fill the last tile, inputs not the last step."""
    case = skinny_cases.make(rows, 72, 40, None, True, HALF, DEVICE, pad=8)
    check(case, None, SkinnyConfig(32, 32, 2, 4, 1, 0, weights_first))


@pytest.mark.parametrize(("rows", "tile_rows"), [(3, 64), (16, 16), (40, 16), (33, 32), (200, 64)])
@pytest.mark.parametrize(("act", "splits", "weights_first"), [(None, 1, True), ("silu", 2, False)])
def test_tiles_of_rows(rows: int, tile_rows: int, act: str | None, splits: int, weights_first: bool) -> None:
    """Tiles larger than the rows, and several of them, the last partly filled."""
    case = skinny_cases.make(rows, 72, 40, act, True, HALF, DEVICE, pad=8)
    check(case, act, SkinnyConfig(16, 32, 2, 4, splits, 0, weights_first, tile_rows))


@pytest.mark.parametrize(("size_in", "size_out"), [(64, 32), (64, 7), (80, 32), (77, 33), (5, 3)])
@pytest.mark.parametrize("act", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("splits", [1, 2])
def test_sizes(size_in: int, size_out: int, act: str | None, splits: int) -> None:
    for dtype, bias in itertools.product((torch.float32, HALF), (True, False)):
        case = skinny_cases.make(3, size_in, size_out, act, bias, dtype, DEVICE, pad=1)
        check(case, act, SkinnyConfig(16, 32, 2, 4, splits))


@pytest.mark.parametrize(
    ("splits", "act", "weights_first"),
    [(2, None, True), (3, None, False), (8, None, True), (3, "silu", True), (2, "gelu_tanh", False)],
)
def test_splits(splits: int, act: str | None, weights_first: bool) -> None:
    """More splits than steps, a short last one; equal bits when it is repeated."""
    for rows, size_in in [(5, 96), (17, 100)]:
        case = skinny_cases.make(rows, size_in, 24, act, True, torch.float16, DEVICE, pad=8)
        config = SkinnyConfig(16, 32, 2, 4, splits, 0, weights_first)
        got = check(case, act, config)
        assert torch.equal(check(case, act, config), got)


def test_agrees_with_the_unfused_activation() -> None:
    case = skinny_cases.make(4, 64, 20, "silu", False, HALF, DEVICE)
    config = SkinnyConfig(16, 32, 2, 4)
    gate, up = skinny.skinny_linear(case.x, case.weight, None, None, config).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    got = skinny.skinny_linear(case.x, case.weight, None, "silu", config)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_rows_and_columns_that_are_not_contiguous() -> None:
    case = skinny_cases.make(4, 64, 16, None, False, torch.float32, DEVICE)
    config = SkinnyConfig(16, 32, 2, 4)
    transposed = case.x.T.contiguous().T
    assert transposed.stride(1) != 1
    assert skinny_cases.error(skinny.skinny_linear(transposed, case.weight, None, None, config), case) < 2e-5
    wide = torch.full((16, 128), float("nan"), device=DEVICE)
    wide[:, 32:96] = case.weight
    got = skinny.skinny_linear(case.x, wide[:, 32:96], None, None, config)
    assert skinny_cases.error(got, case) < 2e-5


def test_no_rows_and_refusals() -> None:
    case = skinny_cases.make(2, 32, 16, None, False, torch.float32, DEVICE)
    config = SkinnyConfig(16, 32, 2, 4)
    assert skinny.skinny_linear(case.x[:0], case.weight, None, None, config).shape == (0, 16)
    with pytest.raises(ValueError, match="257 rows"):
        skinny.skinny_linear(case.x[:1].expand(257, -1), case.weight, None, None, config)
    with pytest.raises(ValueError, match="'relu'"):
        skinny.skinny_linear(case.x, case.weight, None, "relu", config)


@pytest.mark.parametrize(
    ("shape", "rows", "chunk", "kib", "pieces", "want"),
    [
        ((64, 4096), 64, 4096, 32, 2, 256),  # 512 bytes a row, in two pieces
        ((64, 4096), 64, 4096, 33, 2, 256),  # rounded to 16 bytes
        ((64, 4096), 64, 128, 32, 2, 128),  # no more than the program reads
        ((64, 136), 16, 128, 32, 1, 16),  # the last split has 8 inputs
        ((64, 100), 16, 100, 32, 1, 0),  # rows of 200 bytes are not aligned
        ((64, 4096), 64, 4096, 0, 2, 0),
    ],
)
def test_prefetch_size(
    shape: tuple[int, int], rows: int, chunk: int, kib: int, pieces: int, want: int
) -> None:
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    assert skinny.prefetch_size(weight, rows, chunk, kib, pieces) == want
    assert skinny.prefetch_size(weight[:, 1:], rows, chunk, kib, pieces) == 0  # its address is not
