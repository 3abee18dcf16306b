"""Triton's products in 8 bits, and the kernels that make their rows, against the plain twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import ops, reference, reference_lowbit
from octavo.kernels.triton import choice_8bit, linear_choice, lowbit, lowbit_8bit, rows_8bit
from octavo.kernels.triton.linear_choice import Choice, Shape
from octavo.kernels.triton.lowbit_8bit import multiply
from octavo.kernels.triton.row_8bit import RowConfig, fitted, row_8bit
from octavo.kernels.triton.row_8bit_warps import WarpsConfig, row_8bit_warps
from octavo.kernels.triton.rows_8bit import FP8_GROUPS, FP8_ROWS, INT8_ROWS, Form, Rows8
from octavo.kernels.triton.scale_rows import scale_rows
from octavo.kernels.triton.skinny_8bit import skinny_8bit
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.kernels.triton.workspace import workspace
from tests.kernels import lowbit_cases
from tests.kernels.lowbit_cases import KINDS
from tests.kernels.poison import poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cuts bfloat16 off
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, HALF]
FORMS = [FP8_ROWS, FP8_GROUPS, INT8_ROWS]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until they are written."""
    poison(monkeypatch, DEVICE)


def plain(x: torch.Tensor, form: Form) -> Rows8:
    if form.grouped:
        return Rows8(*reference_lowbit.quantize_groups_fp8(x))
    quantize = (
        reference_lowbit.quantize_rows_int8
        if form.dtype is torch.int8
        else reference_lowbit.quantize_rows_fp8
    )
    return Rows8(*quantize(x, form.given))


