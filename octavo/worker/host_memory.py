"""Large host memory that a GPU reads and writes itself."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.planning.hardware import detect_memory

GIB = 1 << 30
_TOUCHERS = 8  # threads; the kernel zeroes pages at a few GB/s each


class HostMemory:
    """Owns zeroed host memory, page-locked and mapped for `device` if that is a GPU.

    PyTorch's own page-locked memory comes in powers of 2; this is as large as it was asked for.

    Attributes:
        tensor: uint8 `[num_bytes]`.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        spoken_for: int = 0,
        ranks: int = 1,
        agree: Callable[[int], int] = int,
    ):
        """Allocate.

        Args:
            num_bytes: how much.
            device: who shall reach it.
            spoken_for: bytes of host memory that look free and will be used (a CPU's KV cache).
            ranks: that share the host's memory, each of which allocates as much.
            agree: gives all of them the smallest of their numbers, before any goes on.

        Raises:
            ConfigError: so much isn't free, or cannot be page-locked.
        """
        free = agree(max(0, detect_memory().available - ranks * spoken_for))
        if ranks * num_bytes > free:
            each = f" by each of {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"swap_space={num_bytes / GIB:g} GiB is more host memory than is free: {num_bytes} bytes "
                f"asked{each}, {free} free: lower swap_space"
            )
        self._locked = False
        if device.type == "cpu":
            self.tensor = torch.from_numpy(np.zeros(num_bytes, np.uint8))  # costs nothing until it is written
            return
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.from_numpy(np.frombuffer(memory, np.uint8))
        threads = min(_TOUCHERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(torch.Tensor.zero_, self.tensor.chunk(threads)))
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0)
        if int(code) != 0:
            raise ConfigError(
                f"swap_space={num_bytes / GIB:g} GiB cannot be page-locked ({code}): lower swap_space, or "
                "raise the limit of locked memory"
            )
        self._locked = True

    def close(self) -> None:
        """Unlock it; nobody may copy any more."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._locked = False
