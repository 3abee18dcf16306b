"""The choice of experts: scores, groups, the best k and their weights, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, power_of_2


@triton.jit
def _first_best(values, index, NONE: tl.constexpr):
    """The lowest of `index` where `values` (2 dimensions) are greatest, or NONE among NaN."""
    best = tl.max(tl.max(values, axis=1), axis=0)
    return tl.min(tl.min(tl.where(values == best, index, NONE), axis=1), axis=0)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, row_stride, scale,
    TOP_K: tl.constexpr, TOP_K_P2: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr,
    SIZE: tl.constexpr, SIZE_P2: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, SUM_TOP2: tl.constexpr,
):  # fmt: skip
    """Experts lie as [group, place within it]; padding never wins."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P2)[:, None]
    place = tl.arange(0, SIZE_P2)[None, :]
    index = group * SIZE + place
    valid = (group < GROUPS) & (place < SIZE)
    low = -float("inf")
    x = tl.load(logits_ptr + row * row_stride + index, mask=valid, other=low).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0))
        scores = tl.where(valid, scores, 0.0)
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + index, mask=valid, other=0.0)
    choice = tl.where(valid, choice, low)
    if TOP_GROUPS < GROUPS:
        judged = tl.max(choice, axis=1)[:, None]
        if SUM_TOP2:
            first = tl.min(tl.where(choice == judged, place, SIZE_P2), axis=1)[:, None]
            judged += tl.max(tl.where(place == first, low, choice), axis=1)[:, None]
        judged = tl.where(group < GROUPS, judged, low)
        allowed = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = _first_best(judged, group, GROUPS_P2)
            allowed = allowed | (group == best)
            judged = tl.where(group == best, low, judged)
        choice = tl.where(allowed, choice, low)
    k = tl.arange(0, TOP_K_P2)
    chosen = tl.zeros([TOP_K_P2], tl.int32)
    weights = tl.zeros([TOP_K_P2], tl.float32)
    for i in tl.static_range(TOP_K):
        # Among NaN nobody wins, and what follows must not leave the experts' memory.
        best = tl.minimum(_first_best(choice, index, GROUPS * SIZE), GROUPS * SIZE - 1)
        weight = tl.sum(tl.sum(tl.where(index == best, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(k == i, best, chosen)
        weights = tl.where(k == i, weight, weights)
        choice = tl.where(index == best, low, choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(weights_ptr + row * TOP_K + k, weights * scale, mask=k < TOP_K)
    tl.store(experts_ptr + row * TOP_K + k, chosen, mask=k < TOP_K)


_route = Launcher(_route_kernel)


def route(
    logits: torch.Tensor,
    top_k: int,
    sigmoid: bool = False,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    sum_top2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_moe.route`, whose arguments these are; of equals the lowest number wins."""
    rows, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    if rows:
        size = num_experts // num_groups
        groups_p2, size_p2 = power_of_2(num_groups), power_of_2(size)
        _route(
            (rows, 1, 1),
            (logits, logits if bias is None else bias, weights, experts),
            (logits.stride(0),),
            (scale,),
            (
                *(top_k, power_of_2(top_k), num_groups, groups_p2, size, size_p2, top_groups),
                *(sigmoid, renormalize, bias is not None, sum_top2),
            ),
            1 if groups_p2 * size_p2 <= 256 else 4,
        )
    return weights, experts
