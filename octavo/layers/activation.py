"""Activations of the feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.errors import ModelError
from octavo.kernels import ops

GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "swish": ops.silu_and_mul,
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function `[rows, 2 n] -> [rows, n]` that applies `name` to the first half and multiplies.

    Raises:
        ModelError: an activation that no supported family uses.
    """
    if name not in GATED:
        raise ModelError(f"hidden_act={name!r} is not supported: use a checkpoint with {', '.join(GATED)}")
    return GATED[name]