def same(got: Rows8, want: Rows8) -> None:
    assert torch.equal(got.codes.float(), want.codes.float())
    assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 77, 128, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_twins(form: Form, size: int, dtype: torch.dtype) -> None:
    """To the bit: rows of any size, one of zeros, a stride."""
    x = (torch.randn(4, 2 * size) * torch.tensor([[1e-3], [1.0], [300.0], [0.0]])).to(DEVICE, dtype)[:, :size]
    x[1, : size // 2] *= 2.0**-10  # subnormal codes
    same(rows_8bit.quantize_rows(x, form), plain(x, form))


@pytest.mark.parametrize("dtype", [torch.int8, reference_lowbit.FP8])
def test_given_scales_saturate(dtype: torch.dtype) -> None:
    form = Form(dtype, False, torch.tensor([0.5], device=DEVICE))
    x = torch.tensor([[-1e30, -300.0, -64.25, -0.25, 0.0, 0.25, 0.75, 63.4, 300.0, 1e30]], device=DEVICE)
    same(rows_8bit.quantize_rows(x, form), plain(x, form))


def test_every_tie_goes_to_even() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(reference_lowbit.FP8).float()
    numbers = numbers[numbers.isfinite()].unique()
    x = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))[None].to(DEVICE)
    form = Form(reference_lowbit.FP8, False, torch.ones(1, device=DEVICE))
    same(rows_8bit.quantize_rows(x, form), plain(x, form))
    form = Form(torch.int8, False, torch.ones(1, device=DEVICE))
    halves = (torch.arange(-260, 260, device=DEVICE) / 2)[None]
    same(rows_8bit.quantize_rows(halves, form), plain(halves, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_its_row(form: Form, bad: float) -> None:
    x = torch.randn(3, 200, device=DEVICE)
    x[1, 7] = bad
    got, want = rows_8bit.quantize_rows(x, form), plain(x, form)
    torch.testing.assert_close(got.scale, want.scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.codes[::2].float(), want.codes[::2].float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
def test_norm_and_activation(form: Form, dtype: torch.dtype, residual: bool) -> None:
    """As the separate kernels make them: quantized once they are rounded to the activations' type."""
    x = torch.randn(3, 200, device=DEVICE).to(dtype)
    stream = torch.randn(3, 200, device=DEVICE).to(dtype) if residual else None
    for weight in (torch.randn(200, device=DEVICE), torch.randn(200, device=DEVICE).to(dtype)):
        added = None if stream is None else stream.clone()
        got = rows_8bit.rms_norm_quantize(x, added, weight, 1e-5, form)
        if added is not None and stream is not None:
            normed, total = ops.add_rms_norm(x, stream.clone(), weight, 1e-5)
            assert torch.equal(added, total)
        else:
            normed = ops.rms_norm(x, weight, 1e-5)
        close(got, plain(normed, form), dtype)
    for act, name in ops.GATED.items():
        close(rows_8bit.gated_quantize(x, name, form), plain(act(x), form), dtype)


def numbers(rows: Rows8) -> torch.Tensor:
    wide = rows.codes.float()
    if rows.scale.dim() == 1:
        return wide * rows.scale[:, None]
    return wide * rows.scale.repeat_interleave(128, 1)[:, : wide.shape[1]]


def close(got: Rows8, want: Rows8, dtype: torch.dtype) -> None:
    """`exp` and `rsqrt` differ in their last bit between devices, and so some roundings: of a number of 16
    bits, which may be the row's largest, and of codes."""
    if dtype is torch.float32:
        torch.testing.assert_close(got.scale, want.scale, rtol=1e-5, atol=0)
        assert (got.codes.float() != want.codes.float()).float().mean() < 0.01
    difference = (numbers(got) - numbers(want)).norm() / numbers(want).norm()
    assert difference < {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}[dtype]


CONFIGS = [
    SkinnyConfig(32, 128, 2, 4),
    SkinnyConfig(32, 128, 2, 4, 2),
    SkinnyConfig(64, 128, 2, 4, 3, 0, False),
    SkinnyConfig(32, 128, 2, 4, 1, 0, False, 16),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 128, 32), (17, 333, 130), (33, 64, 7)])
def test_skinny(kind: str, config: SkinnyConfig, rows: int, size_in: int, size_out: int) -> None:
    for dtype, bias in ((torch.float32, True), (HALF, False)):
        case = lowbit_cases.make(kind, rows, size_in, size_out, dtype, DEVICE, bias)
        codes = plain(case.x, FP8_GROUPS if kind == "fp8_block" else Form(case.weight.dtype))
        got = skinny_8bit(codes, case.weight, case.scale, case.bias, dtype, config)
        assert got.dtype is dtype and got.shape == (rows, size_out)
        assert lowbit_cases.error(got, case.want()) < TOLERANCE[dtype]
        again = skinny_8bit(codes, case.weight, case.scale, case.bias, dtype, config)
        assert torch.equal(got, again)
    assert not workspace(case.x.device).counters.any()


def test_skinny_refuses_to_part_blocks() -> None:
    case = lowbit_cases.make("fp8_block", 2, 128, 128, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="blocks of 128 x 128"):
        skinny_8bit(
            plain(case.x, FP8_GROUPS),
            case.weight,
            case.scale,
            None,
            torch.float32,
            SkinnyConfig(64, 64, 2, 4),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size_in", "size_out", "config"), [(128, 32, (8, 4, 1)), (200, 38, (8, 2, 3)), (333, 12, (4, 4, 1))]
)
def test_one_row(kind: str, size_in: int, size_out: int, config: tuple[int, ...]) -> None:
    for dtype, given in ((torch.float32, False), (HALF, True)):
        case = lowbit_cases.make(kind, 1, size_in, size_out, dtype, DEVICE, True, given, pad=8)
        rest = (case.weight, case.scale, case.bias, case.given)
        got, stream = row_8bit(case.x, *rest, config=config)
        assert stream is case.x
        assert lowbit_cases.error(got, case.want()) < TOLERANCE[dtype]
        for act, name in ops.GATED.items():
            got = row_8bit(case.x, *rest, act=name, config=config)[0]
            assert lowbit_cases.error(got, act(case.want().to(dtype))) < 2 * TOLERANCE[dtype]
        norm, residual = torch.randn(size_in, device=DEVICE).to(dtype), torch.randn_like(case.x)
        kept = residual.clone()
        got, stream = row_8bit(case.x, *rest, norm=(norm, 1e-5), residual=residual, config=config)
        normed, total = reference.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
        assert torch.equal(residual, kept) and torch.equal(stream, total)
        # A code that is rounded the other way, since `rsqrt` may differ in its last bit.
        assert lowbit_cases.error(got, case.want(normed)) < TOLERANCE[dtype] + 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [(4, 2, 3, 3), (8, 4, 2, 4)])
def test_one_row_whose_inputs_are_split(kind: str, config: tuple[int, ...]) -> None:
    for size_in, size_out, given in [(512, 32, False), (700, 38, True), (333, 7, False)]:
        case = lowbit_cases.make(kind, 1, size_in, size_out, torch.float32, DEVICE, True, given, pad=8)
        rest = (case.weight, case.scale, case.bias, case.given)
        got = row_8bit(case.x, *rest, config=config)[0]
        assert lowbit_cases.error(got, case.want()) < TOLERANCE[torch.float32]
        assert torch.equal(row_8bit(case.x, *rest, config=config)[0], got)
        assert not workspace(case.x.device).counters.any()
    with pytest.raises(ValueError, match="needs all inputs"):
        row_8bit(case.x, *rest, norm=(case.x[0], 1e-5), config=config)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", [(16, 64, 2), (16, 128, 1), (32, 32, 4)])
