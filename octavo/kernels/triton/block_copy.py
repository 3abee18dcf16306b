"""The Triton kernel that moves blocks between KV caches and host memory, which it reaches over the bus.

It takes the host's pages as they lie, so that hundreds of scattered blocks are one launch. What it costs are
a few multiprocessors while it runs; copy engines (`octavo.kernels.cuda_block_copy`) cost none, but the
driver's time for every piece, and read small pieces from the host at a fraction of the bus's rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher

# Writes over the bus are not waited for: 4 programs of 256 threads reach its rate (H200: 46 GB/s). More of
# them only fill the way that the host's commands come by, so that every kernel of the steps beside starts
# later: a step of Llama-8B takes 5.5 ms alone, 7.5 beside 4 programs, 22 beside 16. Reads are waited for,
# 16 KiB a program: 4 reach 25 GB/s (6.1 ms), 16 reach 49 (7.4 ms).
OUT_PROGRAMS = 4
INTO_PROGRAMS = 8
_BLOCK = 2048  # words of 8 bytes
_WARPS = 8


@triton.jit(do_not_specialize=["host", "pieces"])
def _copy_blocks_kernel(
    bases_ptr, blocks_ptr, slots_ptr, host, pieces,
    LAYERS: tl.constexpr, WORDS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        i = piece // LAYERS
        layer = piece % LAYERS
        block = tl.load(blocks_ptr + i).to(tl.int64)
        slot = tl.load(slots_ptr + i).to(tl.int64)
        device_at = tl.load(bases_ptr + layer) + block * (WORDS * 8)
        host_at = host + (slot * LAYERS + layer) * (WORDS * 8)
        device_ptr = tl.multiple_of(device_at.to(tl.pointer_type(tl.int64)), ALIGN)
        host_ptr = tl.multiple_of(host_at.to(tl.pointer_type(tl.int64)), ALIGN)
        for begin in range(0, WORDS, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            mask = at < WORDS
            # Nobody reads this soon: the L2 cache is left to those who compute.
            if OUT:
                words = tl.load(device_ptr + at, mask=mask, eviction_policy="evict_first")
                tl.store(host_ptr + at, words, mask=mask, eviction_policy="evict_first")
            else:
                words = tl.load(host_ptr + at, mask=mask, eviction_policy="evict_first")
                tl.store(device_ptr + at, words, mask=mask, eviction_policy="evict_first")


_copy_blocks = Launcher(_copy_blocks_kernel)


class KernelBlockCopier:
    """A `BlockCopier` (`octavo.kernels.block_copy`) by a kernel; `host` is page-locked memory that the device
    can address, `piece` a multiple of 8 bytes."""

    name = "kernel"

    def __init__(self, buffers: Sequence[torch.Tensor], host: torch.Tensor):
        self._buffers, self._host = buffers, host  # whose addresses are kept
        self._piece = host.shape[2]
        self._device = buffers[0].device
        self._bases = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=self._device)
        places = [host.data_ptr(), *(b.data_ptr() for b in buffers), self._piece]
        assert all(place % 8 == 0 for place in places), "pieces are words of 8 bytes"
        self._align = 16 if all(place % 16 == 0 for place in places) else 8

    def out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """See `BlockCopier`."""
        self._copy(blocks, slots, True)

    def into(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """See `BlockCopier`."""
        self._copy(blocks, slots, False)

    def _copy(self, blocks: np.ndarray, slots: np.ndarray, out: bool) -> None:
        ids = torch.from_numpy(np.concatenate((blocks, slots)).astype(np.int32, copy=False))
        if self._device.type == "cuda":
            ids = ids.pin_memory().to(self._device, non_blocking=True)
        layers, words = len(self._buffers), self._piece // 8
        pieces = len(blocks) * layers
        block = min(_BLOCK, triton.next_power_of_2(words))
        _copy_blocks(
            (min(OUT_PROGRAMS if out else INTO_PROGRAMS, pieces), 1, 1),
            (self._bases, ids[: len(blocks)], ids[len(blocks) :]),
            (),
            (self._host.data_ptr(), pieces),
            (layers, words, out, block, self._align),
            _WARPS,
        )
