"""RMS and layer normalization, alone or fused with the residual addition before them."""

from __future__ import annotations

import torch

from octavo.kernels import ops
from octavo.layers.layer import BuildContext, Layer, LoadTarget, copy_into, empty_parameter
from octavo.parallel.state import TensorParallelGroup


class Norm(Layer):
    """What all norms of the residual stream share.

    Attributes:
        sums: whether what `add` adds to a stream comes as this rank's part of a sum over ranks, which the
            norm then makes: all in one kernel where there is one. Set it before the weights are made.
    """

    group: TensorParallelGroup
    sums = False

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        self.sums = self.sums and build.group.size > 1

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """What `add` takes for a stream, added up over the ranks; `x` stays as it is."""
        return self.group.all_reduce(x.clone()) if self.sums else x


class RMSNorm(Norm):
    """Root mean square normalization over the last dimension (arXiv 1910.07467).

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: of the weight: the checkpoint stores w and the norm multiplies by `offset + w` (Gemma: 1).
            Where it is not 0 the parameter holds the sum, in float32, and the product is rounded once.
    """

    weight: torch.nn.Parameter

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.size = size
        self.eps = eps
        self.offset = offset

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        super().create_weights(build, prefix)
        if self.offset:
            wide = torch.empty(self.size, dtype=torch.float32, device=build.device)
            self.weight = torch.nn.Parameter(wide, requires_grad=False)
        else:
            self.weight = empty_parameter(self.size, build=build)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        return {f"{prefix}.weight": LoadTarget((self.size,), self._load)}

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)
        if self.offset:
            self.weight.add_(self.offset)

    @property
    def rms_weight(self) -> torch.Tensor | None:
        """The norm's whole parameters but for `eps`: kernels that take the norm in ask for them. None: it
        adds up over ranks first, which those don't."""
        return None if self.sums else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., size]`."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a sublayer's output `x` to the residual stream (in place) and normalize the sum.

        With no stream yet, `x` becomes it (and is whole, `sums` or not). Returns the normalized sum and the
        stream, `[rows, size]` each.
        """
        if residual is None:
            return self(x), x
        if self.sums:
            return self.group.add_rms_norm(x, residual, self.weight, self.eps)
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(Norm):
    """Layer normalization over the last dimension (arXiv 1607.06450).

    Args:
        size: of the last dimension.
        eps: added to the variance.
        bias: does the checkpoint have one?
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    rms_weight = None  # not such a norm

    def __init__(self, size: int, eps: float, bias: bool = True):
        super().__init__()
        self.size = size
        self.eps = eps
        self.has_bias = bias

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        super().create_weights(build, prefix)
        if self.sums:
            raise NotImplementedError("a layer norm adds nothing up over ranks")
        self.weight = empty_parameter(self.size, build=build)
        self.bias = empty_parameter(self.size, build=build) if self.has_bias else None

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets = {f"{prefix}.weight": LoadTarget((self.size,), copy_into(self.weight))}
        if self.bias is not None:
            targets[f"{prefix}.bias"] = LoadTarget((self.size,), copy_into(self.bias))
        return targets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[rows, size]`."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a sublayer's output to the residual stream and normalize the sum: see `RMSNorm.add`."""
        if residual is None:
            return self(x), x
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
