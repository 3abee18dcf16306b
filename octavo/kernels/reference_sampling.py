"""Plain versions of the sampling kernels: argmax, and Gumbel-max with counter-based noise.

The noise of vocabulary entry v under a row's keys is one pure function, in exact 32-bit integers,
so that every implementation (this one, C++, Triton) and every batch draws the same:

    x = v * 0x9E3779B1 + k0;  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15
    x ^= k1;                  x *= 0x735A2D97;                 x ^= x >> 15      (modulo 2^32)
    u = ((x >> 9) + 0.5) * 2^-23                                                (exact in float32)
    noise = -log(-log(u))

Multipliers and shifts are those of low-bias integer mixers (Wellons, "hash-prospector").
"""

from __future__ import annotations

import numpy as np
import torch

_SLICE_ELEMENTS = 1 << 21  # bounds the temporaries; small enough for a CPU's cache


def _signed(constant: int) -> int:
    """The int32 with the bits of an unsigned 32-bit constant."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


_GOLDEN, _MUL1, _MUL2 = _signed(0x9E3779B1), _signed(0x21F0AAAD), _signed(0x735A2D97)


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x ^= x >> bits` in place, with the logical shift that int32 lacks."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def gumbel_noise(index: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of vocabulary entries `index` under the keys `k0`, `k1` (broadcast together).

    All are integers, taken modulo 2^32. Returns float32 in [-2.82, 16.64].
    """
    x = index.to(torch.int32) * _GOLDEN + k0.to(torch.int32)
    _xor_shift(x, 16).mul_(_MUL1)
    _xor_shift(x, 15).bitwise_xor_(k1.to(torch.int32)).mul_(_MUL2)
    _xor_shift(x, 15)
    u = (x >> 9).bitwise_and_((1 << 23) - 1).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit; of equals the lowest index.

    Args:
        logits: `[rows, vocab]`, float32, bfloat16 or float16.

    Returns:
        int64 `[rows]`.
    """
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorised, PyTorch's is not (6 µs against 130 µs for a row of 49152).
        wide = logits if logits.dtype is torch.float32 else logits.float()
        return torch.from_numpy(wide.numpy().argmax(-1))
    return logits.argmax(-1)


def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> torch.Tensor:
    """Samples softmax(logits / temperature) per row as argmax(logits / temperature + Gumbel noise).

    The noise of entry v depends on (k0, k1, v) alone, so a row's token does not depend on its batch.
    Rows of temperature 0 take the argmax. Of equals the lowest index.

    Args:
        logits: `[rows, vocab]`, float32, bfloat16 or float16.
        temperature: float32 `[rows]`, >= 0.
        k0, k1: integers `[rows]`, taken modulo 2^32.

    Returns:
        int64 `[rows]`.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    index = torch.arange(vocab, dtype=torch.int32, device=logits.device)[None, :]
    step = max(1, _SLICE_ELEMENTS // vocab)
    for lo in range(0, rows, step):
        part = slice(lo, lo + step)
        greedy = (temperature[part] == 0)[:, None]
        scores = logits[part].float() / temperature[part][:, None].masked_fill(greedy, 1.0)
        noise = gumbel_noise(index, k0[part][:, None], k1[part][:, None])
        out[part] = argmax(scores.add_(noise.masked_fill_(greedy, 0.0)))
    return out


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's sum of exponentials: what its log-probabilities are less than its logits.

    Args:
        logits: float32 `[rows, vocab]`, contiguous in the last dimension.

    Returns:
        float32 `[rows, 1]`.
    """
    return logits.logsumexp(-1, keepdim=True)


def ranking_keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct integers that order a row as its logits do, of equals the lower index first (as the larger).

    Args:
        logits: float32 `[rows, vocab]` without NaN, contiguous in the last dimension.

    Returns:
        int64 `[rows, vocab]`.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    vocab = logits.shape[1]
    return (bits.long() << 32) | torch.arange(vocab - 1, -1, -1, device=logits.device)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the logits of tokens that a mask leaves out to -inf, in place.

    Args:
        logits: `[n, vocab]`, any float type.
        rows: int64 `[m]`, rows of `logits`, each once.
        bits: int32 `[m, ceil(vocab / 32)]`: bit v % 32 of word v // 32 is set where token v may stay.
    """
    if not len(rows):
        return
    vocab = logits.shape[1]
    if logits.device.type == "cpu":  # NumPy takes bits apart many times as fast
        allowed = np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        for row, forbidden in zip(rows.tolist(), torch.from_numpy(allowed == 0), strict=True):
            logits[row].masked_fill_(forbidden, float("-inf"))
        return
    place = torch.arange(vocab, device=logits.device)
    forbidden = (bits[:, place // 32] >> (place % 32).int()) & 1 == 0
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
