"""The CPU's experts against float64; unchosen experts hold NaN and must not be touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import reference_moe
from octavo.kernels.cpu import moe, ops
from octavo.quantization.linear_method import widening_linear
from tests.kernels import moe_cases

SHAPES = [  # rows, experts, top_k, hidden, inner, chosen among
    (1, 8, 2, 64, 96, None),
    (1, 128, 8, 40, 24, None),
    (2, 4, 1, 33, 7, None),
    (5, 6, 3, 65, 17, 3),
    (50, 8, 2, 32, 40, 3),
    (70, 5, 1, 48, 16, 1),
    (23, 128, 8, 32, 24, None),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(shape: tuple[int, int, int, int, int, int | None], dtype: torch.dtype) -> None:
    case = moe_cases.make(*shape[:5], dtype, among=shape[5])
    bound = moe_cases.TOLERANCE[dtype]
    assert moe_cases.error(reference_moe.experts(*case), case) < bound
    if not ops.available():
        pytest.skip(ops.why_not())
    got = moe.experts(*case)
    assert got.dtype == dtype and moe_cases.error(got, case) < bound
    # Everything by the kernel, everything by the caller's product.
    for limit, linear in ((10**6, None), (0, widening_linear if dtype is torch.bfloat16 else F.linear)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "FEW_ROWS", {dtype: limit})
            assert moe_cases.error(moe.experts(*case, linear), case) < bound  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0, 3, 10**6])
def test_experts_of_other_ranks_add_nothing(
    dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows chose none that is here, some a few, and the parts add up to the whole."""
    case = moe_cases.make(30, 8, 2, 32, 24, dtype)
    parts = [moe_cases.of_a_rank(case, *borders) for borders in ((0, 1), (1, 6), (6, 8))]
    assert any(bool((part.chosen == len(part.w13)).all(1).any()) for part in parts)
    monkeypatch.setattr(moe, "FEW_ROWS", {dtype: limit})
    for module in (reference_moe, moe) if ops.available() else (reference_moe,):
        whole = torch.zeros(30, 32)
        for part in parts:
            got = module.experts(*part)
            assert moe_cases.error(got, part) < moe_cases.TOLERANCE[dtype]
            whole += got.float()
        assert moe_cases.error(whole, case) < moe_cases.TOLERANCE[dtype]
    nothing = case._replace(chosen=torch.full_like(case.chosen, 8))
    assert not reference_moe.experts(*nothing).any()
    if ops.available():
        assert not moe.experts(*nothing).any()


def test_only_crowded_experts_leave_the_kernel() -> None:
    """One expert has 40 rows, the others at most 20: two products leave the kernel."""
    if not ops.available():
        pytest.skip(ops.why_not())
    case = moe_cases.make(40, 8, 2, 32, 24, torch.float32)
    other = torch.arange(40) % 7
    case = case._replace(chosen=torch.stack([torch.full((40,), 7), other], 1).int())
    case = case._replace(w13=torch.randn_like(case.w13), w2=torch.randn_like(case.w2))
    calls = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return F.linear(x, weight, bias)

    assert moe_cases.error(moe.experts(*case, linear), case) < 1e-6
    assert calls == [40, 40]


def test_strided_rows_and_refusals() -> None:
    if not ops.available():
        pytest.skip(ops.why_not())
    case = moe_cases.make(3, 4, 2, 32, 24, torch.float32)
    wide = torch.cat([case.x, torch.full_like(case.x, float("nan"))], 1)
    assert moe_cases.error(moe.experts(wide[:, :32], *case[1:]), case) < 1e-6
    nothing = np.zeros(1, np.int32)
    segments = np.array([[0, 0, 1]], np.int32)
    with pytest.raises(TypeError, match="dtypes differ"):
        moe.grouped_linear(case.x, case.w13.bfloat16(), nothing, nothing, segments, torch.empty(1, 48))
    with pytest.raises(ValueError, match="contiguous"):
        moe.grouped_linear(case.x, case.w13.mT, nothing, nothing, segments, torch.empty(1, 48))
