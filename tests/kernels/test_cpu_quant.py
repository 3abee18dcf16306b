"""Products with quantized matrices: the CPU's kernels against their twin, and both against exact products."""

from __future__ import annotations

import weakref

import pytest
import torch

from octavo.kernels.cpu import products, quant
from octavo.kernels.cpu.arena import Arena
from octavo.kernels.reference_quant import (
    INT8,
    PlainMatrix,
    QuantizedMatrix,
    dequantize,
    quantize_int8,
    quantize_rows,
    quantized_linear,
)
from tests.kernels.quant_cases import FORMATS, exact, exact_rows, matrix

if not quant.lanes():
    pytest.skip("no kernels for quantized matrices on this CPU", allow_module_level=True)

# Rows of x: one, a tile of few rows, its remainders, tiles of many rows (from 10 on), more than a chunk (96).
# Rows of the matrix: panels and parts of one. Columns: in one run of the tiles of many rows, and in several.
SHAPES = [
    (1, 16, 32),
    (1, 37, 96),
    (2, 40, 64),
    (3, 9, 160),
    (4, 24, 64),
    (7, 50, 96),
    (10, 9, 64),
    (16, 48, 1344),
    (103, 24, 64),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "rows", "columns"), SHAPES)
def test_bit_equal_to_the_twin_where_float32_is_exact(name: str, n: int, rows: int, columns: int) -> None:
    random = torch.Generator().manual_seed(n * rows + columns)
    weight, x = exact(FORMATS[name], rows, columns, random), exact_rows(n, columns, random)
    want = quantized_linear(x, [weight], None)
    assert torch.equal(want.double(), x.double() @ dequantize(weight).double().T)
    assert torch.equal(quant.PackedMatrix([weight], columns).linear(x, None), want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 37, 576), (6, 24, 576), (67, 40, 1536)])
def test_random_values(name: str, dtype: torch.dtype, n: int, rows: int, columns: int) -> None:
    random = torch.Generator().manual_seed(n)
    weight = matrix(FORMATS[name], rows, columns, random)
    x = (torch.randn(n, columns, generator=random) * 10 ** torch.randn(n, 1, generator=random)).to(dtype)
    bias = torch.randn(rows, generator=random).to(dtype)
    got = quant.PackedMatrix([weight], columns).linear(x, bias)
    assert got.dtype is dtype
    # Against the products of the same integers and scales in double.
    q, scale = quantize_rows(x)
    rounded = (q.unflatten(1, (-1, 32)).double() * scale.double()[:, :, None]).flatten(1)
    want = rounded @ dequantize(weight).double().T + bias.double()
    size = want.abs().amax(1, keepdim=True)
    one_ulp = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
    assert bool(((got.double() - want).abs() <= one_ulp * size).all())
    # Against the product of the weights and x itself: an element of x errs by half a step of its block.
    wide = dequantize(weight).double()
    step = x.double().unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
    bound = 0.5 * step @ wide.abs().T + (one_ulp + 1e-6) * size
    error = (got.double() - (x.double() @ wide.T + bias.double())).abs()
    assert bool((error <= bound).all())
    assert float(error.mean() / bound.mean()) < 0.25  # errors of either sign, not all one way


def test_a_row_s_result_does_not_depend_on_the_others() -> None:
    random = torch.Generator().manual_seed(3)
    for fmt in FORMATS.values():
        packed = quant.PackedMatrix([matrix(fmt, 56, 192, random)], 192)
        x = torch.randn(70, 192, generator=random)
        whole = packed.linear(x, None)
        for first, last in ((0, 1), (5, 7), (11, 14), (3, 13), (20, 36), (2, 69)):
            assert torch.equal(packed.linear(x[first:last], None), whole[first:last])


