"""Unquantized products on a GPU: which kernel multiplies, and what around the product is part of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels import ops

GatedActivation = Callable[[torch.Tensor], torch.Tensor]  # `[rows, 2 n]` to `[rows, n]`

FUSED = ops.GATED


class _Kernels(NamedTuple):
    few_rows: Any
    skinny: Any
    choice: Any


@functools.cache
def _kernels() -> _Kernels | None:
    """The Triton kernels' modules, or None without Triton (`octavo.kernels.ops` warns of that)."""
    names = ("linear", "skinny_linear", "linear_choice")
    try:
        return _Kernels(*(importlib.import_module(f"octavo.kernels.triton.{name}") for name in names))
    except ImportError:
        return None


def serves(x: torch.Tensor) -> bool:
    """Whether products with these rows are this module's."""
    return x.is_cuda


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation | None = None
) -> torch.Tensor:
    """`act` of `x @ weight.T + bias`.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]` of `x`'s dtype.
        bias: `[out]` or None.
        act: None: the product as it is.

    Returns:
        `[rows, out]`, with `act` `[rows, out / 2]`, of `x`'s dtype.
    """
    if act is not None and act not in FUSED:
        return act(linear(x, weight, bias))
    kernels = _kernels()
    if kernels is not None:
        name = None if act is None else FUSED[act]
        kind, config = kernels.choice.choose(
            x.shape[0], x.shape[1], weight.shape[0], act is not None, x.device
        )
        if kind == "few_rows":
            return kernels.few_rows.few_rows_linear(x, weight, bias, config, name)
        if kind == "skinny" and x.element_size() == 2:  # tensor cores multiply no float32
            return kernels.skinny.skinny_linear(x, weight, bias, name, config)
    out = F.linear(x, weight, bias)
    return out if act is None else act(out)


def rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    act: GatedActivation | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`linear` of the RMS norm of `x + residual`, and that sum, in one kernel.

    Args:
        x: `[rows, in]`, a sublayer's output.
        residual: `[rows, in]`, the stream, left as it is; None: `x` is the stream.
        norm_weight: `[in]`, of `x`'s dtype or float32.
        eps: of the norm.
        weight, bias, act: as for `linear`.

    Returns:
        The product, `[rows, out]` or `[rows, out / 2]`, and the new stream, `[rows, in]`; None where no
        kernel does all that, or more than one is faster.
    """
    kernels = _kernels()
    fused = act is not None and act in FUSED
    if kernels is None:
        return None
    kind = kernels.choice.choose(x.shape[0], x.shape[1], weight.shape[0], fused, x.device).kind
    # For one row even a product that is slower alone wins by the kernel that it saves. For more, programs
    # that each read all rows, stream and norm lose more than that (measured on an H200: up to a quarter).
    if kind == "cublas" or x.shape[0] > 1:
        return None
    name = FUSED[act] if act is not None and fused else None
    # The choice's cut was measured without a norm; the kernel knows one for products with it.
    out, stream = kernels.few_rows.rms_norm_few_rows_linear(
        x, residual, norm_weight, eps, weight, bias, act=name
    )
    return out if act is None or fused else act(out), stream
