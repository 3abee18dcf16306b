"""Triton's products of few rows, alone and with what surrounds them in a layer, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo.kernels import reference
from octavo.kernels.triton import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-3
# Largest error of a result, relative. The interpreter truncates to bfloat16, but rounds to float16.
BOUNDS = {F32: 1e-6, F16: 2e-3, BF16: 2.5e-2 if DEVICE == "cpu" else 1e-2}
# Cuts of a matrix of 60 to 80 columns: in steps, the last of them short; the rows kept, for one or several
# tiles, of which the last programs have fewer. None: the default's.
STEPS, ONE_STEP, TILES = (2, 32, 4), (2, 128, 2), (2, 128, 4, 3)
WIDE_STEPS, WIDE_TILES = (4, 16, 1), (4, 128, 1, 2)
# Several steps' weights held: rounds that the steps fill, a last one of fewer, fewer steps than are held.
EVEN_ROUNDS, ROUNDS, ONE_ROUND = (2, 16, 1, 1, 2), (4, 16, 2, 1, 3), (2, 32, 4, 1, 7)
Cut = tuple[int, ...] | None
ACTS = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the wrappers allocate holds NaNs."""

    def empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", empty)


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal values of a fresh seed."""
    return torch.randn(*shape).to(DEVICE, dtype)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str | None, dtype: torch.dtype
) -> torch.Tensor:
    """`[rows, out]` in float64, rounded to `dtype` only before and within the activation."""
    wide = x.double() @ weight.double().T
    if bias is not None:
        wide = wide + bias.double()
    return wide if act is None else ACTS[act](wide.to(dtype)).double()


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).norm() < BOUNDS[dtype] * want.norm()


@pytest.mark.parametrize(
    ("rows", "size_in", "size_out", "dtype", "cut", "bias"),
    [
        (1, 64, 8, F32, STEPS, False),
        (1, 80, 7, BF16, None, True),
        (1, 61, 7, F32, WIDE_STEPS, True),
        (1, 128, 9, BF16, ONE_STEP, False),
        (1, 80, 13, F16, TILES, True),
        (2, 64, 8, F16, STEPS, True),
        (2, 61, 13, F32, WIDE_TILES, True),
        (3, 80, 7, F32, STEPS, True),
        (3, 61, 5, F16, None, False),
        (4, 80, 7, BF16, STEPS, False),
        (4, 64, 9, F32, TILES, True),
        (1, 64, 7, F32, EVEN_ROUNDS, True),
        (1, 80, 8, BF16, ROUNDS, False),
        (2, 64, 9, F16, ONE_ROUND, True),
        (3, 61, 7, F32, ROUNDS, True),
        (4, 96, 8, F32, EVEN_ROUNDS, False),
    ],
)
def test_product(rows: int, size_in: int, size_out: int, dtype: torch.dtype, cut: Cut, bias: bool) -> None:
    x, weight = draw(dtype, rows, size_in), draw(dtype, size_out, size_in)
    b = draw(dtype, size_out) if bias else None
    check(linear.few_rows_linear(x, weight, b, cut), product(x, weight, b, None, dtype), dtype)


@pytest.mark.parametrize(
    ("rows", "size_in", "size_out", "dtype", "cut", "bias", "act"),
    [
        (1, 64, 8, F32, STEPS, False, "silu"),
        (1, 80, 7, F16, None, True, "silu"),
        (1, 61, 9, F32, TILES, True, "gelu_tanh"),
        (2, 80, 7, BF16, WIDE_STEPS, False, "gelu_tanh"),
        (3, 61, 5, F16, WIDE_TILES, False, "silu"),
        (4, 64, 5, F32, None, True, "gelu_tanh"),
        (1, 64, 7, F32, EVEN_ROUNDS, True, "silu"),
        (2, 61, 6, F16, ROUNDS, False, "gelu_tanh"),
    ],
)
def test_activation(
    rows: int, size_in: int, size_out: int, dtype: torch.dtype, cut: Cut, bias: bool, act: str
) -> None:
    x, weight = draw(dtype, rows, size_in), draw(dtype, 2 * size_out, size_in) / size_in**0.5
    b = draw(dtype, 2 * size_out) if bias else None
    check(linear.few_rows_linear(x, weight, b, cut, act), product(x, weight, b, act, dtype), dtype)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(
    ("rows", "size_in", "size_out", "dtype", "norm_dtype", "cut", "act"),
    [
        (1, 64, 8, F32, F32, STEPS, None),
        (1, 80, 7, F16, F16, None, None),
        (1, 61, 10, F32, F32, WIDE_STEPS, "silu"),
        (1, 80, 14, F16, F32, TILES, "gelu_tanh"),
        (1, 80, 14, BF16, BF16, ONE_STEP, "silu"),
        (2, 61, 9, F16, F16, STEPS, None),
        (2, 80, 14, F32, F32, WIDE_TILES, "silu"),
        (3, 61, 7, F32, F32, TILES, None),
        (4, 80, 6, F16, F32, None, "gelu_tanh"),
        (1, 64, 8, F32, F32, EVEN_ROUNDS, "silu"),
        (1, 80, 9, F16, F32, ROUNDS, None),
        (2, 61, 8, F32, F32, ROUNDS, "gelu_tanh"),
        (3, 80, 7, F32, F32, ONE_ROUND, None),
    ],
)
def test_after_norm(
    rows: int,
    size_in: int,
    size_out: int,
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
    cut: Cut,
    act: str | None,
    has_residual: bool,
) -> None:
    # Rows far apart, and of another stride than the sum's, as of a slice of a wider tensor.
    x = draw(dtype, rows, 2 * size_in)[:, :size_in] * 3
    residual = draw(dtype, rows, size_in) if has_residual else None
    norm, weight, bias = draw(norm_dtype, size_in), draw(dtype, size_out, size_in), draw(dtype, size_out)
    weight /= size_in**0.5
    before = None if residual is None else residual.clone()
    want_stream = x if residual is None else x + residual
    wide = want_stream.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()

    out, stream = linear.rms_norm_few_rows_linear(x, residual, norm, EPS, weight, bias, cut, act)
    check(out, product(normed, weight, bias, act, dtype), dtype)
    if dtype == BF16 and DEVICE == "cpu":
        check(stream, want_stream.double(), dtype)
    else:
        assert torch.equal(stream, want_stream) and stream.dtype == dtype
    if residual is not None and before is not None:
        assert torch.equal(residual, before), "other programs may still read it"
        assert stream.data_ptr() != residual.data_ptr() and stream.is_contiguous()


@triton.jit
def _note_pieces(
    at_ptr, size_ptr, weight_row, COLUMNS: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
    OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    at, size = linear.sent_pieces(
        tl.program_id(0), weight_row, 32, COLUMNS, 2, PIECE, LANES, OUT, BLOCK_OUT, GATED
    )
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(at_ptr + lane, at)
    tl.store(size_ptr + lane, size)


@pytest.mark.parametrize(
    ("size_out", "columns", "block_out", "piece", "lanes", "gated"),
    [
        (24, 64, 4, 32, 32, False),  # four pieces a row
        (24, 64, 4, 1024, 32, False),  # one
        (24, 64, 8, 16, 16, False),  # as many as there are lanes
        (24, 72, 4, 32, 64, False),  # four of 36 bytes, of which 32 are sent for
        (22, 64, 4, 32, 64, False),  # a last tile of fewer rows
        (24, 64, 4, 64, 32, True),
    ],
)
def test_what_is_sent_for(
    size_out: int, columns: int, block_out: int, piece: int, lanes: int, gated: bool
) -> None:
    """64 columns of all rows, each once, and nothing else: what lies beyond a matrix may be no memory."""
    row_size, first = 128, 32
    programs = -(-size_out // block_out)
    at = torch.full((programs * lanes,), -1, dtype=torch.int64, device=DEVICE)
    size = torch.full((programs * lanes,), -1, dtype=torch.int32, device=DEVICE)
    _note_pieces[(programs,)](at, size, row_size, columns, piece, lanes, size_out, block_out, gated)
    assert (size % 16 == 0).all() and (size >= 0).all()
    assert (at[size > 0] % 8 == 0).all()
    sent = torch.zeros(size_out * row_size, dtype=torch.int32)
    for begin, length in zip(at.tolist(), (size // 2).tolist(), strict=True):
        sent[begin : begin + length] += 1
        assert length == 0 or 0 <= begin and begin + length <= sent.numel()
    sent = sent.view(size_out, row_size)
    assert (sent[:, first : first + 64] == 1).all()
    assert not sent[:, :first].any() and not sent[:, first + 64 :].any()


def test_default_cuts_cover_sizes() -> None:
    for rows in range(1, linear.MAX_ROWS + 1):
        for size_in in (1, 7, 64, 576, 1024, 3584, 4096, 8192, 14336):
            for gated in (False, True):
                for norm in (False, True):
                    cut = linear.few_rows_config(rows, size_in, 4096, gated, norm)
                    assert cut.tiles == 1 or cut.inputs >= size_in
                    assert cut.outputs >= 1 + gated and cut.inputs >= 8


def test_impossible_cuts_are_refused() -> None:
    weight = draw(F32, 8, 64)
    with pytest.raises(ValueError, match="0 rows"):
        linear.few_rows_linear(draw(F32, 0, 64), weight)
    with pytest.raises(ValueError, match="5 rows"):
        linear.few_rows_linear(draw(F32, 5, 64), weight)
    with pytest.raises(ValueError, match="inputs >= 64"):
        linear.few_rows_linear(draw(F32, 1, 64), weight, config=(2, 32, 4, 2))
    with pytest.raises(ValueError, match="2 or more outputs"):
        linear.few_rows_linear(draw(F32, 1, 64), weight, config=(1, 32, 4), act="silu")
    with pytest.raises(ValueError, match="'relu'"):
        linear.few_rows_linear(draw(F32, 1, 64), weight, act="relu")
