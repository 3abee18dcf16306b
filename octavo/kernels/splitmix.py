"""64-bit hashing from which random numbers are made, on int64 arrays of NumPy and of PyTorch alike: both wrap
modulo 2^64."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Int64Array = TypeVar("Int64Array", np.ndarray, "torch.Tensor")

MASK64 = (1 << 64) - 1


def signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)
MUL1 = signed(0xBF58476D1CE4E5B9)
MUL2 = signed(0x94D049BB133111EB)
JUDGEMENT = signed(0xA0761D6478BD642F)


def splitmix64(x: Int64Array) -> Int64Array:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014) on int64 bit patterns."""
    x = x + GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MUL1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MUL2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def judgement_uniforms(state: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """By what synthetic acceptance judges the draft at `position`: float64 in [0, 1), `[rows]`.

    Independent of the noise that the position's token is drawn with.

    Args:
        state, position: int64, as `row_keys` takes them.
    """
    key = splitmix64(splitmix64(state ^ JUDGEMENT) + position * GOLDEN)
    return ((key >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
