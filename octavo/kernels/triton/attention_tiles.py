"""Tiles of the attention kernels: how much one program takes on, by head size, dtype and device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileConfig:
    """Shape of one program: rows of scores (0: as few as the request needs), context positions, pipeline."""

    block_m: int
    block_n: int
    stages: int
    warps: int


# Shared memory that a program of each tile takes, as compiled for capability 8.0 / 9.0, in KiB (limits: 163
# on 8.0, 99 on 8.6 and 8.9, 227 on 9.0). Sizes in between are padded to the next power of 2. Windows and
# softcaps need no more. `benchmarks/compile_gpu_kernels.py` prints them.
#
#   head size          64       128      256
#   decode, 2 bytes    21/21    39/39    41/41     up to 16 lanes; 64 lanes: 57/81 for 128, 68/96 for 256
#   decode, float32    22/22    42/42    49/49     up to 16 lanes; 32 lanes: 52/52 for 128, 66/66 for 256
#   prefill, 2 bytes   33/49    65/97    68/192    (a shared beginning has tiles of half the lanes, too)
#   prefill, float32   20/20    36/36    33/33
#
# Over quantized caches, decode takes 23 to 43 KiB for up to 16 lanes and at most 98, prefill 33, 66 and 129.


def max_decode_tile(dtype: torch.dtype) -> int:
    """Lanes of the decode kernel's largest tile: (rows of a request) x (query heads of a KV head). More would
    spill registers, and in float32 not fit the shared memory of every device."""
    return 32 if dtype == torch.float32 else 64


def decode_config(head_dim: int, dtype: torch.dtype, shared_memory: int) -> TileConfig:
    """Tile of the decode kernel: enough bytes in flight for the memory, two programs a multiprocessor.

    Measured on an H200 with heads of 128, tiles of 128 positions against 64: 1.15 times as fast for 32
    requests of 384 tokens, 1.03 for 512 of 200 to 2000.
    """
    if dtype == torch.float32:
        return TileConfig(0, 32, 2, 4) if head_dim <= 128 else TileConfig(0, 16, 2, 8)
    if head_dim > 128:
        return TileConfig(0, 32, 3, 4)
    return TileConfig(0, 128 if shared_memory >= 192 << 10 else 64, 3, 4)


def quantized_decode_config(head_dim: int, dtype: torch.dtype, shared_memory: int) -> TileConfig:
    """As `decode_config`, over a quantized cache: as many positions, whose bytes are half as many, or with
    the room and registers for them twice as many of large heads."""
    if head_dim > 128 and shared_memory >= 192 << 10:
        return TileConfig(0, 64, 3, 4)
    return decode_config(head_dim, dtype, shared_memory)


def prefill_config(head_dim: int, dtype: torch.dtype, shared_memory: int) -> TileConfig:
    """Tile of the prefill kernel, for a device with `shared_memory` bytes in each multiprocessor."""
    if dtype == torch.float32:
        if head_dim > 128:
            return TileConfig(16, 16, 1, 8)
        return TileConfig(32, 32, 1, 8 if head_dim > 64 else 4)
    if head_dim <= 128:
        # On an H200 with heads of 128: 395 TFLOP/s by 4 warps and 331 by 8. Before 9.0, where operands lie in
        # registers, 4 warps have too few of them.
        return TileConfig(128, 64, 3, 4 if shared_memory >= 192 << 10 else 8)
    # The large tile takes 192 KiB, and on 8.0, where results lie in registers alone, spills.
    return TileConfig(128, 64, 2, 8) if shared_memory >= 192 << 10 else TileConfig(64, 32, 2, 8)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor; a program can have 1 KiB less."""
    if device.type != "cuda":
        return 228 << 10  # the interpreter, and compilation without a device: as capability 9.0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
