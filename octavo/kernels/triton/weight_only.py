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
from octavo.kernels.triton.weight_only_choice import bytes_config, tiles_config


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


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """See `octavo.kernels.reference_tiles.tiles_linear`."""
    name = None if act is None else ops.GATED.get(act)
    if act is not None and name is None:
        return act(tiles_linear(x, tiles, bias))
    config = None
    if x.element_size() == 2:  # tensor cores multiply no float32
        form = "int4" if tiles.table is None else "nf4"
        config = tiles_config(form, x.shape[0], x.shape[1], tiles.rows, act is not None, x.device)
    if config is not None:
        return tiles_kernels.tiles_linear(x, tiles, bias, name, config)
    out = F.linear(x, tiles_kernels.expand_tiles(tiles, x.shape[1], x.dtype), bias)
    return out if act is None else act(out)