def test_several_parts_bias_and_rows_any_stride_apart() -> None:
    random = torch.Generator().manual_seed(4)
    parts = [
        matrix(FORMATS[k], rows, 64, random)
        for k, rows in (("q5", 40), ("q8", 13), ("q4-group16-minimum", 8))
    ]
    packed, plain = quant.PackedMatrix(parts, 64), PlainMatrix(parts, 64)
    x, bias = torch.randn(5, 200, generator=random)[:, 17:81], torch.randn(61, generator=random)
    torch.testing.assert_close(packed.linear(x, bias), plain.linear(x, bias), rtol=1e-5, atol=1e-5)
    ids = torch.tensor([0, 60, 39, 40, 52, 53, 39])
    for dtype in (torch.float32, torch.bfloat16):
        rows = packed.look_up(ids, dtype)
        assert torch.equal(rows, plain.look_up(ids, dtype))
        assert torch.equal(rows, torch.cat([dequantize(p) for p in parts])[ids].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("n", [1, 3, 66])
def test_a_gate_is_that_of_the_separate_kernels(gate: str, dtype: torch.dtype, n: int) -> None:
    from octavo.kernels.cpu import norm_act

    random = torch.Generator().manual_seed(5)
    code, act = {
        "silu": (products.SILU, norm_act.silu_and_mul),
        "gelu": (products.GELU_TANH, norm_act.gelu_tanh_and_mul),
    }[gate]
    packed = quant.PackedMatrix([matrix(FORMATS["q4-minimum"], 64, 96, random)], 96)
    assert packed.gates
    x = torch.randn(n, 96, generator=random).to(dtype)
    for bias in (None, torch.randn(64, generator=random).to(dtype)):
        got = packed.linear(x, bias, code)
        want = act(packed.linear(x, bias))
        torch.testing.assert_close(got, want, rtol=2e-6 if dtype is torch.float32 else 2**-8, atol=1e-6)


def test_a_gate_needs_halves_of_whole_panels() -> None:
    random = torch.Generator().manual_seed(6)
    packed = quant.PackedMatrix([matrix(INT8, 24, 32, random)], 32)
    if quant.lanes() == 8:
        assert not packed.gates
        with pytest.raises(ValueError, match="takes no gate"):
            packed.linear(torch.randn(1, 32), None, products.SILU)


def test_columns_that_are_no_multiple_of_a_block() -> None:
    random = torch.Generator().manual_seed(7)
    weight, x = torch.randn(20, 45, generator=random), torch.randn(3, 45, generator=random)
    quantized = quantize_int8(weight)
    assert quantized.q.shape == (20, 64)
    packed = quant.PackedMatrix([quantized], 45)
    assert torch.equal(packed.look_up(torch.arange(20), torch.float32), dequantize(quantized)[:, :45])
    want = quantized_linear(x, [quantized], None)
    torch.testing.assert_close(packed.linear(x, None), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(want, x @ weight.T, rtol=0.05, atol=0.1)


def test_int8_is_the_nearest_number() -> None:
    random = torch.Generator().manual_seed(8)
    weight = torch.randn(64, 96, generator=random) * 0.1
    weight[3, 32:64] = 0
    back = dequantize(quantize_int8(weight))
    step = weight.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
    assert bool(
        ((back - weight).abs() <= 0.5 * step * 1.14).all()
    )  # 1.14: the scale's own rounding, times 127
    assert bool((back[3, 32:64] == 0).all())
    with pytest.raises(ValueError, match="not finite"):
        quantize_int8(torch.tensor([[1.0, float("nan")]]))


def test_rows_with_nothing_and_with_no_numbers() -> None:
    random = torch.Generator().manual_seed(9)
    weight = matrix(FORMATS["q4-minimum"], 16, 96, random)
    x = torch.randn(5, 96, generator=random)
    x[0] = 0
    x[1] *= 1e-35
    x[2, 40], x[3, 95] = torch.nan, torch.inf
    q, scale = quantize_rows(x)
    assert not q[0].any() and not scale[0].any()
    got = quant.PackedMatrix([weight], 96).linear(x, None)
    assert not got[0].any() and not got[1].any()
    assert bool(got[2:4].isnan().all()) and bool(got[4].isfinite().all())
    torch.testing.assert_close(got, quantized_linear(x, [weight], None), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    random = torch.Generator().manual_seed(10)
    packed = quant.PackedMatrix([matrix(INT8, 16, 64, random)], 64)
    with pytest.raises(ValueError, match="x has 32 columns"):
        packed.linear(torch.randn(1, 32), None)
    with pytest.raises(TypeError, match="dtypes differ"):
        packed.linear(torch.randn(1, 64), torch.zeros(16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a part has 64 columns"):
        quant.PackedMatrix([matrix(INT8, 16, 64, random)], 96)


def test_memory_is_shared_chunks_that_go_with_their_last_matrix() -> None:
    arena = Arena()
    (a, chunk), (b, same) = arena.take(100), arena.take(3000)
    assert same is chunk and a.data_ptr() % 64 == b.data_ptr() % 64 == 0
    assert b.data_ptr() >= a.data_ptr() + 100 and a.numel() == 100 and b.numel() == 3000
    large, own = arena.take(20 << 20)
    assert large is own and arena.take(chunk.numel() // 2)[1] is chunk
    assert arena.take(chunk.numel() // 2)[1] is not chunk  # no room left
    arena = Arena()
    piece, chunk = arena.take(64)
    gone = weakref.ref(chunk)
    del piece, chunk
    assert gone() is None and arena.take(64)[0].numel() == 64


def test_equality_of_matrices() -> None:
    random = torch.Generator().manual_seed(11)
    a, b = (matrix(FORMATS["q5-minimum"], 16, 64, random) for _ in range(2))
    for make in (quant.PackedMatrix, PlainMatrix):
        assert make([a], 64).equals(make([a], 64))
        assert not make([a], 64).equals(make([b], 64))
        assert not make([a], 64).equals(
            make([QuantizedMatrix(INT8, a.q.to(torch.int8), a.scale[:, :2], None)], 64)
        )
