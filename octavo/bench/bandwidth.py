"""How fast a device's memory is read, measured."""

from __future__ import annotations

import time

_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_REPEATS = 5


def read_bandwidth(device: str) -> float:
    """Bytes read a second by a plain sum over memory far larger than any cache; the best of some runs.

    Args:
        device: as PyTorch names it (cpu, cuda, cuda:1).
    """
    import torch

    size = _BYTES[device.partition(":")[0]]
    memory = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(_REPEATS + 1):  # the first one warms up
        _settle(device)
        begin = time.perf_counter()
        for _ in range(4):
            memory.sum()
        _settle(device)
        best = max(best, 4 * size / (time.perf_counter() - begin))
    return best


def _settle(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
