"""Products with 16-bit weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.triton import invariant_linear, linear, skinny_linear


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Few rows, with and without the norm before them, up to 128 rows, batch-invariant ones."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, f32 = torch.bfloat16, torch.float32
    for rows, size_in, size_out in [(1, 4096, 6144), (1, 14336, 4096), (4, 4096, 28672), (3, 576, 1536)]:
        product = functools.partial(
            linear.few_rows_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_out, size_in, dtype=bf16),
        )
        found.append((f"few_rows_linear {rows} x {size_in} to {size_out}", product))
    for rows, size_in, size_out, act, norm_dtype in [
        (1, 4096, 6144, None, bf16),
        (1, 4096, 28672, "silu", bf16),
        (1, 1024, 6144, "silu", bf16),
        (1, 2304, 18432, "gelu_tanh", f32),
        (1, 8192, 57344, "silu", bf16),
        (4, 4096, 28672, "silu", bf16),
        (3, 576, 3072, "silu", bf16),
    ]:
        product = functools.partial(
            linear.rms_norm_few_rows_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_in, dtype=norm_dtype),
            1e-6,
            torch.empty(size_out, size_in, dtype=bf16),
            act=act,
        )
        name = f"rms_norm_few_rows_linear {rows} x {size_in} to {size_out} {act} norm {str(norm_dtype)[6:]}"
        found.append((name, product))
    for rows, size_in, size_out, act, cut in [
        (16, 4096, 4096, None, (16, 256, 6, 4, 1, 32)),
        (32, 4096, 6144, None, (64, 128, 4, 4, 1, 32)),
        (32, 3072, 1024, None, (32, 256, 3, 4, 4, 32)),
        (32, 4096, 28672, "silu", (64, 128, 3, 4, 1, 32)),
        (32, 1024, 6144, "gelu_tanh", (32, 128, 4, 4, 2, 32)),
        (64, 14336, 4096, None, (128, 64, 6, 8, 4, 32)),
        (128, 4096, 4096, None, (128, 64, 4, 8, 4, 32)),
        (128, 4096, 4096, None, (64, 64, 4, 8, 2, 32, False)),
        (17, 577, 1531, None, (32, 128, 4, 4, 1, 32)),
        (3, 64, 1, None, (16, 64, 3, 4, 1, 32)),  # Triton makes a size of 1 a constant
    ]:
        product = functools.partial(
            skinny_linear.skinny_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_out, size_in, dtype=bf16),
            None,
            act,
            skinny_linear.SkinnyConfig(*cut),
        )
        found.append((f"skinny_linear {rows} x {size_in} to {size_out} {act or ''} {cut}", product))
    for dtype in (bf16, f32):
        for tile in invariant_linear.all_tiles(dtype):
            shape = (torch.empty(70, 4096, dtype=dtype), torch.empty(6144, 4096, dtype=dtype))
            product = functools.partial(invariant_linear.invariant_linear, *shape, tile=tile)
            found.append((f"invariant_linear {str(dtype)[6:]} {tile.block_m} x {tile.block_n}", product))
    return found
