"""Products for `skinny_linear`, and what they must come to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels import reference


class Case(NamedTuple):
    """A product's operands, and the result in float64: of the same roundings as unfused layers."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    want: torch.Tensor


def make(
    rows: int,
    size_in: int,
    size_out: int,
    act: str | None,
    bias: bool,
    dtype: torch.dtype,
    device: str,
    pad: int = 0,
) -> Case:
    """Fresh random operands; `pad` NaNs follow each row of x, and the weight's last row.

    Args:
        size_out: of the result; with `act` the matrix has twice as many rows.
    """
    outputs = size_out * (2 if act else 1)
    x = torch.full((rows, size_in + pad), float("nan"), dtype=dtype, device=device)[:, :size_in]
    x.copy_(torch.randn(rows, size_in))
    memory = torch.full(((outputs + (pad > 0)) * size_in,), float("nan"), dtype=dtype, device=device)
    weight = memory[: outputs * size_in].view(outputs, size_in)
    weight.copy_(torch.randn(outputs, size_in) * size_in**-0.5)
    b = torch.randn(outputs).to(device, dtype) if bias else None
    want = x.double() @ weight.double().T
    if b is not None:
        want = want + b.double()
    if act:
        product = reference.silu_and_mul if act == "silu" else reference.gelu_tanh_and_mul
        want = product(want.to(dtype))
    return Case(x, weight, b, want)


def error(got: torch.Tensor, case: Case) -> float:
    """The largest difference, relative to 1 where the result is smaller: NaN if any is."""
    want = case.want.double()
    return float(((got.double() - want).abs() / want.abs().clamp(min=1)).max())
