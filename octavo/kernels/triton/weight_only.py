"""Products of activations of 16 bits with weights of 8 and 4: by which kernel, and how it is cut."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels import ops
from octavo.kernels.reference_lowbit import Activation
from octavo.kernels.reference_tiles import STEP, Tiles
from octavo.kernels.triton import tiles as tiles_kernels
from octavo.kernels.triton.expand_bytes import expand_bytes
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.skinny_linear import SkinnyConfig, scale_shape, skinny_linear
from octavo.kernels.triton.tiles import TilesConfig

_ACTS: dict[Activation, str] = {ops.silu_and_mul: "silu", ops.gelu_tanh_and_mul: "gelu_tanh"}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Those of a GPU; few of any other device (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# Rows beyond which expanding the matrix for cuBLAS is taken to cost less than making numbers of codes anew
# for every tile of rows.
_KERNEL_ROWS = 128


class Cut(NamedTuple):
    """What kernels have in common: see `TilesConfig`."""

    block_out: int
    stages: int
    warps: int
    splits: int
    tile_rows: int


def default_cut(rows: int, steps: int, size_out: int, gated: bool, multiprocessors: int) -> Cut | None:
    """A sane cut of a matrix; None: expand it.

    Args:
        rows: of activations.
        steps: into which the inputs are cut.
        size_out: rows of the matrix, both halves where `gated`.
        multiprocessors: of the device.
    """
    if rows > _KERNEL_ROWS:
        return None
    matrices = 2 if gated else 1
    tile_rows = min(64, max(8, power_of_2(rows)))
    # Up to 16 rows warps multiply by their own instructions, beyond four of them by Hopper's.
    block_out, warps = (64 // matrices, 2) if tile_rows <= 16 else (64, 4)
    programs = ceil_div(size_out // matrices, block_out) * ceil_div(rows, tile_rows)
    splits = 1
    while splits < 8 and programs * splits < 2 * multiprocessors and steps >= 4 * splits:
        splits *= 2
    return Cut(block_out, 4 if tile_rows <= 32 else 3, warps, splits, tile_rows)


@functools.cache
def tiles_config(
    rows: int, size_in: int, size_out: int, gated: bool, device: torch.device
) -> TilesConfig | None:
    """How `octavo.kernels.triton.tiles.tiles_linear` cuts a matrix for 16-bit rows; None: it is expanded."""
    cut = default_cut(rows, ceil_div(size_in, STEP), size_out, gated, _multiprocessors(device))
    if cut is None:
        return None
    return TilesConfig(cut.block_out, cut.stages, cut.warps, cut.splits, 16, cut.tile_rows)


@functools.cache
def bytes_config(
    rows: int, size_in: int, size_out: int, group: int, gated: bool, device: torch.device
) -> SkinnyConfig | None:
    """How `skinny_linear` cuts a matrix of 8 bits for 16-bit rows; None: it is expanded."""
    block_in = min(128, group & -group) if group else 128
    if block_in < 16:
        return None
    cut = default_cut(rows, ceil_div(size_in, block_in), size_out, gated, _multiprocessors(device))
    if cut is None:
        return None
    return SkinnyConfig(
        cut.block_out, block_in, cut.stages, cut.warps, cut.splits, 32, tile_rows=cut.tile_rows
    )


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `octavo.kernels.reference_lowbit.weight_only_linear`; FP8 weights are finite."""
    name = None if act is None else _ACTS.get(act)
    if act is not None and name is None:
        return act(weight_only_linear(x, weight, scale, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        group = scale_shape(weight, scale)[1]
        config = bytes_config(x.shape[0], x.shape[1], weight.shape[0], group, act is not None, x.device)
    if config is not None:
        return skinny_linear(x, weight, bias, name, config, scale)
    out = F.linear(x, expand_bytes(weight, scale, x.dtype), bias)
    return out if act is None else act(out)


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """See `octavo.kernels.reference_tiles.tiles_linear`."""
    name = None if act is None else _ACTS.get(act)
    if act is not None and name is None:
        return act(tiles_linear(x, tiles, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        config = tiles_config(x.shape[0], x.shape[1], tiles.rows, act is not None, x.device)
    if config is not None:
        return tiles_kernels.tiles_linear(x, tiles, bias, name, config)
    out = F.linear(x, tiles_kernels.expand_tiles(tiles, x.shape[1], x.dtype), bias)
    return out if act is None else act(out)
