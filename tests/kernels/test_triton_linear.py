"""Triton's product of few rows against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 8), (80, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_linear(rows: int, size_in: int, size_out: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=g).to(DEVICE, dtype)
        for shape in [(rows, size_in), (size_out, size_in), (size_out,)]
    )
    want = torch.nn.functional.linear(x.double(), weight.double())
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    got = linear.few_rows_linear(x, weight, config=(2, 32, 4))
    assert got.dtype == dtype
    assert (got.double() - want).norm() < bound * want.norm()
    got = linear.few_rows_linear(x, weight, bias)
    assert (got.double() - want - bias.double()).norm() < bound * want.norm()
