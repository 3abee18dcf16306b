"""Experts: routing, and their products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.triton import moe, moe_route


def _experts_case(
    num_experts: int, top_k: int, hidden: int, inner: int, rows: int, dtype: torch.dtype
) -> Callable[[], None]:
    def call() -> None:
        w13 = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)
        w2 = torch.empty(num_experts, hidden, inner, dtype=dtype)
        chosen = torch.zeros(rows, top_k, dtype=torch.int32)
        moe.experts(torch.empty(rows, hidden, dtype=dtype), w13, w2, torch.empty(rows, top_k), chosen)

    return call


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Rows that hardly share experts, and more, for which pairs are sorted."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for num_experts, options in (
        (8, {"top_k": 2}),
        (128, {"top_k": 8}),
        (256, dict(top_k=8, sigmoid=True, scale=2.5, num_groups=8, top_groups=4, sum_top2=True)),
    ):
        bias = torch.empty(num_experts) if "sigmoid" in options else None
        logits = torch.empty(4, num_experts, dtype=bf16)
        route = functools.partial(moe_route.route, logits, bias=bias, **options)
        found.append((f"route {num_experts} {options}", route))
    for num_experts, top_k, hidden, inner, rows, dtype in [
        (128, 8, 2048, 768, 1, bf16),  # Qwen3-30B-A3B
        (128, 8, 2048, 768, 16, bf16),
        (128, 8, 2048, 768, 256, bf16),
        (128, 8, 2048, 768, 1024, bf16),
        (8, 2, 4096, 14336, 1, bf16),  # Mixtral
        (8, 2, 4096, 14336, 512, bf16),
        (12, 3, 200, 72, 5, f16),
        (12, 3, 200, 72, 1, f32),
        (12, 3, 200, 72, 40, f32),
    ]:
        case = _experts_case(num_experts, top_k, hidden, inner, rows, dtype)
        name = f"experts {top_k} of {num_experts} {hidden} to {inner} {rows} rows {str(dtype)[6:]}"
        found.append((name, case))
    return found
