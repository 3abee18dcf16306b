"""How the weights of a linear layer are stored, loaded, repacked and applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """Which piece of a checkpoint's `[out, in]` matrix goes where in a layer's own matrix.

    The piece is rows `row .. row + rows` and columns `col .. col + cols` of the checkpoint's matrix;
    it becomes rows `target .. target + rows` (all columns) of the layer's.
    """

    target: int
    row: int
    rows: int
    col: int
    cols: int


class LinearMethod(ABC):
    """Owns the representation of a linear layer's matrix; the layer owns how it is sharded.

    A method is stateless: it registers parameters on the layer and reads them back. The bias, which
    no format quantizes, is the layer's.
    """

    name: str

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register uninitialised parameters for a `[out_features, in_features]` matrix on `layer`.

        Sizes are this rank's; `dtype` is the type of activations.
        """

    @abstractmethod
    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Name (`weight`, `weight_scale`, …) and full shape of each tensor a checkpoint stores for a
        matrix of that size."""

    @abstractmethod
    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        """Copy this rank's piece of the full checkpoint tensor `name` into `layer`."""

    def process_after_load(self, layer: nn.Module) -> None:  # noqa: B027 (optional hook)
        """Repack once all shards are there."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W^T + bias`: `[rows, in]` to `[rows, out]`, in `x`'s dtype."""


class UnquantizedLinearMethod(LinearMethod):
    """The matrix as it is, `weight [out, in]` in the activations' dtype."""

    name = "unquantized"

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (out_features, in_features)}

    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        piece = tensor[shard.row : shard.row + shard.rows, shard.col : shard.col + shard.cols]
        layer.get_parameter("weight")[shard.target : shard.target + shard.rows].copy_(piece)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)  # type: ignore[arg-type]


def linear_method(quantization: str | None, prefix: str) -> LinearMethod:
    """The method for the layer named `prefix` under a quantization setting.

    Raises:
        ConfigError: a setting that this version does not know.
    """
    if quantization is None:
        return UnquantizedLinearMethod()
    raise ConfigError(f"quantization={quantization!r} is not supported by this version: leave it out")
