"""A device's tensors, put by in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ParkedTensors:
    """Copies tensors to host memory and frees theirs, until `restore`.

    It is their storages that are emptied and filled again, so that all that shares one (tied weights,
    views) goes on sharing it. Addresses change: recorded steps must be recorded again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.num_bytes = 0
        storages = {storage.data_ptr(): storage for t in tensors for storage in (t.untyped_storage(),)}
        storages.pop(0, None)  # of tensors without elements
        # All are copied before any is freed, so that a lack of host memory leaves everything as it was.
        for storage in storages.values():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            host.copy_(storage)
            self._parked.append((storage, host))
            self.num_bytes += storage.nbytes()
        for storage, _ in self._parked:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring everything back.

        Raises:
            RuntimeError: the device has too little memory; what was brought back is freed again.
        """
        try:
            for storage, host in self._parked:
                storage.resize_(host.nbytes())
        except RuntimeError:
            for storage, _ in self._parked:
                storage.resize_(0)
            raise
        for storage, host in self._parked:
            storage.copy_(host)
        self._parked = []
