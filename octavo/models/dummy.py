"""Random weights from a config and a seed alone, the same on every device.

Element i of a tensor is a function of (seed, the tensor's name, i): a 32-bit integer mixed by two
rounds of multiplication and shifts ("lowbias32", C. Wellons, https://nullprogram.com/blog/2018/07/31/),
taken as a uniform number of the standard deviation that Transformers initializes with. Norms
multiply by 1, biases are 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from octavo.models.ahead import Job, run_ahead
from octavo.models.config import ModelConfig
from octavo.models.targets import Targets, canonical
from octavo.quantization.stored_tensor import Dummy

_CPU_CHUNK = 1 << 17  # elements that stay in a core's cache through the rounds
_GPU_CHUNK = 1 << 26
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # as signed 32-bit


def dummy_weights(
    config: ModelConfig, targets: Targets, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Total elements, and every weight that the model takes, made on `device` in `dtype`."""
    std = float(config.extra.get("initializer_range") or 0.02)

    def job(name: str, shape: tuple[int, ...]) -> Job:
        def make() -> torch.Tensor:
            if name.endswith(".bias"):
                return torch.zeros(shape, dtype=dtype, device=device)
            if len(shape) == 1:
                return torch.full(shape, 1.0 - config.norm_offset, dtype=dtype, device=device)
            return random_weight(name, shape, std, dtype, device, seed)

        return Job(name, math.prod(shape), make)

    def special(name: str, shape: tuple[int, ...], dummy: Dummy) -> Job:
        """Of a tensor that is no plain weight."""

        def make() -> torch.Tensor:
            if not math.prod(shape):  # which says nothing of its size
                return dummy(torch.empty(shape, device=device), std)
            return dummy(random_weight(name, shape, 1.0, torch.float32, device, seed), std)

        return Job(name, math.prod(shape), make)

    jobs = []
    for name, shape in canonical(targets).items():
        dummy = targets[name].dummy
        jobs.append(job(name, shape) if dummy is None else special(name, shape, dummy))
    return sum(j.numel for j in jobs), run_ahead(jobs, device)


def random_weight(
    name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """A tensor of uniform numbers of mean 0 and standard deviation `std`, by (seed, name, index)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key, tweak = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)
    chunk = min(_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK, flat.numel())
    scale = std * math.sqrt(3.0) / 2.0**31
    base = torch.arange(chunk, dtype=torch.int32, device=device)
    x, shifted = torch.empty_like(base), torch.empty_like(base)
    real = torch.empty(chunk, dtype=torch.float32, device=device)
    for start in range(0, flat.numel(), chunk):
        n = min(chunk, flat.numel() - start)
        xs, ts = x[:n], shifted[:n]
        torch.add(base[:n], _wrap(start), out=xs)
        xs.bitwise_xor_(key)
        _mix(xs, ts)
        xs.bitwise_xor_(tweak)
        _mix(xs, ts)
        real[:n].copy_(xs).mul_(scale)
        flat[start : start + n].copy_(real[:n])
    return out


def _mix(x: torch.Tensor, scratch: torch.Tensor) -> None:
    for shift, multiplier in ((16, _MULTIPLIERS[0]), (15, _MULTIPLIERS[1]), (16, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_((1 << (32 - shift)) - 1)  # the shift is arithmetic: drop the sign's copies
        x.bitwise_xor_(scratch)
        if multiplier is not None:
            x.mul_(multiplier)


def _wrap(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
