"""Tensors for the tests of the CPU kernels, and how close results must be."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAN = float("nan")


def close(ours: torch.Tensor, twin: torch.Tensor) -> None:
    assert ours.dtype == twin.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance)


def strided(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """`[rows, size]` whose rows lie in wider ones, full of NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, size + 24), NAN, dtype=dtype)
    view = wide[:, 8 : 8 + size]
    view.copy_(torch.randn(rows, size, generator=generator))
    return view
