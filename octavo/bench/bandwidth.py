"""How fast a device reads its memory and multiplies matrices, measured."""

from __future__ import annotations

import time

_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_SIZES = {"cuda": 8192, "cpu": 1024}
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


def matrix_rate(device: str, dtype: str) -> float:
    """Operations a second of a large product of square matrices, two for each multiplication and addition;
    the best of some runs.

    Args:
        device: as PyTorch names it (cpu, cuda, cuda:1).
        dtype: likewise (float32, bfloat16, float16).
    """
    import torch

    size = _SIZES[device.partition(":")[0]]
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    best = 0.0
    for _ in range(_REPEATS + 1):  # the first one warms up
        _settle(device)
        begin = time.perf_counter()
        matrix @ matrix
        _settle(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - begin))
    return best


def _settle(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
