"""8-bit matrices for tests of the kernels that multiply them with 16-bit rows, and products in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels.triton.skinny_linear import SkinnyConfig, skinny_linear

FORMS = ("rows", "a column", "groups of 64", "groups of 32", "blocks")


class Case(NamedTuple):
    """A matrix: codes and scales, and `exact` float32 `[out, in]`, what they mean."""

    weight: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor


def make(form: str, kind: torch.dtype, size_in: int, size_out: int, device: str) -> Case:
    """A matrix with scales for what the form says."""
    if kind is torch.int8:
        weight = torch.randint(-128, 128, (size_out, size_in), device=device).to(torch.int8)
        unit = 1 / 74
    else:
        weight = (torch.randn(size_out, size_in, device=device) * 64).clamp(-448, 448).to(kind)
        unit = 1 / 64
    tall, wide = 1, size_in
    if form.startswith("groups"):
        wide = int(form.split()[-1])
    elif form == "blocks":
        tall, wide = 128, 128
    shape = (-(-size_out // tall), -(-size_in // wide))
    scale = (0.5 + torch.rand(shape, device=device)) * unit * size_in**-0.5
    every = scale.repeat_interleave(tall, 0)[:size_out].repeat_interleave(wide, 1)[:, :size_in]
    return Case(weight, scale.flatten() if form == "rows" else scale, weight.float() * every)


def check(
    case: Case, rows: int, dtype: torch.dtype, act: str | None, config: SkinnyConfig, tolerance: float
) -> None:
    """The kernel's product with fresh rows, which lie apart, held to float64's."""
    size_out, size_in = case.exact.shape
    device = case.exact.device
    x = torch.randn(rows, size_in + 8, device=device).to(dtype)[:, :size_in]
    bias = torch.randn(size_out, device=device).to(dtype)
    got = skinny_linear(x, case.weight, bias, act, config, case.scale)
    want = x.double() @ case.exact.double().T + bias.double()
    if act:
        gate, up = want.chunk(2, 1)
        want = up * (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh"))
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance
