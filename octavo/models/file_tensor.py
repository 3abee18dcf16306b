"""Large tensors of a file that are copied piece by piece, so that they are never in memory twice.

A consumer treats a `FileTensor` as any tensor: it takes rows or columns and copies them into its own
parameter. That copy (`copy_`) is what is replaced: it goes by pieces of some megabytes, each asked of
the disk before and given back after; to a GPU through pinned memory, where the copy of one piece, its
transfer and its conversion to the parameter's type overlap with the reading of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

PIECE_BYTES = 8 << 20
_SLOTS = 4
_COPIERS = 2


class Reader(Protocol):
    """What feeds a tensor's pieces."""

    def before(self, address: int, nbytes: int) -> None:
        """Bytes at an address are about to be read."""

    def after(self, address: int, nbytes: int) -> None:
        """They have been."""

    def staging(self, device: torch.device) -> Staging:
        """What carries pieces to a device."""


class FileTensor(torch.Tensor):
    """A view of a mapped file, or of part of one. Results of operations that copy are plain tensors."""

    reader: Reader

    @staticmethod
    def of(tensor: torch.Tensor, reader: Reader) -> FileTensor:
        """The same view as a `FileTensor`."""
        out = tensor.as_subclass(FileTensor)
        out.reader = reader
        return out

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], cls):
                if not isinstance(args[0], cls) and args[0].device.type != "meta":
                    return _stream(args[0], args[1])
            out = func(*args, **(kwargs or {}))
            source = next((arg for arg in args if isinstance(arg, cls)), None)
            if type(out) is cls or (isinstance(out, torch.Tensor) and source is not None):
                out = out.as_subclass(torch.Tensor)
                if source is not None and _same_memory(out, source):
                    return cls.of(out, source.reader)
            return out


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device or a.layout != torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to its last, both included."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((n - 1) * stride for n, stride in pairs) + 1) * tensor.element_size()


def _pieces(source: torch.Tensor) -> list[tuple[int, int]]:
    """Ranges of the first dimension whose bytes make about one piece."""
    rows = source.shape[0]
    step = max(1, PIECE_BYTES * rows // max(1, _extent(source)))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _stream(target: torch.Tensor, source: FileTensor) -> torch.Tensor:
    """`target.copy_(source)` by pieces."""
    reader, plain = source.reader, source.as_subclass(torch.Tensor)
    if plain.dim() == 0 or target.shape != plain.shape:
        return target.copy_(plain)
    if target.device.type != "cpu":
        reader.staging(target.device).copy(target, plain, reader)
        return target
    for start, end in _pieces(plain):
        piece = plain[start:end]
        address, nbytes = piece.data_ptr(), _extent(piece)
        reader.before(address, nbytes)
        target[start:end].copy_(piece)
        reader.after(address, nbytes)
    return target


class Staging:
    """Pinned memory through which pieces reach one GPU, in turn; a slot is used again once its
    transfer is over. (For a CPU it is ordinary memory, and nothing overlaps: for tests.)"""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = ThreadPoolExecutor(
            _COPIERS, "octavo-stage", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._slots: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event | None] = []
        self._turn = 0

    def close(self) -> None:
        """Wait for what is under way, and free the memory."""
        self._pool.shutdown(cancel_futures=True)
        for event in filter(None, self._free):
            event.synchronize()
        self._slots, self._free = [], []

    def copy(self, target: torch.Tensor, source: torch.Tensor, reader: Reader) -> None:
        """Copy `source`, a view of a file, into `target` on the device; of any dtypes, same shape."""
        waiting: deque[tuple[int, int, int, Future[torch.Tensor]]] = deque()
        try:
            for start, end in _pieces(source):
                if len(waiting) == _SLOTS:
                    self._send(target, *waiting.popleft())
                piece = source[start:end]
                slot = self._next_slot(piece.numel() * piece.element_size())
                waiting.append((start, end, slot, self._pool.submit(self._fill, slot, piece, reader)))
            while waiting:
                self._send(target, *waiting.popleft())
        finally:
            for *_, future in waiting:
                future.cancel()

    def _next_slot(self, nbytes: int) -> int:
        slot = self._turn
        self._turn = (self._turn + 1) % _SLOTS
        pin = self.device.type == "cuda"
        while len(self._slots) <= slot:
            self._slots.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pin))
            self._free.append(None)
        event = self._free[slot]
        if event is not None:
            event.synchronize()
        if self._slots[slot].numel() < nbytes:  # one row is longer than a piece
            self._slots[slot] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        return slot

    def _fill(self, slot: int, piece: torch.Tensor, reader: Reader) -> torch.Tensor:
        address, nbytes = piece.data_ptr(), _extent(piece)
        reader.before(address, nbytes)
        staged = self._slots[slot][: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)
        staged.copy_(piece)
        reader.after(address, nbytes)
        return staged

    def _send(
        self, target: torch.Tensor, start: int, end: int, slot: int, future: Future[torch.Tensor]
    ) -> None:
        staged = future.result()
        # Converted on the device: PyTorch's own copy would convert on the host first.
        target[start:end].copy_(staged.to(self.device, non_blocking=True), non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._free[slot] = event
