"""Activations of the feed-forward layers, under the names that Transformers' configs give them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.errors import ModelError
from octavo.kernels import ops

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


# PyTorch's own compute in float32 inside and round once. The forms of one function that Transformers
# tells apart by how they are computed (gelu_new, gelu_fast: in the model's dtype, step by step) are one here.
PLAIN: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
}
# Those that have a fused kernel.
_FUSED: dict[Activation, Activation] = {F.silu: ops.silu_and_mul, _gelu_tanh: ops.gelu_tanh_and_mul}


def activation(name: str) -> Activation:
    """The function of Transformers' `ACT2FN[name]`, for feed-forward layers without a gate.

    Raises:
        ModelError: an activation that no supported family uses.
    """
    if name not in PLAIN:
        raise ModelError(f"hidden_act={name!r} is not supported: use a checkpoint with {', '.join(PLAIN)}")
    return PLAIN[name]


def gated_activation(name: str) -> Activation:
    """The function `[rows, 2 n] -> [rows, n]` that applies `name` to the first half and multiplies.

    Raises:
        ModelError: an activation that no supported family uses.
    """
    plain = activation(name)
    if plain in _FUSED:
        return _FUSED[plain]

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return plain(gate) * up

    return gated