@pytest.mark.parametrize(("size_in", "size_out"), [(128, 32), (200, 38), (333, 12)])
def test_one_row_by_warps(kind: str, config: tuple[int, ...], size_in: int, size_out: int) -> None:
    """One round and several, one that is not full; every beginning."""
    cut = WarpsConfig(*config)
    for dtype, given in ((torch.float32, False), (HALF, True)):
        case = lowbit_cases.make(kind, 1, size_in, size_out, dtype, DEVICE, True, given, pad=8)
        rest = (case.weight, case.scale, case.bias, case.given)
        got, stream = row_8bit_warps(case.x, *rest, None, None, cut)
        assert torch.equal(stream, case.x)
        assert lowbit_cases.error(got, case.want()) < TOLERANCE[dtype]
        norm, residual = torch.randn(size_in, device=DEVICE).to(dtype), torch.randn_like(case.x)
        kept = residual.clone()
        normed, total = reference.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
        got, stream = row_8bit_warps(case.x, *rest, (norm, 1e-5), residual, cut)
        assert torch.equal(residual, kept) and torch.equal(stream, total)
        # A code that is rounded the other way, since `rsqrt` may differ in its last bit.
        assert lowbit_cases.error(got, case.want(normed)) < TOLERANCE[dtype] + 0.02


def test_one_row_by_warps_refusals() -> None:
    case = lowbit_cases.make("fp8_block", 1, 128, 128, torch.float32, DEVICE)
    rest: Any = (case.weight, case.scale, None, None, None, None)
    with pytest.raises(ValueError, match="a scale for each row"):
        row_8bit_warps(case.x, *rest, WarpsConfig(16, 64, 2))
    wide = lowbit_cases.make("int8", 1, 1040, 16, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="1040 inputs"):
        row_8bit_warps(wide.x, wide.weight, wide.scale, None, None, None, None, WarpsConfig(16, 512, 1))


def test_cuts_of_warps_serve() -> None:
    """One row of the shape that was measured, without an activation; shapes near to it have the next cut."""
    cut = WarpsConfig(16, 512, 8)
    assert cut.serves(4096) and not cut.serves(4097)
    shape, choice = Shape(4096, 6144, False), Choice("warps", (16, 512, 8))

    def serves(rows: int, shape: Shape, kind: choice_8bit.Kind8) -> bool:
        return choice_8bit._serves(choice, rows, shape, kind, torch.bfloat16)

    assert serves(1, shape, "fp8") and serves(1, shape, "int8")
    assert not serves(2, shape, "fp8") and not serves(1, shape, "fp8_block")
    assert not serves(1, shape._replace(gated=True), "fp8")
    few = Choice("few_rows", (4, 8, 2))
    table: linear_choice.Table = {shape: {1: choice, 4: few}}
    assert linear_choice.look_up(table, 1, shape) == choice
    assert linear_choice.look_up(table, 2, shape) == few
    assert linear_choice.look_up(table, 1, shape._replace(size_out=3072)) == few


