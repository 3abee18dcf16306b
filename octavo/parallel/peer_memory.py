"""Memory on each GPU of a host that the other ranks' GPUs write: made, told, opened and tried out."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import ConfigError

ROW_BYTES = 16384
"""Most bytes of a row: 8192 elements of two bytes."""
_TRY_SECONDS = 20.0
_LAZY_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_TOLD_BYTES = 1 + 1 + _HANDLE_BYTES + 8  # whether it worked, device, handle, offset

Gather = Callable[[bytes], list[bytes]]
"""Tells every rank's bytes, of one length, to all; in the order of ranks."""


class PeerError(RuntimeError):
    """Why ranks cannot write each other's memory."""


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerError(f"there is no driver's library: {error}") from None
    pointer, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
    driver.cuMemGetAddressRange_v2.argtypes = [pointer, size, ctypes.c_uint64]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise PeerError(f"CUDA error {code} from {what}")


def share(memory: torch.Tensor) -> bytes:
    """What other processes need to `open_shared` a tensor's memory.

    Raises:
        PeerError: memory of this kind cannot be shared.
    """
    driver = _driver()
    base, length, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), memory.data_ptr())
    _check(code, "cuMemGetAddressRange")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base), "cuIpcGetMemHandle")
    return bytes(handle) + (memory.data_ptr() - base.value).to_bytes(8, "little")


def open_shared(told: bytes) -> int:
    """The address of memory that another process has shared, on the current device; it stays open.

    Raises:
        PeerError: the driver refuses.
    """
    handle = _Handle.from_buffer_copy(told[:_HANDLE_BYTES])
    address = ctypes.c_uint64()
    code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    _check(code, "cuIpcOpenMemHandle")
    return address.value + int.from_bytes(told[_HANDLE_BYTES:], "little")


class PeerMemory:
    """Owns this rank's boxes (`octavo.kernels.triton.peers`), one for elements of 2 bytes and one for 4, and
    keeps those of the others open.

    Every rank of the group makes one at the same point.

    Args:
        rank, size: of the group.
        device: this rank's GPU, which is the current one.
        gather: among the group.
        any_rows: whether to take any number of rows, so that all are added up in one way; else as many as
            this is the faster way for.

    Raises:
        PeerError: on all ranks, where one of them cannot reach another's memory.
        ConfigError: what a rank wrote did not arrive as it was.
    """

    def __init__(self, rank: int, size: int, device: torch.device, gather: Gather, any_rows: bool = False):
        # With two ranks a sum moves as few bytes so as by any way, and beats NCCL at any size (two H200s, the
        # norm included: 2.8 against 7.7 µs for a row of 8 KiB, 213 against 309 for 8192). With more ranks,
        # each sends all to all others.
        self.rows = sys.maxsize if any_rows or size == 2 else 64
        try:
            self.kernels: Any = importlib.import_module("octavo.kernels.triton.peers")
        except ImportError:
            self.kernels = None
        rows = 512 if size == 2 else 128
        nbytes = 2 * size * rows * ROW_BYTES
        self._memory = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
        turns = torch.zeros(2, rows, dtype=torch.int32, device=device)
        words = []
        for memory, dtype in zip(self._memory, (torch.int16, torch.int32), strict=True):
            words.append(memory.view(dtype).view(2, size, rows, ROW_BYTES // dtype.itemsize))
            words[-1].fill_(torch.iinfo(dtype).min)
        torch.cuda.synchronize(device)  # before anybody is told of it
        problem, own = self._tell(device)
        everyone = gather(own)
        addresses = torch.zeros(2, size, dtype=torch.int64)
        if all(told[0] for told in everyone):
            try:
                addresses = torch.tensor([self._addresses(rank, i, everyone) for i in range(2)])
            except PeerError as error:
                problem = str(error)
        else:
            problem = problem or "another rank's memory cannot be shared"
        if not all(told == b"\1" for told in gather(b"\0" if problem else b"\1")):
            raise PeerError(problem or "another rank cannot open it")
        found = addresses.to(device)
        self.boxes = {
            dtype.itemsize: self.kernels.PeerBox(rank, size, words[i], found[i], turns[i])
            for i, dtype in enumerate((torch.int16, torch.int32))
        }
        self._try_out(rank, size, device, gather)

    def _tell(self, device: torch.device) -> tuple[str, bytes]:
        """What is wrong ("": nothing), and what others need to know."""
        problem = ""
        try:
            if self.kernels is None:
                raise PeerError("Triton is not available")
            for other in range(torch.cuda.device_count()):
                if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
                    raise PeerError(f"GPU {device.index} cannot reach the memory of GPU {other}")
            return problem, b"\1" + bytes([device.index]) + share(self._memory)
        except PeerError as error:
            return str(error), bytes(_TOLD_BYTES)

    def _addresses(self, rank: int, box: int, everyone: list[bytes]) -> list[int]:
        """Of every rank's box, as this one sees it."""
        if not hasattr(self, "_opened"):
            self._opened = [
                self._memory.data_ptr() if other == rank else open_shared(told[2:])
                for other, told in enumerate(everyone)
            ]
        return [address + box * self._memory.shape[1] for address in self._opened]

    def _try_out(self, rank: int, size: int, device: torch.device, gather: Gather) -> None:
        """Add up numbers of which the sum is known, twice, so that each row has both turns."""
        columns = torch.arange(min(1024, self.boxes[4].row_words), dtype=torch.float32, device=device)
        sums = []
        for turn in range(2):
            x = (columns * (rank + 1) + turn).expand(3, -1).contiguous()
            sums.append(self.kernels.sum_over_ranks(x, self.boxes[4]))
        done = torch.cuda.Event()
        done.record()
        gather(b"\0")  # all have launched it
        end = time.monotonic() + _TRY_SECONDS
        while not done.query() and time.monotonic() < end:
            time.sleep(1e-3)
        known = [columns * (size * (size + 1) // 2) + turn * size for turn in range(2)]
        right = done.query() and all(
            bool((found == want).all()) for found, want in zip(sums, known, strict=True)
        )
        if not all(told == b"\1" for told in gather(b"\1" if right else b"\0")):
            raise ConfigError(
                "what GPUs write into each other's memory does not arrive: give "
                "disable_custom_all_reduce=True"
            )

    def box_for(self, x: torch.Tensor) -> Any:
        """The box that holds `x`'s rows; None: it is too large, or no matrix."""
        if x.dim() != 2 or x.shape[0] > self.rows or not x.is_floating_point():
            return None
        box = self.boxes.get(x.element_size())
        return box if box is not None and x.shape[1] <= box.row_words else None
