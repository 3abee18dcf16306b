"""Launching Triton kernels with little host time.

Triton's own launch binds and classifies every argument anew, which takes tens of microseconds on a
slow host: more than most kernels run. A `Launcher` remembers the compiled kernel by what Triton
specializes on (dtypes, 16-byte alignment of pointers, values of integers, constants) and calls it.
"""

from __future__ import annotations

from typing import Any

import torch

Grid = tuple[int, int, int]


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n` (1 for less)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


class Launcher:
    """One kernel with its compiled variants.

    The kernel's parameters are, in this order: tensors, integers it is specialized on, scalars it is
    not (floats, and integers under `do_not_specialize`), constants.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        integers: tuple[int, ...],
        scalars: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launches on the current stream; compiles a variant that is met for the first time."""
        key = (
            tensors[0].get_device(),
            num_warps,
            integers,
            constants,
            *[(t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *integers, *scalars, *constants)
            return
        compiled = self.kernel[grid](*tensors, *integers, *scalars, *constants, num_warps=num_warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled
