"""Triton without a device: what is launched from here on is compiled, and not run."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import launch


class _StandInDriver:
    """Answers what compilation asks of a driver."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(capability: int) -> list[tuple[str, Any]]:
    """Makes this process compile for a compute capability (90 for 9.0) whatever it launches on CPU tensors.

    What is compiled is exactly what a launch on the device would compile, and lands in Triton's cache.

    Returns:
        A list to which names and compiled kernels are appended.
    """
    triton.runtime.driver.set_active(_StandInDriver(capability))
    launch.overlaps = lambda device: capability >= 90
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def warm_up(self: Any, *call_args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *call_args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))  # and None to the launcher, which then keeps nothing

    JITFunction.run = warm_up
    return compiled
