"""The host tier's memory, and the copies between it and the device's KV caches."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.kernels.block_copy import BlockCopier, PlainBlockCopier
from octavo.kernels.cuda_block_copy import BatchedBlockCopier, driver_call
from octavo.step_messages import BlockCopies
from octavo.worker.copy_queue import CopyQueue
from octavo.worker.host_memory import GIB, HostMemory
from octavo.worker.kv_cache import page_buffers

logger = logging.getLogger(__name__)

_PROBE_BYTES = 64 << 20  # copied each way to find the rates; milliseconds
_CPU_PROBE_BYTES = 4 << 20
# How much quicker another way must be than the preferred one.
_WORTH_A_CHANGE = 1.25


class HostCache:
    """Owns the host's slots (uint8 `[slots, buffers, piece]`; one holds a page: a block's pieces of all
    layers) and runs `BlockCopies` between them and the caches: at once on a CPU, beside the steps on a GPU.

    Which copies are where is the engine's business (`octavo.kv.host_tier`).

    Attributes:
        num_slots, page_bytes: how many, and bytes of each.
        rate_out, rate_into: bytes per second to and from the host, measured.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        num_bytes: int,
        ranks: int = 1,
        agree: Callable[[int], int] = int,
    ):
        """Allocate, and find the quickest way to copy.

        Args:
            caches: the KV caches of all layers (`kv_cache.allocate_caches`).
            num_bytes: host memory; what is left of it after whole pages is not taken.
            ranks, agree: as `HostMemory`'s.

        Raises:
            ConfigError: too little for one page, or more than is free.
        """
        buffers = page_buffers(caches)
        self._device = buffers[0].device
        piece = buffers[0].shape[1]
        self.page_bytes = piece * len(buffers)
        self.num_slots = num_bytes // self.page_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"swap_space={num_bytes / GIB:g} GiB is less than a block of {self.page_bytes} bytes: "
                "raise swap_space"
            )
        on_cpu = self._device.type == "cpu"
        self._memory = HostMemory(
            self.num_slots * self.page_bytes,
            self._device,
            spoken_for=sum(buffer.nbytes for buffer in buffers) if on_cpu else 0,
            ranks=ranks,
            agree=agree,
        )
        self.slots = self._memory.tensor.view(self.num_slots, len(buffers), piece)
        self._bytes = self._memory.tensor.numpy().data
        self._measure(self._copiers(buffers), len(buffers[0]))
        self._queue = None if on_cpu else CopyQueue(self._out, self._into, self._device)
        self._ended: tuple[list[int], list[int]] = ([], [])

    def page(self, slot: int) -> memoryview:
        """A slot's bytes, writable."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return self._bytes[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def launch(self, copies: BlockCopies) -> None:
        """Begin copies, ordered between the steps launched before and after this (see `BlockCopies`)."""
        if self._queue is not None:
            self._queue.launch(copies)
            return
        self._out.out(copies.out_blocks, copies.out_slots)
        self._into.into(copies.into_slots, copies.into_blocks)
        self._ended[0].append(copies.number)

    def poll(self) -> tuple[list[int], list[int]]:
        """Numbers of the copies that ended since the last call: those that are through, those that failed."""
        if self._queue is not None:
            return self._queue.poll()
        ended, self._ended = self._ended, ([], [])
        return ended

    @property
    def busy(self) -> bool:
        """Whether copies were launched that `poll` has not told of."""
        return bool(self._ended[0]) if self._queue is None else self._queue.busy

    def describe(self) -> str:
        """One line for the log."""
        ways = [
            f"{rate / 1e9:.1f} GB/s {way}" + ("" if copier.name == "plain" else f" ({copier.name})")
            for rate, way, copier in ((self.rate_out, "out", self._out), (self.rate_into, "in", self._into))
        ]
        size = self.num_slots * self.page_bytes / GIB
        return f"{self.num_slots} blocks, {size:.2f} GiB, {' and '.join(ways)}"

    def close(self) -> None:
        """Wait for copies, free the memory."""
        if self._queue is not None:
            self._queue.close()
        self._memory.close()

    # ---- which way ------------------------------------------------------------------------------

    def _copiers(self, buffers: list[torch.Tensor]) -> list[BlockCopier]:
        """What can copy, the preferred first."""
        if self._device.type == "cpu":
            return [PlainBlockCopier(buffers, self.slots)]
        # The kernel comes first although it takes multiprocessors from the steps: telling the driver of
        # thousands of pieces takes it 10 to 20 ms, in which no step is launched (H200: steps of Llama-8B
        # went from 5.7 ms to 23 beside copies out by the engines), and small pieces are read from the host
        # at a third of the bus's rate or less.
        found: list[BlockCopier] = []
        if importlib.util.find_spec("triton") is not None:
            from octavo.kernels.triton.block_copy import KernelBlockCopier

            found.append(KernelBlockCopier(buffers, self.slots))
        call = driver_call()
        if call is not None:
            device = self._device
            found.append(
                BatchedBlockCopier(
                    buffers, self.slots, call, lambda: torch.cuda.current_stream(device).cuda_stream
                )
            )
        if not found:
            logger.warning("KV blocks are copied piece by piece: install triton, or a driver of CUDA 12.8")
            found.append(PlainBlockCopier(buffers, self.slots))
        return found

    def _measure(self, copiers: list[BlockCopier], num_blocks: int) -> None:
        """Choose a copier each way, by what it reaches now. Caches keep their contents."""
        limit = _CPU_PROBE_BYTES if self._device.type == "cpu" else _PROBE_BYTES
        count = max(1, min(num_blocks, self.num_slots, limit // self.page_bytes))
        rng = np.random.default_rng(0)
        blocks = rng.permutation(num_blocks)[:count].astype(np.int32)
        slots = rng.permutation(self.num_slots)[:count].astype(np.int32)
        outs = [self._rate(copier.out, blocks, slots) for copier in copiers]
        intos = [self._rate(copier.into, slots, blocks) for copier in copiers]
        for copier, out, into in zip(copiers, outs, intos, strict=True):
            logger.debug("KV copies by %s: %.1f GB/s out, %.1f in", copier.name, out / 1e9, into / 1e9)
        self._out, self.rate_out = _choose(copiers, outs)
        self._into, self.rate_into = _choose(copiers, intos)

    def _rate(
        self, copy: Callable[[np.ndarray, np.ndarray], None], source: np.ndarray, to: np.ndarray
    ) -> float:
        """Bytes per second of one way, submission included."""
        num_bytes = len(source) * self.page_bytes
        if self._device.type == "cpu":
            copy(source, to)  # touches memory for the first time
            begin = time.perf_counter()
            copy(source, to)
            return num_bytes / (time.perf_counter() - begin)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy(source[:1], to[:1])  # compiles
            times = []
            for _ in range(2):  # the first touches what is touched only once
                stream.synchronize()
                begin = time.perf_counter()
                copy(source, to)
                stream.synchronize()
                times.append(time.perf_counter() - begin)
        return num_bytes / times[-1]


def _choose(copiers: list[BlockCopier], rates: list[float]) -> tuple[BlockCopier, float]:
    """The first, unless a later one is that much quicker."""
    best = max(range(len(copiers)), key=rates.__getitem__)
    chosen = best if rates[best] >= _WORTH_A_CHANGE * rates[0] else 0
    return copiers[chosen], rates[chosen]
