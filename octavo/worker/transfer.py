"""Bringing a step's tokens to the host without waiting and without allocating."""

from __future__ import annotations

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


class TokenTransfer:
    """Owns pinned host memory and events for the tokens of the latest steps, used in turn.

    Invariant: a step's memory is reused only `_STEPS` steps later, when it has been read long since.
    """

    def __init__(self, max_numbers: int, device: torch.device):
        self._on_device = device.type == "cuda"
        self._buffers = [
            torch.empty(max_numbers, dtype=torch.int32, pin_memory=self._on_device) for _ in range(_STEPS)
        ]
        self._events: list[Any] = [torch.cuda.Event() if self._on_device else None for _ in range(_STEPS)]
        self._turn = 0

    def start(self, *tensors: torch.Tensor | None) -> tuple[list[torch.Tensor | None], Any]:
        """Begin to copy some tensors (int32, few; None: none); their places on the host, and the event that
        says that these are filled (None on a CPU), to be recorded by the caller."""
        self._turn = (self._turn + 1) % _STEPS
        left, places = self._buffers[self._turn], list[torch.Tensor | None]()
        for tensor in tensors:
            place = None
            if tensor is not None:
                flat, left = left[: tensor.numel()], left[tensor.numel() :]
                place = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
            places.append(place)
        return places, self._events[self._turn]
