"""Where randomness comes from: 64-bit seeds, mixed with a position into the keys of one row's noise.

No generator has a state. The noise of a token is a function of (seed of the choice, position in the
sequence, vocabulary entry), so it is the same in any batch, after a preemption, on any device, and
whether the position was reached by plain decoding or by judging drafts.

The functions work on int64 arrays of NumPy and of PyTorch alike: both wrap modulo 2^64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Int64Array = TypeVar("Int64Array", np.ndarray, "torch.Tensor")

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= _MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL1 = _signed(0xBF58476D1CE4E5B9)
_MUL2 = _signed(0x94D049BB133111EB)
_CHOICE = 0xD1B54A32D192ED03
_JUDGEMENT = _signed(0xA0761D6478BD642F)


def splitmix64(x: Int64Array) -> Int64Array:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014) on int64 bit patterns."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MUL1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MUL2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix(value: int) -> int:
    return int(splitmix64(np.array([_signed(value)], dtype=np.int64))[0])


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` (from 0) of a request with `n` > 1: in [0, 2^64).

    Choice 0 has the request's own seed (modulo 2^64), so that n=1 and the first of n=3 agree;
    choice i has splitmix64(seed + i * 0xD1B54A32D192ED03).
    """
    return (seed if index == 0 else _mix(seed + index * _CHOICE)) & _MASK64


def seed_state(seed: int) -> int:
    """splitmix64(seed) as an int64: what `row_keys` takes, worked out once per request."""
    return _mix(seed)


def row_keys(state: Int64Array, position: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Keys of the noise of the token at `position`.

    Args:
        state: int64 `[rows]`, `seed_state` of each row's seed.
        position: int64 `[rows]`, index in the sequence of the token to be chosen.

    Returns:
        `(k0, k1)`: int64 `[rows]`, whose lower 32 bits count: the lower and the upper half of
        splitmix64(state + position * 0x9E3779B97F4A7C15).
    """
    key = splitmix64(state + position * _GOLDEN)
    return key, key >> 32


def judgement_uniforms(state: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """By what synthetic acceptance judges the draft at `position`: float64 in [0, 1), `[rows]`.

    Independent of the noise that the position's token is drawn with.

    Args:
        state, position: int64, as `row_keys` takes them.
    """
    key = splitmix64(splitmix64(state ^ _JUDGEMENT) + position * _GOLDEN)
    return ((key >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
