"""Tokens that a grammar forbids: their logits become -inf."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, wait_for_previous

_BLOCK = 4096


@triton.jit
def _forbid_tokens_kernel(
    logits_ptr,
    rows_ptr,
    bits_ptr,
    x_row,
    bits_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (masked row, block): stores only where a token is forbidden, and reads no logits."""
    wait_for_previous(OVERLAP)
    mask = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    row = tl.load(rows_ptr + mask)
    word = tl.load(bits_ptr + mask * bits_row + cols // 32, mask=inside, other=-1)
    forbidden = ((word >> (cols % 32)) & 1) == 0
    tl.store(logits_ptr + row * x_row + cols, float("-inf"), mask=inside & forbidden)


_forbid_tokens = Launcher(_forbid_tokens_kernel, overlap=True)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """See the twin in `octavo.kernels.reference_sampling`."""
    size = logits.shape[1]
    if len(rows):
        grid = (len(rows), ceil_div(size, _BLOCK), 1)
        strides = (logits.stride(0), bits.stride(0))
        _forbid_tokens(grid, (logits, rows, bits), strides, (), (size, _BLOCK), 8)
