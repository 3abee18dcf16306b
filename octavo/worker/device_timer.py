"""How long a stretch of a step took on its device, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceTimer:
    """Times what is launched between its making and `stop`."""

    def __init__(self, device: torch.device):
        self._events: list[Any] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._begin = time.perf_counter()

    @property
    def beside_host(self) -> bool:
        """Whether the stretch goes on when the host has launched it."""
        return self._events is not None

    def stop(self) -> DeviceTimer:
        """The stretch ends here; returns itself."""
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._begin
        return self

    def seconds(self) -> float:
        """Seconds, or 0 while the device is not through."""
        if self._events is None:
            return self._seconds
        if not self._events[1].query():
            return 0.0
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