def test_tables_that_ship() -> None:
    """Cuts of warps are some that their kernel takes."""
    kinds: tuple[choice_8bit.Kind8, ...] = ("fp8", "fp8_block", "int8")
    for kind in kinds:
        for shape, choices in linear_choice.load_table("NVIDIA H200", kind).items():
            for rows, choice in choices.items():
                if choice.kind == "warps":
                    assert WarpsConfig(*(choice.config or ())).serves(shape.size_in), (kind, shape)
                    assert choice_8bit._serves(choice, rows, shape, kind, torch.bfloat16), (kind, shape)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_dispatch_takes_the_kernel_of_warps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, with an activation that it does not end with, and behind a norm."""
    took: list[tuple[int, ...]] = []

    def own(*args: Any) -> Any:
        took.append(args[-1])
        return row_8bit_warps(*args)

    def choose(rows: int, size_in: int, size_out: int, gated: bool, *more: Any) -> Choice:
        return Choice("few_rows") if gated else Choice("warps", (16, 64, 4))

    monkeypatch.setattr(lowbit_8bit, "choose", choose)
    monkeypatch.setattr(lowbit_8bit, "row_8bit_warps", own)
    case = lowbit_cases.make(kind, 1, 144, 48, torch.float32, DEVICE)
    product: Any = getattr(lowbit, f"{kind}_linear")
    rest = (case.weight, case.scale, case.bias)
    assert lowbit_cases.error(product(case.x, *rest), case.want()) < 1e-4
    assert lowbit_cases.error(product(case.x, *rest, act=torch.tanh), torch.tanh(case.want())) < 1e-4
    assert took == [(16, 64, 4)] * 2
    got = product(case.x, *rest, act=ops.silu_and_mul)
    assert lowbit_cases.error(got, reference.silu_and_mul(case.want())) < 2e-4
    assert len(took) == 2
    norm, residual = torch.rand(144, device=DEVICE) + 0.5, torch.randn_like(case.x)
    normed, total = reference.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
    got, stream = lowbit.rms_norm_w8a8_linear(case.x, residual, norm, 1e-5, *rest)
    assert torch.equal(stream, total) and lowbit_cases.error(got, case.want(normed)) < 0.02
    assert len(took) == 3


def test_cuts_of_other_sizes_are_fitted() -> None:
    cut = RowConfig(8, 4, 1, 3)
    assert fitted(cut, 3072, 1024, True) == cut
    assert fitted(cut, 6144, 1024, True) == cut._replace(warps=8)
    for size_in, size_out in ((3072, 1024), (1024, 8192), (14336, 4096)):
        assert fitted(cut, size_in, size_out, False).splits == 1
        assert fitted(None, size_in, size_out, False).splits == 1
    assert fitted(None, 14336, 4096, True).splits == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "own"), [(1, True), (1, False), (5, True)])
def test_the_names_of_the_dispatch(kind: str, rows: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `lowbit_ops` calls, by the choices of a device that nobody measured; one row by its own kernel or
    as several."""
    if not own:
        monkeypatch.setattr(choice_8bit, "_ONE_ROW", 0)
    choice_8bit.choose.cache_clear()
    size_in, size_out = 144, 48
    case = lowbit_cases.make(kind, rows, size_in, size_out, torch.float32, DEVICE)
    product: Any = getattr(lowbit, f"{kind}_linear")
    act = ops.silu_and_mul

    def plainly(x: torch.Tensor) -> torch.Tensor:
        return reference.silu_and_mul(x)

    rest = (case.weight, case.scale, case.bias)
    assert lowbit_cases.error(product(case.x, *rest), case.want()) < 1e-4
    for function in (act, plainly):
        assert lowbit_cases.error(product(case.x, *rest, act=function), plainly(case.want())) < 2e-4
    norm = torch.rand(size_in, device=DEVICE) + 0.5
    residual = torch.randn_like(case.x)
    normed, total = reference.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
    got, stream = lowbit.rms_norm_w8a8_linear(case.x, residual, norm, 1e-5, *rest)
    assert torch.equal(stream, total)
    assert lowbit_cases.error(got, case.want(normed)) < 0.02
    assert lowbit.takes_gates(case.x, case.weight, case.scale) == (rows > 1 or not own)
    gates = torch.cat((case.x, torch.randn_like(case.x)), 1)
    for function in (act, plainly):
        got = lowbit.gated_w8a8_linear(gates, function, *rest)
        assert lowbit_cases.error(got, case.want(plainly(gates))) < 0.02
    choice_8bit.choose.cache_clear()


def test_many_rows_by_the_library() -> None:
    case = lowbit_cases.make("int8", 18, 64, 48, HALF, DEVICE)
    rows = plain(case.x, INT8_ROWS)
    got = multiply(rows, case.weight, case.scale, case.bias, HALF, Choice("cublas"))
    assert lowbit_cases.error(got, case.want()) < TOLERANCE[HALF]


def test_no_rows() -> None:
    for kind in KINDS:
        case = lowbit_cases.make(kind, 0, 128, 32, torch.float32, DEVICE)
        product: Any = getattr(lowbit, f"{kind}_linear")
        assert product(case.x, case.weight, case.scale, case.bias).shape == (0, 32)


def test_scale_rows() -> None:
    sums = torch.randint(-(1 << 24), 1 << 24, (3, 2100), dtype=torch.int32, device=DEVICE)
    of_rows, of_columns = torch.rand(3, device=DEVICE), torch.rand(2100, device=DEVICE)
    bias = torch.randn(2100, device=DEVICE)
    want = sums.float() * of_rows[:, None] * of_columns
    torch.testing.assert_close(scale_rows(sums, of_rows, of_columns, None, torch.float32), want)
    torch.testing.assert_close(scale_rows(sums, of_rows, of_columns, bias, torch.float32), want + bias)
