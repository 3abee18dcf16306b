"""Products of activations of 16 bits with weights of 8 and 4, by the kernel that is fastest for the rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.kernels import ops
from octavo.kernels.reference_lowbit import Activation
from octavo.kernels.reference_tiles import Tiles
from octavo.kernels.triton import tiles as tiles_kernels
from octavo.kernels.triton.expand_bytes import expand_bytes
from octavo.kernels.triton.skinny_linear import scale_shape, skinny_linear
from octavo.kernels.triton.tiles_row import RowConfig, tiles_row_linear
from octavo.kernels.triton.tiles_row_warps import WarpsConfig, tiles_row_warps_linear
from octavo.kernels.triton.weight_only_choice import bytes_config, row_config, tiles_config


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `octavo.kernels.reference_lowbit.weight_only_linear`; FP8 weights are finite."""
    name = None if act is None else ops.GATED.get(act)
    if act is not None and name is None:
        return act(weight_only_linear(x, weight, scale, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        form = "int8" if weight.dtype is torch.int8 else "fp8"
        group = scale_shape(weight, scale)[1]
        config = bytes_config(form, x.shape[0], x.shape[1], weight.shape[0], group, act is not None, x.device)
    if config is not None:
        return skinny_linear(x, weight, bias, name, config, scale)
    out = F.linear(x, expand_bytes(weight, scale, x.dtype), bias)
    return out if act is None else act(out)


def _form(tiles: Tiles) -> str:
    return "int4" if tiles.table is None else "nf4"


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """See `octavo.kernels.reference_tiles.tiles_linear`."""
    name = None if act is None else ops.GATED.get(act)
    if act is not None and name is None:
        return act(tiles_linear(x, tiles, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        form = _form(tiles)
        if x.shape[0] == 1:
            row = row_config(form, x.shape[1], tiles.rows, act is not None, False, x.device)
            if isinstance(row, WarpsConfig):
                return tiles_row_warps_linear(x, tiles, bias, row)
            assert row is not None
            return tiles_row_linear(x, tiles, bias, name, row)[0]
        config = tiles_config(form, x.shape[0], x.shape[1], tiles.rows, act is not None, x.device)
    if config is not None:
        return tiles_kernels.tiles_linear(x, tiles, bias, name, config)
    out = F.linear(x, tiles_kernels.expand_tiles(tiles, x.shape[1], x.dtype), bias)
    return out if act is None else act(out)


def rms_norm_tiles_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    tiles: Tiles,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `octavo.kernels.lowbit_ops.rms_norm_tiles_linear`."""
    # float16 may not hold a row that is multiplied by the norm's weight before it is divided.
    if x.shape[0] != 1 or x.dtype is not torch.bfloat16:
        return None
    fused = act is not None and act in ops.GATED
    config = row_config(_form(tiles), x.shape[1], tiles.rows, fused, True, x.device)
    if config is None:
        return None
    assert isinstance(config, RowConfig)
    name = ops.GATED[act] if act is not None and fused else None
    out, stream = tiles_row_linear(x, tiles, bias, name, config, norm_weight, eps, residual)
    return out if act is None or fused else act(out), stream
