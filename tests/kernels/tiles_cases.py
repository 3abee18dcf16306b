"""4-bit matrices of random codes for tests of `octavo.kernels.triton.tiles`, and products in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels.reference_lowbit import pack_rows
from octavo.kernels.reference_tiles import NF4, Tiles, make_tiles
from octavo.kernels.triton import tiles as kernels
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.tiles_row import RowConfig, tiles_row_linear
from octavo.kernels.triton.tiles_row_warps import WarpsConfig, tiles_row_warps_linear

FORMS = (
    "int4 128",
    "int4 64 zeros",
    "int4 32",
    "int4 32 zeros",
    "int4",
    "int4 256 zeros",
    "int4 96",
    "nf4 64",
)


class Case(NamedTuple):
    """A matrix: its tiles, `weight` float32 `[out, in]`, and how many groups a row has."""

    tiles: Tiles
    weight: torch.Tensor
    groups: int


def make(
    form: str, size_in: int, size_out: int, device: str, scale_type: torch.dtype = torch.float16
) -> Case:
    """A matrix of a form: kind, columns of a group (as near as divides `size_in`), whether it has zeros."""
    kind, *rest = form.split()
    group = math.gcd(size_in, int(rest[0])) if rest else size_in
    groups = size_in // group
    codes = torch.randint(0, 16, (size_in, size_out), device=device)
    scales = (0.5 + torch.rand(groups, size_out, device=device)) * size_in**-0.5
    wide = torch.full((groups, size_out), 8, device=device)
    table = zeros = None
    if kind == "nf4":
        # Numbers of few bits, which no type rounds.
        table = torch.tensor(NF4, device=device).to(torch.bfloat16).to(torch.float16).float()
        values = table[codes]
    else:
        sign = torch.randint(0, 2, scales.shape, device=device) * 2 - 1
        scales = (scales * sign / 4).to(scale_type)
        if "zeros" in rest:
            wide = torch.randint(0, 16, (groups, size_out), device=device)
            zeros = wide.to(torch.uint8)
        values = (codes - wide.repeat_interleave(group, 0)).float()
    weight = (values * scales.float().repeat_interleave(group, 0)).T.contiguous()
    return Case(make_tiles(pack_rows(codes), scales, zeros, table), weight, groups)


def check(
    case: Case, rows: int, dtype: torch.dtype, act: str | None, config: TilesConfig, tolerance: float
) -> torch.Tensor:
    """The kernel's product with fresh rows, which lie apart, held to float64's."""
    size_out, size_in = case.weight.shape
    device = case.weight.device
    x = torch.randn(rows, size_in + 8, device=device).to(dtype)[:, :size_in]
    bias = torch.randn(size_out, device=device).to(dtype)
    got = kernels.tiles_linear(x, case.tiles, bias, act, config)
    want = x.double() @ case.weight.double().T + bias.double()
    if act:
        gate, up = want.chunk(2, 1)
        want = up * (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh"))
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance
    return got


def check_row(
    case: Case,
    dtype: torch.dtype,
    act: str | None,
    config: RowConfig,
    norm: bool,
    stream: bool,
    tolerance: float,
) -> None:
    """The one-row kernel's product with a fresh row, its norm, or that with a stream, held to float64's."""
    size_out, size_in = case.weight.shape
    device = case.weight.device
    x, residual = (torch.randn(1, size_in, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(size_out, device=device).to(dtype)
    weight = (0.5 + torch.rand(size_in, device=device)).to(dtype) if norm else None
    kept = residual.clone()
    given = residual if stream else None
    got, after = tiles_row_linear(x, case.tiles, bias, act, config, weight, 1e-5, given)
    want_stream = (x.float() + residual.float()).to(dtype) if stream else x
    assert torch.equal(after, want_stream) and torch.equal(residual, kept)
    row = want_stream.double()
    if weight is not None:
        row = row * torch.rsqrt(row.square().mean() + 1e-5) * weight.double()
    want = row @ case.weight.double().T + bias.double()
    if act:
        gate, up = want.chunk(2, 1)
        want = up * (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh"))
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance


def check_row_warps(
    case: Case, dtype: torch.dtype, config: WarpsConfig, bias: bool, tolerance: float
) -> None:
    """The product of a fresh row by the kernel whose warps share inputs, held to float64's."""
    size_out, size_in = case.weight.shape
    x = torch.randn(1, size_in, device=case.weight.device).to(dtype)
    more = torch.randn(size_out, device=x.device).to(dtype) if bias else None
    got = tiles_row_warps_linear(x, case.tiles, more, config)
    want = x.double() @ case.weight.double().T
    if more is not None:
        want += more.double()
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance
