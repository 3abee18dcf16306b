"""Vectors of tokens out of a part of an embedding's table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, power_of_2, wait_for_previous


@triton.jit(do_not_specialize=["rows", "first"])
def _look_up_kernel(ids_ptr, table_ptr, out_ptr, stride, rows, first, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Program r: row r's vector."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64) - first
    here = (token >= 0) & (token < rows)
    x = tl.load(table_ptr + token * stride + cols, mask=(cols < SIZE) & here, other=0.0)
    tl.store(out_ptr + row * SIZE + cols, x, mask=cols < SIZE)


_look_up = Launcher(_look_up_kernel, overlap=True)


def look_up_part(table: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
    """See `octavo.kernels.reference.look_up_part`."""
    rows, size = table.shape
    out = torch.empty((len(token_ids), size), dtype=table.dtype, device=table.device)
    if len(token_ids):
        block = power_of_2(size)
        _look_up(
            (len(token_ids), 1, 1),
            (token_ids, table, out),
            (table.stride(0),),
            (rows, first),
            (size, block),
            max(1, min(8, block // 512)),
        )
    return out
