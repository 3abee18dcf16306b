"""What log-probabilities need of a row of logits, the same bits whatever rows stand beside it.

PyTorch's own reductions cut their work by the number of rows, and its top-k takes equals in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, wait_for_previous
from octavo.kernels.triton.sampling import _log

_BLOCK = 4096


@triton.jit
def _logsumexp_kernel(x_ptr, out_ptr, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (row): each lane keeps the maximum of its elements, and their sum relative to it."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        x = tl.load(x_ptr + row * x_row + start + lanes, mask=start + lanes < SIZE, other=float("-inf"))
        above = tl.maximum(top, x)
        finite = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - finite) + tl.exp(x - finite)
        top = above
    largest = tl.max(top, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(total * tl.exp(top - finite), axis=0)
    tl.store(out_ptr + row, tl.where(total == 0.0, float("-inf"), largest + _log(total)))


@triton.jit
def _ranking_keys_kernel(
    x_ptr, out_ptr, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program (row, block)."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + cols, mask=cols < SIZE, other=0.0)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) | (SIZE - 1 - cols).to(tl.int64)
    tl.store(out_ptr + row * SIZE + cols, keys, mask=cols < SIZE)


_logsumexp = Launcher(_logsumexp_kernel, overlap=True)
_ranking_keys = Launcher(_ranking_keys_kernel, overlap=True)


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """See the twin in `octavo.kernels.reference_sampling`; a row's result does not depend on the others."""
    rows, size = logits.shape
    out = torch.empty((rows, 1), dtype=torch.float32, device=logits.device)
    if rows:
        _logsumexp((rows, 1, 1), (logits, out), (logits.stride(0),), (), (size, _BLOCK), 8)
    return out


def ranking_keys(logits: torch.Tensor) -> torch.Tensor:
    """See the twin in `octavo.kernels.reference_sampling`."""
    rows, size = logits.shape
    out = torch.empty((rows, size), dtype=torch.int64, device=logits.device)
    if rows:
        grid = (rows, ceil_div(size, _BLOCK), 1)
        _ranking_keys(grid, (logits, out), (logits.stride(0),), (), (size, _BLOCK), 8)
    return out
