"""Products with matrices of 16-bit floats: the CPU's kernels against exact products of the same numbers."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu import half, products
from octavo.kernels.cpu.recording import record
from octavo.kernels.reference_half import half_linear
from tests.kernels.cpu_tensors import NAN, strided

if not half.panel():
    pytest.skip("no kernels for 16-bit matrices on this CPU", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS = [torch.float32, torch.bfloat16]
# Rows of x: one, two panels at once, each tile, its remainders, more than a chunk (96). Rows of the matrix:
# part of a panel, an odd number of panels. Columns: one, less than a run (256), runs of unequal length.
SHAPES = [(1, 1, 1), (1, 16, 32), (2, 37, 96), (3, 48, 257), (4, 33, 64), (5, 80, 300), (6, 15, 700)]
SHAPES += [(7, 49, 31), (13, 64, 513), (31, 40, 64), (32, 96, 576), (100, 21, 40), (193, 50, 300)]


def made(rows: int, columns: int, dtype: torch.dtype, seed: int) -> tuple[half.HalfMatrix, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    matrix = half.HalfMatrix(rows, columns, dtype)
    matrix.fill(0, weight)
    return matrix, weight


def poison(n: int) -> None:
    """Leave NaN where the next results of that size will likely lie."""
    for _ in range(3):
        torch.full((n,), NAN)


def close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """Within float32's rounding of sums, `size` being that of the products' magnitudes; and results in
    bfloat16, of 8 bits, within half a unit of the last."""
    assert got.shape == want.shape
    rounding = 2**-8 * want.abs() if got.dtype is torch.bfloat16 else 0
    assert bool(((got.double() - want).abs() <= 2e-6 * size * (1 + 2**-8) + rounding + 1e-30).all())


@pytest.mark.parametrize("given", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "rows", "columns"), SHAPES)
def test_every_size_against_float64(
    n: int, rows: int, columns: int, dtype: torch.dtype, given: torch.dtype
) -> None:
    matrix, weight = made(rows, columns, dtype, n)
    x = strided(n, columns, given, seed=rows)
    for bias in (None, torch.randn(rows).to(given)):
        poison(n * rows)
        got = matrix.linear(x, bias)
        assert got.dtype is given
        wide = None if bias is None else bias.double()
        size = half_linear(x.abs().double(), weight.abs(), None if wide is None else wide.abs())
        close(got, half_linear(x.double(), weight, wide), size)


@pytest.mark.parametrize("given", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [products.SILU, products.GELU_TANH])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 23, 101])
def test_a_gate(n: int, gate: int, dtype: torch.dtype, given: torch.dtype) -> None:
    rows = 6 * half.panel()
    matrix, weight = made(rows, 290, dtype, n)
    assert matrix.gates
    x = strided(n, 290, given, seed=n) / 8
    for bias in (None, torch.randn(rows).to(given)):
        poison(n * rows // 2)
        got = matrix.linear(x, bias, gate)
        wide = None if bias is None else bias.double()
        want = half_linear(x.double(), weight, wide, gate)
        size = half_linear(x.abs().double(), weight.abs(), None if wide is None else wide.abs())
        values = half_linear(x.double(), weight, wide).abs().chunk(2, 1)
        # Errors of either half, times the other (a gate's slope is below 1.2), and of the gate itself.
        first, second = size.chunk(2, 1)
        close(got, want, 1.2 * first * values[1] + second * values[0])


@pytest.mark.parametrize("given", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_result_does_not_depend_on_the_others(dtype: torch.dtype, given: torch.dtype) -> None:
    matrix, _ = made(5 * half.panel() + 3, 600, dtype, 3)
    x = torch.randn(200, 600).to(given)
    whole = matrix.linear(x, None)
    for first, last in ((0, 1), (5, 7), (11, 14), (20, 24), (30, 35), (2, 99), (3, 35)):
        assert torch.equal(matrix.linear(x[first:last], None), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_as_they_went_in(dtype: torch.dtype) -> None:
    rows, columns = 3 * half.panel() + 5, 7
    weight = torch.randn(rows, columns).to(dtype)
    weight[2, 3], weight[40, 1], weight[9, 0] = float("inf"), -0.0, torch.finfo(dtype).smallest_normal / 4
    matrix = half.HalfMatrix(rows, columns, dtype)
    wide = torch.zeros(rows, 20, dtype=dtype)
    wide[:, 4 : 4 + columns] = weight
    for first, last in ((0, 3), (30, rows - 1), (3, 30)):  # in any order, from and to any lane
        matrix.fill(first, wide[first:last, 4 : 4 + columns])
    matrix.fill(rows - 1, weight.T.contiguous().T[rows - 1 :])
    ids = torch.randint(0, rows, (500,), dtype=torch.int32)
    assert torch.equal(matrix.look_up(ids), weight.float()[ids])
    other = half.HalfMatrix(rows, columns, dtype)
    other.fill(0, weight)
    assert matrix.equals(other)
    other.fill(rows - 1, torch.zeros(1, columns, dtype=dtype))
    assert not matrix.equals(other)


def test_rows_that_nothing_filled_are_zero() -> None:
    matrix = half.HalfMatrix(40, 8, torch.bfloat16)
    matrix.data.fill_(255)  # NaN
    ones = torch.ones(3, 8, dtype=torch.bfloat16)
    for first, rows in ((3, 2), (10, 3), (5, 1), (0, 0)):
        matrix.fill(first, ones[:rows])
    matrix.finish()
    want = torch.zeros(40)
    want[3:6] = want[10:13] = 8
    assert torch.equal(matrix.linear(torch.ones(1, 8), None)[0], want)


def test_what_does_not_fit_is_refused() -> None:
    matrix, _ = made(24, 32, torch.bfloat16, 0)
    with pytest.raises(ValueError, match="x has 31 columns, the matrix 32"):
        matrix.linear(torch.zeros(1, 31), None)
    with pytest.raises(TypeError, match="take float32 and bfloat16, got torch.float64"):
        matrix.linear(torch.zeros(1, 32, dtype=torch.float64), None)
    with pytest.raises(TypeError, match="dtypes differ: torch.bfloat16, torch.float32"):
        matrix.linear(torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(24))
    with pytest.raises(ValueError, match="takes no gate"):
        matrix.linear(torch.zeros(1, 32), None, products.SILU)
    with pytest.raises(ValueError, match="doesn't fit at row 20"):
        matrix.fill(20, torch.zeros(5, 32, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="dtypes differ"):
        matrix.fill(0, torch.zeros(5, 32, dtype=torch.float16))
    with pytest.raises(TypeError, match="not torch.float32"):
        half.HalfMatrix(24, 32, torch.float32)


def test_products_and_rows_are_recorded() -> None:
    matrix, weight = made(4 * half.panel(), 64, torch.bfloat16, 1)
    ids, x = torch.tensor([1, 5]), torch.randn(2, 64)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return matrix.linear(x, None, products.SILU), matrix.look_up(ids)

    (product, rows), recording = record(work)
    assert recording.problem is None
    ids.copy_(torch.tensor([7, 0]))
    x.normal_()
    recording.replay()
    torch.testing.assert_close(product, half_linear(x, weight, None, products.SILU), rtol=1e-5, atol=1e-4)
    assert torch.equal(rows, weight.float()[ids])
