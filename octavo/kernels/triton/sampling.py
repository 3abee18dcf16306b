"""Choosing a token per row: argmax, and Gumbel-max sampling with counter-based noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, ceil_div, wait_for_previous


@triton.jit
def _log(x):
    """Natural logarithm of a positive, normal float32, within about 1 ulp.

    `tl.log` is the hardware's approximation, whose *absolute* error near 1 is 2^-22. The noise of a
    sampled token comes from the u nearest to 1 of a whole vocabulary, where -log(u) is of that size.
    Method and coefficients: fdlibm's logf (x = 2^k m, sqrt(1/2) <= m < sqrt(2), s = (m-1)/(m+1)).
    """
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    k = ((bits >> 23) - 127).to(tl.float32)
    m = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    t1 = w * (0.40000972152 + w * 0.24279078841)
    t2 = z * (0.66666662693 + w * 0.28498786688)
    half_square = 0.5 * f * f
    return k * 0.69313812256 + (f - (half_square - (s * (half_square + t2 + t1) + k * 9.0580006145e-06)))


@triton.jit
def _gumbel(cols, k0, k1):
    """Standard Gumbel noise for vocabulary entries `cols` under the row's keys (uint32)."""
    x = cols.to(tl.uint32) * 0x9E3779B1 + k0
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= k1
    x *= 0x735A2D97
    x ^= x >> 15
    u = ((x >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(u))


@triton.jit
def _first_largest(values, indices):
    """The largest of `values` and its index in `indices`; of equals the lowest index."""
    value = tl.max(values, axis=0)
    return value, tl.min(tl.where(values == value, indices, 2147483647), axis=0)


# Sizes that change from step to step must not select another compiled variant.
@triton.jit(do_not_specialize=["steps"])
def _choose_kernel(
    logits_ptr, temperature_ptr, k0_ptr, k1_ptr, value_ptr, index_ptr, logits_stride, vocab, steps,
    BLOCK: tl.constexpr, NOISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, c): the best entry of the c-th `steps` blocks of the vocabulary."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = 0.0
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        k0 = tl.load(k0_ptr + row).to(tl.uint32)
        k1 = tl.load(k1_ptr + row).to(tl.uint32)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = part * steps
    best_at = first * BLOCK + lanes
    last = tl.minimum(first + steps, tl.cdiv(vocab, BLOCK))
    if temperature == 0.0:
        for block in range(first, last):
            cols = block * BLOCK + lanes
            x = tl.load(logits_ptr + row * logits_stride + cols, mask=cols < vocab, other=float("-inf"))
            x = x.to(tl.float32)
            best_at = tl.where(x > best, cols, best_at)
            best = tl.maximum(x, best)
    else:
        if NOISE:
            for block in range(first, last):
                cols = block * BLOCK + lanes
                x = tl.load(logits_ptr + row * logits_stride + cols, mask=cols < vocab, other=float("-inf"))
                x = tl.math.div_rn(x.to(tl.float32), temperature) + _gumbel(cols, k0, k1)
                best_at = tl.where(x > best, cols, best_at)
                best = tl.maximum(x, best)
    value, index = _first_largest(best, best_at)
    parts = tl.num_programs(1)
    tl.store(value_ptr + row * parts + part, value)
    tl.store(index_ptr + row * parts + part, index)


@triton.jit(do_not_specialize=["parts"])
def _reduce_kernel(value_ptr, index_ptr, out_ptr, parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + lanes, mask=lanes < parts, other=2147483647)
    value, index = _first_largest(value, index)
    tl.store(out_ptr + row, index.to(tl.int64))


_choose_parts = Launcher(_choose_kernel, overlap=True)
_choose_among = Launcher(_reduce_kernel, overlap=True)

_BLOCK = 1024
MAX_PARTS = 512


def _choose_in_parts(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    k0: torch.Tensor | None,
    k1: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each part of a row, float32 `[rows, parts]`, and where it is, int32; some rows."""
    rows, vocab = logits.shape
    # About 1024 programs fill any current chip; beyond that, more parts only cost the second pass.
    blocks = ceil_div(vocab, _BLOCK)
    steps = ceil_div(blocks, max(1, min(blocks, 1024 // rows, MAX_PARTS)))
    parts = ceil_div(blocks, steps)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    unused = logits
    noise = temperature is not None
    _choose_parts(
        (rows, parts, 1),
        (
            logits,
            unused if temperature is None else temperature,
            unused if k0 is None else k0,
            unused if k1 is None else k1,
            values,
            indices,
        ),
        (logits.stride(0), vocab),
        (steps,),
        (_BLOCK, noise),
        4,
    )
    return values, indices


def _choose(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    k0: torch.Tensor | None,
    k1: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        values, indices = _choose_in_parts(logits, temperature, k0, k1)
        _choose_among((len(logits), 1, 1), (values, indices, out), (), (values.shape[1],), (MAX_PARTS,), 4)
    return out


def largest_in_parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit in each of up to `MAX_PARTS` parts of every row, of some rows: see `argmax`.

    Returns:
        Float32 `[rows, parts]`, and where each one is in its row, int32; of equals the lowest index.
    """
    return _choose_in_parts(logits, None, None, None)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit; of equals the lowest index.

    Args:
        logits: `[rows, vocab]`, float32, bfloat16 or float16, contiguous in the last dimension.

    Returns:
        int64 `[rows]`.
    """
    return _choose(logits, None, None, None)


def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> torch.Tensor:
    """Samples softmax(logits / temperature) per row as argmax(logits / temperature + Gumbel noise).

    The noise of entry v depends on (k0, k1, v) alone, so a row's token does not depend on its batch.
    Rows of temperature 0 take the argmax. Of equals the lowest index.

    Args:
        logits: `[rows, vocab]`, float32, bfloat16 or float16, contiguous in the last dimension.
        temperature: float32 `[rows]`, >= 0.
        k0, k1: integers `[rows]` (int64 or int32), taken modulo 2^32.

    Returns:
        int64 `[rows]`.
    """
    return _choose(logits, temperature, k0, k1)
