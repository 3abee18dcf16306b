"""Products with weights of 8 and 4 bits on a GPU: all of `octavo.kernels.lowbit_ops`, by its names."""

from __future__ import annotations

from octavo.kernels.triton.lowbit_8bit import (
    fp8_block_linear,
    fp8_linear,
    gated_w8a8_linear,
    int8_linear,
    rms_norm_w8a8_linear,
    takes_gates,
)
from octavo.kernels.triton.weight_only import rms_norm_tiles_linear, tiles_linear, weight_only_linear

__all__ = [
    "fp8_block_linear",
    "fp8_linear",
    "gated_w8a8_linear",
    "int8_linear",
    "rms_norm_tiles_linear",
    "rms_norm_w8a8_linear",
    "takes_gates",
    "tiles_linear",
    "weight_only_linear",
]
