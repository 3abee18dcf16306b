"""What this machine offers a device's quantized matrices."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from octavo.kernels.quant_ops import has_kernels
from octavo.quantization.capability import Hardware

_assumed: ContextVar[Hardware | None] = ContextVar("assumed_hardware", default=None)


@contextlib.contextmanager
def assumed(hardware: Hardware) -> Iterator[None]:
    """In this context every device is such: to plan for a machine that is not here."""
    token = _assumed.set(hardware)
    try:
        yield
    finally:
        _assumed.reset(token)


def hardware_of(device: torch.device) -> Hardware:
    """The facts that `capability.running` asks for."""
    given = _assumed.get()
    if given is not None:
        return given
    return _hardware(device.type, device.index)


@functools.cache
def _hardware(kind: str, index: int | None) -> Hardware:
    if kind == "meta":  # sizes alone are asked for
        return Hardware("cuda", (9, 0), name="any GPU")
    if kind != "cuda":
        return Hardware("cpu", kernels=has_kernels(), name="this CPU")
    capability = torch.cuda.get_device_capability(index)
    triton = importlib.util.find_spec("triton") is not None
    return Hardware("cuda", capability, triton, torch.cuda.get_device_name(index))
