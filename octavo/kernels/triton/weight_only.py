"""Products of activations of 16 bits with weights of 8 and 4: by which kernel, and how it is cut."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from octavo.kernels import ops
from octavo.kernels.reference_lowbit import Activation
from octavo.kernels.reference_tiles import STEP, Tiles
from octavo.kernels.triton import tiles as tiles_kernels
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.tiles import TilesConfig

_ACTS: dict[Activation, str] = {ops.silu_and_mul: "silu", ops.gelu_tanh_and_mul: "gelu_tanh"}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Those of a GPU; few of any other device (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# Rows beyond which expanding the matrix for cuBLAS is taken to cost less than making numbers of codes anew
# for every tile of rows.
_KERNEL_ROWS = 128


def default_tiles_config(
    rows: int, size_in: int, size_out: int, gated: bool, multiprocessors: int
) -> TilesConfig | None:
    """A sane cut of a matrix for `tiles_linear`; None: expand it.

    Args:
        size_out: rows of the matrix, both halves where `gated`.
    """
    if rows > _KERNEL_ROWS:
        return None
    matrices = 2 if gated else 1
    tile_rows = min(64, max(8, power_of_2(rows)))
    # Up to 16 rows warps of their own instructions, which need no other to begin; then Hopper's.
    block_out, warps = (64 // matrices, 2) if tile_rows <= 16 else (64, 4)
    programs = ceil_div(size_out // matrices, block_out) * ceil_div(rows, tile_rows)
    steps = ceil_div(size_in, STEP)
    splits = 1
    while splits < 8 and programs * splits < 2 * multiprocessors and steps >= 4 * splits:
        splits *= 2
    return TilesConfig(block_out, 4 if tile_rows <= 32 else 3, warps, splits, 16, tile_rows)


@functools.cache
def _tiles_config(
    rows: int, size_in: int, size_out: int, gated: bool, device: torch.device
) -> TilesConfig | None:
    return default_tiles_config(rows, size_in, size_out, gated, _multiprocessors(device))


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """See `octavo.kernels.reference_tiles.tiles_linear`."""
    name = None if act is None else _ACTS.get(act)
    if act is not None and name is None:
        return act(tiles_linear(x, tiles, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        config = _tiles_config(x.shape[0], x.shape[1], tiles.rows, act is not None, x.device)
    if config is not None:
        return tiles_kernels.tiles_linear(x, tiles, bias, name, config)
    out = F.linear(x, tiles_kernels.expand_tiles(tiles, x.shape[1], x.dtype), bias)
    return out if act is None else act(out)
