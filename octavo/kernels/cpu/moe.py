"""A mixture of experts on the CPU: only the matrices of chosen experts are read, each once a call.

Experts with few rows go through a C++ kernel, those with many through the caller's own linear product.
Twin: `octavo.kernels.reference_moe`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from octavo.kernels import ops
from octavo.kernels.cpu.ops import differ, dtype_code, library, row_stride
from octavo.kernels.reference_moe import Linear

# Rows of one expert up to which the kernel wins. Measured on a busy AVX2 machine with one thread, against
# `linear`: in float32 2 to 3 times as fast at 2 to 16 rows, 1.4 at 32 and 64, level beyond; in bfloat16,
# where `linear` widens a slice of weights once for all rows and the kernel for every three, 1.5 to 2.5 times
# at 1 to 4 rows, 1.15 at 8, 0.85 at 16.
FEW_ROWS = {torch.float32: 32, torch.bfloat16: 8}


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: np.ndarray,
    targets: np.ndarray,
    segments: np.ndarray,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[targets[i]] = scales[targets[i]] * (weight[expert] @ x[rows[i]])` for the pairs i of each segment.

    Args:
        x: `[any, size]`, float32 or bfloat16.
        weight: `[experts, n, size]` of `x`'s dtype, contiguous.
        rows, targets: int32 `[pairs]`, pairs of one expert side by side.
        segments: int32 `[segments, 3]`, contiguous: expert, its first pair, the one after its last.
        out: `[targets, n]`, contiguous, of `x`'s dtype or float32.
        scales: float32 `[targets]`, contiguous, or None.

    Returns:
        `out`.
    """
    if weight.dtype is not x.dtype:
        raise differ(x, weight)
    if not (weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("weight and out must be contiguous")
    status = library().octavo_grouped_linear(
        x.data_ptr(),
        row_stride(x),
        weight.data_ptr(),
        rows.ctypes.data,
        targets.ctypes.data,
        segments.ctypes.data,
        len(segments),
        0 if scales is None else scales.data_ptr(),
        out.data_ptr(),
        weight.shape[1],
        weight.shape[2],
        dtype_code(x),
        dtype_code(out),
        torch.get_num_threads(),
    )
    if status:
        raise differ(x, out)
    return out


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """`reference_moe.experts`, whose arguments these are, without rounding each expert's result.

    `linear` multiplies where more than `FEW_ROWS` rows chose an expert.
    """
    num_experts, double, hidden = w13.shape
    top_k = chosen.shape[1]
    flat = chosen.reshape(-1).numpy()
    counts = np.bincount(flat, minlength=num_experts)[:num_experts]
    # Pairs (row, k) by expert, those of experts with few rows in front, those of none that is here left out.
    crowded = counts > FEW_ROWS[x.dtype]
    here = np.flatnonzero(flat < num_experts)
    found = flat[here]
    order = here[np.argsort(found + num_experts * crowded[found], kind="stable")].astype(np.int32)
    ids = np.concatenate([np.flatnonzero((counts > 0) & ~crowded), np.flatnonzero(crowded)])
    ends = counts[ids].cumsum()
    segments = np.stack([ids, ends - counts[ids], ends], axis=1).astype(np.int32)
    num_few = len(ids) - int(crowded.sum())
    few = int(segments[num_few - 1, 2]) if num_few else 0
    weights = weights.reshape(-1).contiguous()
    make = torch.empty if len(here) == len(flat) else torch.zeros
    parts = make(len(flat), hidden, dtype=torch.float32)
    if few:
        rows, positions = order[:few] // top_k, np.arange(few, dtype=np.int32)
        inner = x.new_empty(few, double)
        grouped_linear(x, w13, rows, positions, segments[:num_few], inner)
        inner = ops.silu_and_mul(inner)
        grouped_linear(inner, w2, positions, order[:few], segments[:num_few], parts, weights)
    pairs = torch.from_numpy(order.astype(np.int64))
    for expert, first, last in segments[num_few:].tolist():
        at = pairs[first:last]
        inner = ops.silu_and_mul(linear(x[at // top_k], w13[expert], None))
        parts[at] = linear(inner, w2[expert], None).float() * weights[at, None]
    return parts.view(-1, top_k, hidden).sum(1).to(x.dtype)
