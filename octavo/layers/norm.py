"""RMS normalization, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch

from octavo.kernels import ops
from octavo.layers.layer import BuildContext, Layer, LoadTarget, copy_into, empty_parameter


class RMSNorm(Layer):
    """Root mean square normalization over the last dimension (arXiv 1910.07467)."""

    weight: torch.nn.Parameter

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.size = size
        self.eps = eps

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.weight = empty_parameter(self.size, build=build)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        return {f"{prefix}.weight": LoadTarget((self.size,), copy_into(self.weight))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., size]`."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a sublayer's output `x` to the residual stream (in place) and normalize the sum.

        With no stream yet, `x` becomes it. Returns the normalized sum and the stream, `[rows, size]` each.
        """
        if residual is None:
            return self(x), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
