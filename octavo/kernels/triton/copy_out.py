"""A step's tokens, written to the host's memory by a kernel.

A copy by the driver is the work of another engine: on an H200 the next kernel begins some 12 µs later than
behind a kernel, in every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, wait_for_previous

_BLOCK = 256


@triton.jit(do_not_specialize=["first", "second"])
def _copy_out_kernel(
    a_ptr, b_ptr, a_out_ptr, b_out_ptr, first, second,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < first
    tl.store(a_out_ptr + at, tl.load(a_ptr + at, mask=mask), mask=mask)
    mask = at < second
    tl.store(b_out_ptr + at, tl.load(b_ptr + at, mask=mask), mask=mask)


_copy_out = Launcher(_copy_out_kernel, overlap=True)


def copy_out(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write one or two contiguous int32 tensors to pinned memory of the host (or other memory that the device
    can write), where they are once the device comes to an event that is recorded behind.

    Args:
        pairs: `(source, place)`, of equal numbers of elements.
    """
    (a, a_out), (b, b_out) = pairs[0], pairs[-1]
    sizes = a.numel(), 0 if len(pairs) == 1 else b.numel()
    _copy_out((ceil_div(max(sizes), _BLOCK), 1, 1), (a, b, a_out, b_out), (), sizes, (_BLOCK,), 1)
