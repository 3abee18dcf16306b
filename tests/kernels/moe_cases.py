"""Random mixtures of experts, and the plain result in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Case(NamedTuple):
    """Arguments of `reference_moe.experts`."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor


def make(
    rows: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: str = "cpu",
    among: int | None = None,
    seed: int = 0,
) -> Case:
    """Distinct experts for each row, among the last `among` of them (None: all); the others' weights are NaN.

    Weights are scaled so that results are of the order of 1.
    """
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    first = 0 if among is None else num_experts - among
    chosen = torch.rand(rows, num_experts - first, generator=g, device=device).argsort(1)[:, :top_k] + first
    w13 = (normal(num_experts, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    w2 = (normal(num_experts, hidden, inner) * 2 * inner**-0.5).to(dtype)
    unchosen = torch.ones(num_experts, dtype=torch.bool, device=device)
    unchosen[chosen.flatten()] = False
    w13[unchosen], w2[unchosen] = float("nan"), float("nan")
    weights = torch.softmax(normal(rows, top_k), -1)
    return Case(normal(rows, hidden).to(dtype), w13, w2, weights, chosen.int())


def of_a_rank(case: Case, first: int, last: int) -> Case:
    """The same with the experts from `first` to before `last` alone: others are named by their number."""
    count = last - first
    local = case.chosen - first
    chosen = torch.where((local >= 0) & (local < count), local, count)
    return case._replace(w13=case.w13[first:last], w2=case.w2[first:last], chosen=chosen)


def wanted(case: Case) -> torch.Tensor:
    """The result in float64."""
    out = torch.zeros_like(case.x, dtype=torch.float64)
    for k in range(case.chosen.shape[1]):
        for expert in case.chosen[:, k].unique().tolist():
            if expert == len(case.w13):
                continue
            rows = (case.chosen[:, k] == expert).nonzero()[:, 0]
            gate, up = (case.x[rows].double() @ case.w13[expert].double().T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ case.w2[expert].double().T
            out[rows] += y * case.weights[rows, k, None].double()
    return out


def error(got: torch.Tensor, case: Case) -> float:
    """Norm of the difference, relative; NaN where an unchosen expert was read."""
    want = wanted(case)
    return float((got.double() - want).norm() / want.norm())


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
