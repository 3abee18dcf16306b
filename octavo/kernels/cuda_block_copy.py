"""Blocks between KV caches and host memory by the GPU's copy engines: many pieces in one driver call.

`cuMemcpyBatchAsync` came with CUDA 12.8, and lost an argument with 13.0 (CUDA driver API, section 6.14);
PyTorch has no face for it, so that the driver's library is called directly. The call lets go of Python's
lock, so that a thread can make it beside the engine's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Copies of one call: the driver holds a lock meanwhile, which whoever launches a step must wait for.
_PER_CALL = 1024
_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1

# Copies `count` pieces (destinations, sources, sizes: their addresses) on a stream; returns the error code.
BatchCall = Callable[[int, int, int, int, int], int]


class CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: order of access to the sources, two hints of locations, flags."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("destination", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def driver_call() -> BatchCall | None:
    """The driver's batched copy, or None where there is no driver or it is older than CUDA 12.8."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    attributes = CopyAttributes(order=_STREAM_ORDER, flags=_BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)  # of the copies that these attributes are for: all
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    head: list[Any] = [
        pointer,
        pointer,
        pointer,
        size,
        ctypes.POINTER(CopyAttributes),
        ctypes.POINTER(size),
        size,
    ]
    given = (ctypes.byref(attributes), ctypes.byref(first), 1)
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        function = driver.cuMemcpyBatchAsync_v2
        function.argtypes = [*head, pointer]
        return lambda to, source, sizes, count, stream: function(to, source, sizes, count, *given, stream)
    if hasattr(driver, "cuMemcpyBatchAsync"):
        older = driver.cuMemcpyBatchAsync
        older.argtypes = [*head, ctypes.POINTER(size), pointer]
        failed = ctypes.c_size_t(0)
        return lambda to, source, sizes, count, stream: older(
            to, source, sizes, count, *given, ctypes.byref(failed), stream
        )
    return None


class BatchedBlockCopier:
    """A `BlockCopier` (`octavo.kernels.block_copy`) by copy engines; `host` is page-locked memory, and the
    current stream not the default one."""

    name = "copy engines"

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        host: torch.Tensor,
        call: BatchCall,
        current_stream: Callable[[], int],
    ):
        """Args `call` and `current_stream` are `driver_call()` and what tells the current stream's handle."""
        self._buffers, self._host = buffers, host  # whose addresses are kept
        self._call = call
        self._current_stream = current_stream
        self._piece = host.shape[2]
        self._bases = np.array([b.data_ptr() for b in buffers], np.uint64)
        self._places = host.data_ptr() + np.arange(len(buffers), dtype=np.uint64) * np.uint64(self._piece)
        self._sizes = np.full(_PER_CALL, self._piece, np.uint64)

    def out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """See `BlockCopier`."""
        self._copy(self._in_host(slots), self._on_device(blocks))

    def into(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """See `BlockCopier`."""
        self._copy(self._on_device(blocks), self._in_host(slots))

    def _on_device(self, blocks: np.ndarray) -> np.ndarray:
        """Addresses of all pieces, uint64 `[m * layers]`."""
        return (blocks.astype(np.uint64)[:, None] * np.uint64(self._piece) + self._bases).reshape(-1)

    def _in_host(self, slots: np.ndarray) -> np.ndarray:
        page = np.uint64(self._piece * len(self._buffers))
        return (slots.astype(np.uint64)[:, None] * page + self._places).reshape(-1)

    def _copy(self, to: np.ndarray, source: np.ndarray) -> None:
        stream = self._current_stream()
        for begin in range(0, len(to), _PER_CALL):
            count = min(_PER_CALL, len(to) - begin)
            at = begin * to.itemsize
            code = self._call(
                to.ctypes.data + at, source.ctypes.data + at, self._sizes.ctypes.data, count, stream
            )
            if code != 0:
                raise RuntimeError(f"CUDA error {code} from cuMemcpyBatchAsync of {count} pieces")
