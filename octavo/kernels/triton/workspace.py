"""Scratch memory of a device that launches share."""

from __future__ import annotations

import functools

import torch


class Workspace:
    """Scratch memory of a device, shared by all layers: launches of one stream follow each other.

    A kernel that is started before the one ahead of it ends (`octavo.kernels.triton.launch`) touches it
    only after `wait_for_previous`. It grows and never lets go of what it once handed out, since a recorded
    graph may still use it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._retired: list[torch.Tensor] = []
        self.floats = torch.empty(1 << 16, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 10, dtype=torch.int32, device=device)

    def reserve(self, floats: int, counters: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """At least so many float32 of any content, and int32 counters that are zero between launches."""
        if floats > self.floats.numel():
            self._retired.append(self.floats)
            self.floats = torch.empty(1 << (floats - 1).bit_length(), dtype=torch.float32, device=self.device)
        if counters > self.counters.numel():
            self._retired.append(self.counters)
            size = 1 << (counters - 1).bit_length()
            self.counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self.floats, self.counters


@functools.cache
def workspace(device: torch.device) -> Workspace:
    """The scratch memory of a device."""
    return Workspace(device)
