"""Bringing a step's tokens to the host without waiting and without allocating."""

from __future__ import annotations

from typing import Any

import torch

from octavo.errors import EngineDeadError

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
        raise EngineDeadError(f"the device failed: {error}") from error


class TokenTransfer:
    """Owns pinned host memory and events for the tokens of the latest steps, used in turn.

    Invariant: a step's memory is reused only `_STEPS` steps later, when it has been read long since.
    """

    def __init__(self, max_tokens: int, device: torch.device):
        self._on_device = device.type == "cuda"
        self._buffers = [
            torch.empty(max_tokens, dtype=torch.int32, pin_memory=self._on_device) for _ in range(_STEPS)
        ]
        self._events: list[Any] = [torch.cuda.Event() if self._on_device else None for _ in range(_STEPS)]
        self._turn = 0

    def start(self, tokens: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        """Begin to copy `tokens` (int32, few); their place on the host, and the event that says it is filled
        (None on a CPU)."""
        self._turn = (self._turn + 1) % _STEPS
        event = self._events[self._turn]
        host = None
        if tokens is not None:
            flat = self._buffers[self._turn][: tokens.numel()]
            host = flat.view(tokens.shape).copy_(tokens, non_blocking=True)
        return host, event
