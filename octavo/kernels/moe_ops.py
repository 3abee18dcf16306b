"""Routing and experts, each by the fastest kernel for its tensors' device; meaning: `reference_moe`."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F

from octavo.kernels import ops, reference_moe
from octavo.kernels.reference_moe import Linear

_MODULES = {
    "cpu": "octavo.kernels.cpu.moe",
    "triton": "octavo.kernels.triton.moe",
    "torch": "octavo.kernels.reference_moe",
}


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(_MODULES[name])


def _kernels(x: torch.Tensor) -> str:
    return ops.kernels_for(x.device.type, x.dtype).name


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
    """See `reference_moe.route`."""
    # On a CPU the plain version's dozen microseconds are lost beside one expert's product.
    run = _module("triton").route if _kernels(logits) == "triton" else reference_moe.route
    return run(logits, top_k, sigmoid, renormalize, scale, bias, num_groups, top_groups, sum_top2)


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """See `reference_moe.experts`; `linear` is asked only where the kernels leave a product to it."""
    return _module(_kernels(x)).experts(x, w13, w2, weights, chosen, linear)
