"""The launcher compiles once per specialization and then calls what was compiled."""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2


class Kernel:
    """Stands for a Triton function: `kernel[grid](...)` compiles, launches, returns what it compiled."""

    def __init__(self) -> None:
        self.compiled = 0
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*args: Any, num_warps: int) -> Any:
            self.compiled += 1
            self.launches.append((grid, *args))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.kernel.launches.append((grid, *args))


def test_variants() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    first = ((2, 1, 1), (x, x), (64,), (3, 0.5), (True, 8), 4)
    launch(*first)
    launch((7, 1, 1), (x[4:], x), (64,), (9, 0.25), (True, 8), 4)  # other grid, data and free scalars
    assert kernel.compiled == 1
    assert kernel.launches[1][0] == (7, 1, 1) and kernel.launches[1][3:] == (64, 9, 0.25, True, 8)
    grid, tensors, integers, scalars, constants, warps = first
    for changed in [
        (grid, (x[1:], x), integers, scalars, constants, warps),  # alignment
        (grid, (x, x.double()), integers, scalars, constants, warps),
        (grid, tensors, (65,), scalars, constants, warps),
        (grid, tensors, integers, scalars, (False, 8), warps),
        (grid, tensors, integers, scalars, constants, 8),
    ]:
        before = kernel.compiled
        launch(*changed)
        launch(*changed)
        assert kernel.compiled == before + 1
    assert len(kernel.launches) == 12


def test_rounding() -> None:
    assert [power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 128, 129)] == [1, 1, 2, 4, 4, 8, 128, 256]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
