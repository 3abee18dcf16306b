"""Products with weights of 8 and 4 bits, each by the fastest kernel for its tensors' device; meaning:
`reference_lowbit` and `reference_tiles`, whose plain versions also run where a device has no kernels."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from octavo.kernels import reference_lowbit, reference_tiles
from octavo.kernels.reference_lowbit import Activation
from octavo.kernels.reference_tiles import Tiles

_TRITON = "octavo.kernels.triton.lowbit"


@functools.cache
def _kernels(device_type: str) -> Any:
    """The module whose functions serve a device's tensors."""
    if device_type != "cuda":
        return reference_lowbit
    try:
        return importlib.import_module(_TRITON)
    except ImportError:  # without Triton, of which `octavo.kernels.ops` warns
        return reference_lowbit


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `reference_lowbit.fp8_linear`."""
    return _kernels(x.device.type).fp8_linear(x, weight, scale, bias, input_scale, act)


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `reference_lowbit.fp8_block_linear`."""
    return _kernels(x.device.type).fp8_block_linear(x, weight, scale, bias, act)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `reference_lowbit.int8_linear`."""
    return _kernels(x.device.type).int8_linear(x, weight, scale, bias, input_scale, act)


def has_w8a8(x: torch.Tensor) -> bool:
    """Whether rows like these have kernels that quantize them where a norm or an activation makes them:
    `rms_norm_w8a8_linear` and `gated_w8a8_linear`."""
    return hasattr(_kernels(x.device.type), "rms_norm_w8a8_linear")


def takes_gates(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether, at as many rows as `x` has, `gated_w8a8_linear` is better than an activation at the end of the
    product before. Only where `has_w8a8`."""
    return _kernels(x.device.type).takes_gates(x, weight, scale)


def rms_norm_w8a8_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_linear`, `int8_linear` or `fp8_block_linear` (by weight and scale) of the RMS norm of
    `x + residual`, and that sum, the new stream. Only where `has_w8a8`.

    Args:
        x: `[rows, K]`, a sublayer's output.
        residual: `[rows, K]`, the stream, which may be overwritten; None: `x` is the stream.
        norm_weight: `[K]`, of `x`'s dtype or float32.
        eps: of the norm.
        weight, scale, bias, input_scale, act: as for those products.
    """
    kernels = _kernels(x.device.type)
    return kernels.rms_norm_w8a8_linear(x, residual, norm_weight, eps, weight, scale, bias, input_scale, act)


def gated_w8a8_linear(
    gates: torch.Tensor,
    act: Activation,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_linear`, `int8_linear` or `fp8_block_linear` of `act` of rows `[rows, 2 K]`. Only where
    `has_w8a8`."""
    return _kernels(gates.device.type).gated_w8a8_linear(gates, act, weight, scale, bias, input_scale)


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `reference_lowbit.weight_only_linear`."""
    return _kernels(x.device.type).weight_only_linear(x, weight, scale, bias, act)


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """See `reference_tiles.tiles_linear`."""
    kernels = _kernels(x.device.type)
    return getattr(kernels, "tiles_linear", reference_tiles.tiles_linear)(x, tiles, bias, act)


def rms_norm_tiles_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    tiles: Tiles,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`tiles_linear` of the RMS norm of `x + residual`, and that sum, the new stream, in one kernel; None
    where there is none for such rows.

    Args:
        x: `[rows, K]`, a sublayer's output.
        residual: `[rows, K]`, the stream, left as it is; None: `x` is the stream.
        norm_weight: `[K]`, of `x`'s dtype or float32.
        eps: of the norm.
        tiles, bias, act: as for `tiles_linear`.
    """
    fused = getattr(_kernels(x.device.type), "rms_norm_tiles_linear", None)
    return None if fused is None else fused(x, residual, norm_weight, eps, tiles, bias, act)
