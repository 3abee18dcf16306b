"""Products with matrices of 16-bit floats in plain PyTorch: the twin of the CPU's kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.kernels import reference

GATES = {0: reference.silu_and_mul, 1: reference.gelu_tanh_and_mul}  # `Gate` in cpu/gate.h


def half_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: int | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, computed in `x`'s dtype; with a gate, that of its halves.

    Args:
        x: `[rows, in]`, float32 or float64.
        weight: `[out, in]`, bfloat16 or float16: each number is exact in `x`'s dtype.
        bias: `[out]` of `x`'s dtype, or None.
        gate: None or a key of `GATES`.

    Returns:
        `[rows, out]`, with a gate `[rows, out / 2]`.
    """
    out = F.linear(x, weight.to(x.dtype), bias)
    return out if gate is None else GATES[gate](out)
