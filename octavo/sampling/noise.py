"""Where randomness comes from: 64-bit seeds, mixed with a position into the keys of one row's noise.

No generator has a state. The noise of a token is a function of (seed of the choice, position in the
sequence, vocabulary entry), so it is the same in any batch, after a preemption, on any device, and
whether the position was reached by plain decoding or by judging drafts.

The functions work on int64 arrays of NumPy and of PyTorch alike: both wrap modulo 2^64.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.splitmix import GOLDEN, MASK64, Int64Array, signed, splitmix64

_CHOICE = 0xD1B54A32D192ED03


def _mix(value: int) -> int:
    return int(splitmix64(np.array([signed(value)], dtype=np.int64))[0])


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` (from 0) of a request with `n` > 1: in [0, 2^64).

    Choice 0 has the request's own seed (modulo 2^64), so that n=1 and the first of n=3 agree;
    choice i has splitmix64(seed + i * 0xD1B54A32D192ED03).
    """
    return (seed if index == 0 else _mix(seed + index * _CHOICE)) & MASK64


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
    key = splitmix64(state + position * GOLDEN)
    return key, key >> 32
