"""Bringing a step's tokens to the host without waiting and without allocating."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from octavo.worker.device_errors import device_failed

# Steps that may be under way at once; each has memory of its own until its tokens have been read.
_STEPS = 8


def wait_for(*events: Any) -> None:
    """Block until the device has come to these events (None: nothing to wait for).

    Raises:
        EngineDeadError: the device reported an error that no later step can survive.
    """
    try:
        for event in events:
            if event is not None:
                event.synchronize()
    except RuntimeError as error:
        raise device_failed(error) from error


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """What the device comes to once it has done all that was launched; None on a CPU, which has done it."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor; its place on the host, filled once the device comes to an `event_now`."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _copy_each(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, place in pairs:
        place.copy_(tensor, non_blocking=True)


class TokenTransfer:
    """Owns pinned host memory and events for the tokens of the latest steps, used in turn.

    Invariant: a step's memory is reused only `_STEPS` steps later, when it has been read long since.
    """

    def __init__(self, max_numbers: int, device: torch.device):
        """`max_numbers`: of a step, in two tensors at most."""
        self._on_device = device.type == "cuda"
        self._buffers = [
            torch.empty(max_numbers + 8, dtype=torch.int32, pin_memory=self._on_device) for _ in range(_STEPS)
        ]
        self._events: list[Any] = [torch.cuda.Event() if self._on_device else None for _ in range(_STEPS)]
        self._turn = 0
        self._copy: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], None] = _copy_each
        if self._on_device and importlib.util.find_spec("triton") is not None:
            self._copy = importlib.import_module("octavo.kernels.triton.copy_out").copy_out

    def start(self, *tensors: torch.Tensor | None) -> tuple[list[torch.Tensor | None], Any]:
        """Begin to copy some tensors (int32, two at most; None: none); their places on the host, and the
        event that says that these are filled (None on a CPU), to be recorded by the caller."""
        self._turn = (self._turn + 1) % _STEPS
        left, places = self._buffers[self._turn], list[torch.Tensor | None]()
        pairs = []
        for tensor in tensors:
            place = None
            if tensor is not None:
                # Aligned, so that one variant of the kernel serves all.
                size = tensor.numel()
                flat, left = left[:size], left[-(-size // 4) * 4 :]
                place = flat.view(tensor.shape)
                pairs.append((tensor.contiguous(), place))
            places.append(place)
        if pairs:
            self._copy(pairs)
        return places, self._events[self._turn]
