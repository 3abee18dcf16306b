"""Products in 8 bits: operands, and what they must come to by the plain twin."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels import reference_lowbit

KINDS = ("fp8", "fp8_block", "int8")


class Case(NamedTuple):
    """A product's operands; `given` is the scale of all rows, where they have one."""

    kind: str
    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    given: torch.Tensor | None

    def want(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """The plain twin's result for other rows, or the case's; not rounded."""
        x = (self.x if x is None else x).float()
        bias = None if self.bias is None else self.bias.float()
        if self.kind == "fp8_block":
            return reference_lowbit.fp8_block_linear(x, self.weight, self.scale, bias)
        product = reference_lowbit.int8_linear if self.kind == "int8" else reference_lowbit.fp8_linear
        return product(x, self.weight, self.scale, bias, self.given)


def make(
    kind: str,
    rows: int,
    size_in: int,
    size_out: int,
    dtype: torch.dtype,
    device: str,
    bias: bool = True,
    given: bool = False,
    pad: int = 0,
) -> Case:
    """Fresh random operands, rows of very different sizes; `pad` NaNs follow each row of x."""
    x = torch.full((rows, size_in + pad), float("nan"), dtype=dtype, device=device)[:, :size_in]
    sizes = torch.logspace(-2, 1, max(rows, 2))[:rows, None]
    x.copy_(torch.randn(rows, size_in) * sizes)
    codes = torch.randn(size_out, size_in, device=device)
    if kind == "int8":
        weight = (codes * 40).clamp(-128, 127).to(torch.int8)
    else:
        weight = (codes * 60).clamp(-448, 448).to(reference_lowbit.FP8)
    shape = (size_out,) if kind != "fp8_block" else (-(-size_out // 128), -(-size_in // 128))
    scale = (torch.rand(shape, device=device) + 0.5) * size_in**-0.5 / 40
    b = torch.randn(size_out).to(device, dtype) if bias else None
    scale_of_rows = torch.tensor([0.02], device=device) if given and kind != "fp8_block" else None
    return Case(kind, x, weight, scale, b, scale_of_rows)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to 1 where the result is smaller: NaN if any is."""
    want = want.double()
    return float(((got.double() - want).abs() / want.abs().clamp(min=1)).max())
